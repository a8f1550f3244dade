"""Templates about prices, wages and savings."""

from __future__ import annotations

from .draw import Draw
from .sums import add, div, mul, sub
from .vocabulary import SHOP, singular

Text = tuple[list[str], list[str], int]


def shopping(d: Draw) -> Text:
    """Several goods, each so many times; perhaps with the change."""
    who = d.person()
    goods = d.source.sample(sorted(SHOP), d.number(2, 4))
    prices = [d.number(*SHOP[good]) for good in goods]
    counts = [d.number(2, 8) for _ in goods]
    told = [
        f"{who} buys "
        + ", ".join(f"{n} {g}s at ${p} each" for n, g, p in zip(counts, goods, prices, strict=True))
        + "."
    ]
    costs = [mul(n, p) for n, p in zip(counts, prices, strict=True)]
    worked = [f"The {n} {g}s cost {c.text} dollars." for n, g, c in zip(counts, goods, costs, strict=True)]
    total = costs[0]
    for cost in costs[1:]:
        total = add(total, cost)
        worked.append(f"Together that is {total.text} dollars.")
    if d.number(0, 1):
        return [*told, d.pick([f"How much does {who.he} pay?", f"How many dollars does {who} spend?"])], worked, total
    purse = int(total) + d.number(1, 60)
    change = sub(purse, total)
    told += [f"{who.He} has ${purse}.", f"How much money does {who.he} have left?"]
    return told, [*worked, f"{who.He} has {change.text} dollars left."], change


def wages(d: Draw) -> Text:
    """Hours on two or three days at an hourly wage, less what is spent."""
    who = d.person()
    days = d.source.sample(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"], d.number(2, 3))
    hours = [d.number(2, 9) for _ in days]
    rate, spent = d.number(6, 20), d.number(5, 80)
    told = [f"{who} earns ${rate} an hour."]
    told += [f"On {day} {who.he} works {n} hours." for day, n in zip(days, hours, strict=True)]
    total = add(*hours)
    pay = mul(total, rate)
    worked = [f"{who} works {total.text} hours.", f"{who.He} earns {pay.text} dollars."]
    if d.number(0, 1):
        left = sub(pay, spent)
        told += [f"{who.He} spends ${spent} on food.", f"How much of the pay is left for {who}?"]
        return told, [*worked, f"After food {who.he} has {left.text} dollars left."], left
    return [*told, f"How much does {who.he} earn in all?"], worked, pay


def saving(d: Draw) -> Text:
    """How many weeks until there is enough for something."""
    who, weekly, weeks = d.person(), d.number(2, 20), d.number(2, 15)
    have, good = d.number(5, 60), d.pick(["bicycle", "guitar", "camera", "coat", "radio", "tent"])
    gap = mul(weekly, weeks)
    price = int(add(gap, have))
    told = [
        f"{who} wants a {good} that costs ${price}.",
        f"{who.He} has ${have} and saves ${weekly} every week.",
        f"After how many weeks can {who.he} buy the {good}?",
    ]
    missing = sub(price, have)
    answer = div(missing, weekly)
    return (
        told,
        [f"{who} still needs {missing.text} dollars.", f"At {weekly} dollars a week that takes {answer.text} weeks."],
        answer,
    )


def profit(d: Draw) -> Text:
    """Bought cheap, sold dear."""
    who, things = d.person(), d.thing()
    count, cost, gain = d.number(4, 30), d.number(1, 12), d.number(1, 8)
    price = cost + gain
    paid, taken = mul(count, cost), mul(count, price)
    told = [f"{who} buys {count} {things} for ${cost} each and sells them for ${price} each."]
    worked = [f"{who} pays {paid.text} dollars.", f"{who.He} takes in {taken.text} dollars."]
    made = sub(taken, paid)
    worked.append(f"So {who.he} makes {made.text} dollars.")
    if d.number(0, 1):
        stall = d.number(2, 25)
        left = sub(made, stall)
        told += [f"The stall costs ${stall}.", f"How much profit does {who} make?"]
        return told, [*worked, f"After paying for the stall {left.text} dollars are left."], left
    return [*told, f"How much profit does {who} make?"], worked, made


def discount(d: Draw) -> Text:
    """A percentage off a price, then several pieces."""
    who, good = d.person(), d.pick(["coat", "lamp", "chair", "table", "jacket", "bike", "desk"])
    percent, price, count = d.pick([10, 20, 25, 50]), 20 * d.number(1, 10), d.number(2, 6)
    part = 100 // percent
    off = div(price, part)
    now = sub(price, off)
    total = mul(count, now)
    told = [
        f"A {good} costs ${price}. In a sale it is {percent} % cheaper.",
        f"{who} buys {count} of the {good}s in the sale. How much does {who.he} pay?",
    ]
    worked = [
        f"{percent} % is one of {part} equal parts, so the price falls by {off.text} dollars.",
        f"One {good} now costs {now.text} dollars.",
        f"{count} of them cost {total.text} dollars.",
    ]
    return told, worked, total


def handles(d: Draw) -> Text:
    """Adults and children pay different prices."""
    adults, children = d.number(2, 20), d.number(2, 30)
    dear, cheap = d.number(6, 20), d.number(2, 9)
    place = d.pick(["zoo", "museum", "circus", "cinema", "fair"])
    told = [
        f"A ticket for the {place} costs ${dear} for adults and ${cheap} for children.",
        f"{adults} adults and {children} children go in. How much do they pay together?",
    ]
    first, second = mul(adults, dear), mul(children, cheap)
    total = add(first, second)
    worked = [
        f"The adults pay {first.text} dollars.",
        f"The children pay {second.text} dollars.",
        f"Together they pay {total.text} dollars.",
    ]
    return told, worked, total


def share_bill(d: Draw) -> Text:
    """A bill of several dishes, shared equally."""
    friends, each = d.number(2, 8), d.number(6, 25)
    total = mul(friends, each)
    first = d.number(3, int(total) // 2)
    second = d.number(2, int(total) - first - 1)
    third = sub(sub(total, first), second)
    told = [
        f"{friends} friends eat together. The soup costs ${first}, the fish ${second} and the cake ${int(third)}.",
        "They share the bill equally. How much does each of them pay?",
    ]
    start = add(first, second)
    whole = add(start, third)
    worked = [
        f"Soup and fish cost {start.text} dollars.",
        f"With the cake the bill is {whole.text} dollars.",
        f"Each friend pays {div(whole, friends).text} dollars.",
    ]
    return told, worked, each


def swap(d: Draw) -> Text:
    """Things sold to buy other things."""
    who, (mine, other) = d.person(), d.things(2)
    count, price, cost = d.number(4, 30), d.number(2, 9), d.number(2, 9)
    money = mul(count, price)
    answer = div(money, cost)
    told = [
        f"{who} sells {count} {mine} for ${price} each.",
        f"With the money {who.he} buys {other} at ${cost} each. How many {other} does {who.he} get?",
    ]
    worked = [
        f"{who} gets {money.text} dollars for the {mine}.",
        f"A {singular(other)} costs {cost} dollars, so {who.he} gets {answer.text} {other}.",
    ]
    return told, worked, answer


MONEY = [shopping, wages, saving, profit, discount, handles, share_bill, swap]
