"""Whole numbers that remember their calculation; sums that are too hard for the model are refused."""

from __future__ import annotations

LARGEST = 200
LARGEST_PRODUCT = 150
LARGEST_FACTOR = 10


class Reject(Exception):
    """The random numbers make a sum outside the limits: draw again."""


class Sum(int):
    """An integer with the calculation that gave it: `add(12, 15)` prints as `27`, its `text` is `12 + 15 = 27`."""

    text: str

    def __new__(cls, value: int, left: str) -> Sum:
        """Keep `value`, which must be positive and at most LARGEST, with the text of its left side."""
        if not 0 < value <= LARGEST:
            raise Reject(left)
        self = super().__new__(cls, value)
        self.text = f"{left} = {value}"
        return self


def add(*terms: int) -> Sum:
    """The sum of two or more terms."""
    return Sum(sum(int(term) for term in terms), " + ".join(str(int(term)) for term in terms))


def sub(left: int, right: int) -> Sum:
    """The difference, which must be positive."""
    return Sum(int(left) - int(right), f"{int(left)} - {int(right)}")


def mul(left: int, right: int) -> Sum:
    """The product; the smaller factor is at most LARGEST_FACTOR."""
    if min(left, right) > LARGEST_FACTOR or int(left) * int(right) > LARGEST_PRODUCT:
        raise Reject(f"{left} * {right}")
    return Sum(int(left) * int(right), f"{int(left)} * {int(right)}")


def div(left: int, right: int) -> Sum:
    """The quotient, which must be whole; the divisor is at most LARGEST_FACTOR."""
    if int(left) % int(right) or min(int(right), int(left) // int(right)) > LARGEST_FACTOR:
        raise Reject(f"{left} / {right}")
    return Sum(int(left) // int(right), f"{int(left)} / {int(right)}")
