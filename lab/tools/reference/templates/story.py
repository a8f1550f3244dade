"""A store of things that changes step by step: the longest and most varied of the templates."""

from __future__ import annotations

from collections.abc import Callable

from .draw import Draw, Person
from .sums import Reject, Sum, add, div, mul, sub
from .vocabulary import BOXES

Event = Callable[[Draw, Person, str, int], tuple[str, str, Sum]]


def _now(d: Draw, who: Person, things: str, value: Sum) -> str:
    return d.pick(
        [
            f"Now {who.he} has {value.text} {things}.",
            f"That makes {value.text} {things}.",
            f"So {who.he} has {value.text} {things} now.",
        ]
    )


def _left(d: Draw, who: Person, things: str, value: Sum) -> str:
    return d.pick(
        [
            f"Now {who.he} has {value.text} {things} left.",
            f"That leaves {value.text} {things}.",
            f"So {value.text} {things} are left.",
        ]
    )


def buys(d: Draw, who: Person, things: str, have: int) -> tuple[str, str, Sum]:
    """Some more are bought one by one."""
    n = d.number(3, 60)
    verb = d.pick(["buys", "finds", "gets", "is given"])
    now = add(have, n)
    return f"{who.He} {verb} {n} more {things}.", f"{who.He} {verb} {n} more. {_now(d, who, things, now)}", now


def packs(d: Draw, who: Person, things: str, have: int) -> tuple[str, str, Sum]:
    """Some more are bought in equal packs."""
    count, each, box = d.number(2, 9), d.number(2, 12), d.pick(BOXES)
    more = mul(count, each)
    now = add(have, more)
    told = d.pick(
        [f"{who.He} buys {count} {box} with {each} {things} each.", f"{who.He} buys {count} {box} of {each} {things}."]
    )
    return told, f"The {count} {box} hold {more.text} {things}. {_now(d, who, things, now)}", now


def loses(d: Draw, who: Person, things: str, have: int) -> tuple[str, str, Sum]:
    """Some go."""
    n = d.number(2, 50)
    verb = d.pick(["loses", "gives away", "sells", "uses"])
    now = sub(have, n)
    return f"Then {who.he} {verb} {n} {things}.", f"{who.He} {verb} {n}. {_left(d, who, things, now)}", now


def gives(d: Draw, who: Person, things: str, have: int) -> tuple[str, str, Sum]:
    """Friends get the same number each."""
    count, each = d.number(2, 8), d.number(2, 9)
    gone = mul(count, each)
    now = sub(have, gone)
    told = f"{who.He} gives {each} {things} to each of {who.his} {count} friends."
    return told, f"The {count} friends get {gone.text} {things}. {_left(d, who, things, now)}", now


def halves(d: Draw, who: Person, things: str, have: int) -> tuple[str, str, Sum]:
    """Half of them go."""
    if have % 2:
        raise Reject(f"{have} / 2")
    half = Sum(have // 2, f"{have} / 2")
    now = sub(have, half)
    told = d.pick([f"{who.He} gives half of {who.his} {things} away.", f"{who.He} sells half of the {things}."])
    return told, f"Half of {have} is {half.text}. {_left(d, who, things, now)}", now


def doubles(d: Draw, who: Person, things: str, have: int) -> tuple[str, str, Sum]:
    """Somebody doubles what is there."""
    now = Sum(2 * have, f"{have} * 2")
    other = d.pick(["uncle", "aunt", "mother", "father", "teacher"])
    return f"Then {who.his} {other} doubles the number of {things}.", f"Twice {have} is {now.text}.", now


def splits(d: Draw, who: Person, things: str, have: int) -> tuple[str, str, Sum]:
    """All are put into equal boxes and some boxes go."""
    count = d.number(3, 9)
    each = div(have, count)
    gone = d.number(1, count - 1)
    now = mul(count - gone, each)
    box = d.pick(BOXES)
    told = f"{who.He} puts all {things} into {count} {box}, equally, and gives {gone} of the {box} away."
    worked = (
        f"Each of the {box} holds {each.text} {things}. "
        f"There are {sub(count, gone).text} {box} left, with {now.text} {things}."
    )
    return told, worked, now


EVENTS: list[Event] = [buys, buys, packs, packs, loses, loses, gives, gives, halves, doubles, splits]


def story(d: Draw) -> tuple[list[str], list[str], int]:
    """Two to six events in a row."""
    who, things = d.person(), d.thing()
    have = d.number(5, 90)
    verb = d.pick(["has", "starts with", "owns"])
    told, worked = [f"{who} {verb} {have} {things}."], [f"{who} {verb} {have} {things}."]
    for _ in range(d.number(2, 6)):
        text, answer, now = d.pick(EVENTS)(d, who, things, have)
        have = now
        told.append(text)
        worked.append(answer)
    asked = d.pick([f"How many {things} does {who} have in the end?", f"How many {things} does {who.he} have now?"])
    return [*told, asked], worked, have
