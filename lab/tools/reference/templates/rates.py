"""Templates about travel, work, containers and anything so much per so much."""

from __future__ import annotations

from .draw import Draw
from .sums import add, div, mul, sub
from .vocabulary import BOXES, DAYS, singular

Text = tuple[list[str], list[str], int]


def travel(d: Draw) -> Text:
    """A journey in two or three legs at different speeds."""
    who = d.person()
    vehicle = d.pick(["by car", "by bus", "by train", "by bicycle"])
    legs = [(d.number(2, 9), d.number(10, 80)) for _ in range(d.number(2, 3))]
    told = [f"{who} travels {vehicle}."]
    worked, total = [], 0
    for index, (hours, speed) in enumerate(legs):
        start = "First" if index == 0 else "Then"
        told.append(f"{start} {who.he} goes {hours} hours at {speed} km an hour.")
        way = mul(hours, speed)
        worked.append(f"In {hours} hours {who.he} goes {way.text} km.")
        if index:
            whole = add(total, way)
            worked.append(f"So far that is {whole.text} km.")
            total = int(whole)
        else:
            total = int(way)
    if d.number(0, 1):
        goal = total + d.number(5, 200)
        left = sub(goal, total)
        told.append(f"The whole way is {goal} km. How many km are left?")
        return told, [*worked, f"There are {left.text} km left."], left
    return [*told, f"How many km does {who.he} travel in all?"], worked, total


def tank(d: Draw) -> Text:
    """Water runs in and out of a tank."""
    start, inflow, outflow, minutes = d.number(10, 200), d.number(6, 30), d.number(1, 12), d.number(3, 15)
    told = [
        f"A tank holds {start} litres of water. Every minute {inflow} litres run in and {outflow} litres run out.",
        f"How many litres are in the tank after {minutes} minutes?",
    ]
    gain = sub(inflow, outflow)
    more = mul(gain, minutes)
    end = add(start, more)
    worked = [
        f"Every minute the tank gains {gain.text} litres.",
        f"In {minutes} minutes that is {more.text} litres.",
        f"Then the tank holds {end.text} litres.",
    ]
    return told, worked, end


def packing(d: Draw) -> Text:
    """Things into boxes, with some that are broken."""
    things, box = d.thing(), d.pick(BOXES)
    count, each = d.number(3, 15), d.number(3, 20)
    good = mul(count, each)
    bad = d.number(2, 40)
    whole = int(add(good, bad))
    told = [
        f"A shop gets {whole} {things}, but {bad} of them are broken.",
        f"The rest are packed into {box} with {each} {things} each. How many {box} are needed?",
    ]
    rest = sub(whole, bad)
    needed = div(rest, each)
    if d.number(0, 1):
        price = d.number(2, 12)
        money = mul(needed, price)
        told[1] = (
            f"The rest are packed into {box} with {each} {things} each, and each {singular(box)} is sold for ${price}. "
            "How much money comes in?"
        )
        worked = [
            f"There are {rest.text} good {things}.",
            f"They fill {needed.text} {box}.",
            f"The {box} bring {money.text} dollars.",
        ]
        return told, worked, money
    return told, [f"There are {rest.text} good {things}.", f"They fill {needed.text} {box}."], needed


