"""The vocabulary of the templates."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


BOYS = _words(
    """Tom Ben Sam Jack Leo Max Adam Paul Peter David Mark John James Daniel Luke Oscar Henry Carl Omar Ivan Hugo
    Ravi Victor George Martin Alex Simon Frank Noah Eric"""
)
GIRLS = _words(
    """Anna Mary Lucy Emma Sara Julia Nina Clara Laura Alice Maria Ella Grace Sophie Helen Rosa Eva Mia Jane Kate
    Lily Amy Olga Zoe Diana Ruth Irene Paula Tina Vera"""
)
THINGS = _words(
    """apples pencils marbles stickers books cards coins shells buttons cookies oranges eggs stamps balloons flowers
    candies beads cups toys plates pears lemons photos bottles notebooks ribbons peaches muffins crayons keys"""
)
BOXES = _words("boxes bags packs baskets crates")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SHOP = {
    "pen": (1, 6),
    "book": (5, 25),
    "shirt": (9, 40),
    "lamp": (12, 60),
    "hat": (6, 30),
    "cake": (4, 20),
    "ball": (3, 18),
    "chair": (20, 70),
    "cup": (2, 9),
    "bag": (10, 50),
    "puzzle": (6, 24),
    "plant": (4, 19),
    "scarf": (7, 28),
    "toy": (3, 22),
}
"""Goods with their lowest and highest price in dollars."""


def singular(plural: str) -> str:
    """The singular of a word of THINGS or BOXES."""
    if plural.endswith(("boxes", "peaches")):
        return plural[:-2]
    return {"candies": "candy", "cookies": "cookie"}.get(plural, plural[:-1])
