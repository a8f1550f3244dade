"""Templates that compare people: more, fewer, times as many, ages, turns."""

from __future__ import annotations

from .draw import Draw
from .sums import Sum, add, div, mul, sub

Text = tuple[list[str], list[str], int]


def _compared(d: Draw, name: object, than: object, have: int, things: str) -> tuple[str, str, Sum]:
    way = d.number(0, 3)
    if way == 0:
        n = d.number(2, 40)
        value = add(have, n)
        return f"{name} has {n} more {things} than {than}.", f"{name} has {value.text} {things}.", value
    if way == 1:
        n = d.number(2, 40)
        value = sub(have, n)
        return f"{name} has {n} fewer {things} than {than}.", f"{name} has {value.text} {things}.", value
    if way == 2:
        n = d.number(2, 5)
        value = mul(have, n)
        times = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[n]
        return f"{name} has {times} as many {things} as {than}.", f"{name} has {value.text} {things}.", value
    value = div(have, 2)
    return f"{name} has half as many {things} as {than}.", f"{name} has {value.text} {things}.", value


def comparison(d: Draw) -> Text:
    """A chain of people, each compared with the one before; asked is the last or all together."""
    people, things = d.people(d.number(3, 5)), d.thing()
    have = d.number(4, 60)
    told, worked, values = [f"{people[0]} has {have} {things}."], [f"{people[0]} has {have} {things}."], [have]
    for before, who in zip(people, people[1:], strict=False):
        text, answer, value = _compared(d, who, before, values[-1], things)
        told.append(text)
        worked.append(answer)
        values.append(value)
    if d.number(0, 2) == 0:
        return [*told, f"How many {things} does {people[-1]} have?"], worked, values[-1]
    total = values[0]
    for value, who in zip(values[1:], people[1:], strict=True):
        total = add(total, value)
        worked.append(f"With those of {who} that makes {total.text} {things}.")
    return [*told, f"How many {things} do they have together?"], worked, total


def ages(d: Draw) -> Text:
    """Ages now and in some years."""
    first, second, third = d.people(3)
    age, gap, years = d.number(4, 30), d.number(2, 15), d.number(2, 12)
    told = [f"{first} is {age} years old.", f"{second} is {gap} years older than {first}."]
    older = add(age, gap)
    double = mul(2, older)
    told.append(f"{third} is twice as old as {second}.")
    then = add(double, years)
    told.append(f"How old will {third} be in {years} years?")
    worked = [
        f"{second} is {older.text} years old.",
        f"{third} is {double.text} years old.",
        f"In {years} years {third} will be {then.text} years old.",
    ]
    return told, worked, then


def age_sum(d: Draw) -> Text:
    """The ages of three together, some years ago or from now."""
    first, second, third = d.people(3)
    age, older, younger, years = d.number(12, 40), d.number(2, 20), d.number(2, 9), d.number(2, 9)
    two, three = add(age, older), sub(age, younger)
    now = add(add(age, two), three)
    change = mul(3, years)
    then = add(now, change)
    told = [
        f"{first} is {age} years old. {second} is {older} years older "
        f"and {third} is {younger} years younger than {first}.",
        f"How old will the three be together in {years} years?",
    ]
    worked = [
        f"{second} is {two.text} years old.",
        f"{third} is {three.text} years old.",
        f"{first} and {second} are {add(age, two).text} years old together.",
        f"With {third} that is {now.text} years.",
        f"In {years} years three people gain {change.text} years.",
        f"So they will be {then.text} years old together.",
    ]
    return told, worked, then


def sharing(d: Draw) -> Text:
    """Two people put things together and share them among all."""
    first, second = d.people(2)
    things = d.thing()
    people, each = d.number(2, 9), d.number(3, 20)
    total = mul(people, each)
    mine = d.number(2, int(total) - 2)
    yours = int(sub(total, mine))
    told = [
        f"{first} has {mine} {things} and {second} has {yours} {things}.",
        f"They put them together and share them equally among {people} children.",
    ]
    whole = add(mine, yours)
    part = div(whole, people)
    worked = [f"Together they have {whole.text} {things}.", f"Each child gets {part.text} {things}."]
    if d.number(0, 1):
        ate = d.number(1, each - 1)
        left = sub(part, ate)
        told += [f"Each child then uses {ate} of them.", f"How many {things} does each child have left?"]
        return told, [*worked, f"After using {ate} each child has {left.text} {things} left."], left
    return [*told, f"How many {things} does each child get?"], worked, part


def reading(d: Draw) -> Text:
    """Pages of a book over some days."""
    who, daily, days = d.person(), d.number(5, 20), d.number(2, 9)
    read = mul(daily, days)
    more, rest = d.number(3, 40), d.number(5, 90)
    so_far = add(read, more)
    pages = int(add(so_far, rest))
    told = [
        f"{who} reads a book of {pages} pages. For {days} days {who.he} reads {daily} pages a day.",
        f"On the next day {who.he} reads {more} pages. How many pages are left?",
    ]
    left = sub(pages, so_far)
    worked = [
        f"In {days} days {who.he} reads {read.text} pages.",
        f"After the next day {who.he} has read {so_far.text} pages.",
        f"There are {left.text} pages left.",
    ]
    return told, worked, left


def team_points(d: Draw) -> Text:
    """Points of a game with goals of two values."""
    first, second = d.people(2)
    small, large = d.number(1, 3), d.number(4, 6)
    counts = [d.number(2, 12) for _ in range(4)]
    told = [
        f"In a game a short throw gives {small} points and a long throw gives {large} points.",
        f"{first} makes {counts[0]} short and {counts[1]} long throws. "
        f"{second} makes {counts[2]} short and {counts[3]} long throws.",
    ]
    scores, worked = [], []
    for who, low, high in ((first, counts[0], counts[1]), (second, counts[2], counts[3])):
        one, two = mul(low, small), mul(high, large)
        scores.append(add(one, two))
        worked.append(
            f"{who} gets {one.text} points for short throws and {two.text} points for long throws, "
            f"so {scores[-1].text} points."
        )
    if d.number(0, 1):
        total = add(*scores)
        return (
            [*told, "How many points do they have together?"],
            [*worked, f"Together they have {total.text} points."],
            total,
        )
    best, worst = sorted(scores, reverse=True)
    gap = sub(best, worst)
    return (
        [*told, "By how many points does the better one win?"],
        [*worked, f"The difference is {gap.text} points."],
        gap,
    )


def collections(d: Draw) -> Text:
    """One person with three kinds of things, related to each other."""
    who, (first, second, third) = d.person(), d.things(3)
    base = d.number(4, 40)
    text, answer, two = _compared_kind(d, second, first, base)
    other, reply, three = _compared_kind(d, third, second, two)
    part = add(base, two)
    total = add(part, three)
    told = [f"{who} has {base} {first}.", text, other, f"How many things does {who.he} have in all?"]
    worked = [
        f"There are {base} {first}.",
        answer,
        reply,
        f"{first.capitalize()} and {second} are {part.text}.",
        f"With the {third} there are {total.text} things.",
    ]
    return told, worked, total


def _compared_kind(d: Draw, this: str, that: str, have: int) -> tuple[str, str, Sum]:
    n = d.number(2, 30)
    if d.number(0, 1):
        value = add(have, n)
        return f"There are {n} more {this} than {that}.", f"There are {value.text} {this}.", value
    times = d.number(2, 4)
    value = mul(have, times)
    return f"There are {times} times as many {this} as {that}.", f"There are {value.text} {this}.", value


PEOPLE = [comparison, ages, age_sum, sharing, reading, team_points, collections]