def rows(d: Draw) -> Text:
    """Seats in rows, some of them taken."""
    count, each = d.number(4, 20), d.number(5, 30)
    seats = mul(count, each)
    taken, late = d.number(5, max(6, int(seats) // 2)), d.number(2, 30)
    told = [
        f"A hall has {count} rows of {each} seats. {taken} people sit down, then {late} more come.",
        "How many seats stay empty?",
    ]
    people = add(taken, late)
    empty = sub(seats, people)
    worked = [
        f"The hall has {seats.text} seats.",
        f"There are {people.text} people.",
        f"So {empty.text} seats stay empty.",
    ]
    return told, worked, empty


def machine(d: Draw) -> Text:
    """Two machines that make things at different rates."""
    things = d.thing()
    fast, slow, hours, more = d.number(8, 40), d.number(3, 20), d.number(2, 9), d.number(1, 6)
    told = [
        f"One machine makes {fast} {things} an hour, another one {slow} {things} an hour.",
        f"The first runs {hours} hours and the second {hours + more} hours. How many {things} do they make?",
    ]
    first, second = mul(hours, fast), mul(hours + more, slow)
    total = add(first, second)
    worked = [
        f"The first machine makes {first.text} {things}.",
        f"The second machine makes {second.text} {things}.",
        f"Together they make {total.text} {things}.",
    ]
    return told, worked, total


def farm(d: Draw) -> Text:
    """Animals, legs and eggs."""
    hens, cows, goats = d.number(3, 40), d.number(2, 30), d.number(2, 30)
    told = [f"A farm has {hens} hens, {cows} cows and {goats} goats."]
    if d.number(0, 1):
        two, four = mul(hens, 2), mul(add(cows, goats), 4)
        legs = add(two, four)
        worked = [
            f"The hens have {two.text} legs.",
            f"There are {add(cows, goats).text} animals with four legs, and they have {four.text} legs.",
            f"Together that makes {legs.text} legs.",
        ]
        return [*told, "How many legs do the animals have?"], worked, legs
    some = add(hens, cows)
    whole = add(some, goats)
    sold = d.number(2, 30)
    left = sub(whole, sold)
    told += [f"The farmer sells {sold} animals. How many animals are left?"]
    worked = [
        f"Hens and cows are {some.text}.",
        f"With the goats there are {whole.text} animals.",
        f"After the sale {left.text} animals are left.",
    ]
    return told, worked, left


def week(d: Draw) -> Text:
    """A number that grows by the same amount every day, summed up."""
    who, things = d.person(), d.thing()
    start, step, days = d.number(3, 30), d.number(2, 12), d.number(3, 5)
    first = d.number(0, 6)
    names = [DAYS[(first + day) % 7] for day in range(days)]
    told = [
        f"On {names[0]} {who} collects {start} {things}, and on each following day {step} more than on the day before.",
        f"How many {things} does {who.he} collect from {names[0]} to {names[-1]}?",
    ]
    worked, today, total = [f"On {names[0]} {who.he} collects {start} {things}."], start, start
    for name in names[1:]:
        value = add(today, step)
        whole = add(total, value)
        worked.append(f"On {name} it is {value.text}, so the total is {whole.text}.")
        today, total = int(value), int(whole)
    return told, worked, total


def bus(d: Draw) -> Text:
    """People get on and off at some stops."""
    riders = d.number(8, 60)
    told, worked = [f"A bus starts with {riders} people."], [f"The bus starts with {riders} people."]
    for index in range(d.number(2, 5)):
        off, on = d.number(1, 20), d.number(1, 20)
        stop = ["first", "second", "third", "fourth", "fifth"][index]
        told.append(f"At the {stop} stop {off} get off and {on} get on.")
        left = sub(riders, off)
        now = add(left, on)
        worked.append(f"After the {stop} stop there are {left.text} and then {now.text} people.")
        riders = int(now)
    return [*told, "How many people are on the bus now?"], worked, riders


def garden(d: Draw) -> Text:
    """Beds of plants, some of which die."""
    who, plant = d.person(), d.pick(["tulips", "roses", "beans", "carrots", "tomato plants", "trees"])
    beds, each, extra, dead = d.number(2, 12), d.number(3, 20), d.number(3, 40), d.number(2, 30)
    first = mul(beds, each)
    second = add(first, extra)
    left = sub(second, dead)
    told = [
        f"{who} has {beds} beds with {each} {plant} each and {extra} {plant} in pots.",
        f"In winter {dead} of the {plant} die. How many {plant} live on?",
    ]
    worked = [
        f"In the beds there are {first.text} {plant}.",
        f"With the pots there are {second.text} {plant}.",
        f"After the winter {left.text} {plant} live on.",
    ]
    return told, worked, left


RATES = [travel, tank, packing, rows, machine, farm, week, bus, garden]
