"""Generated pictures of counted and coloured shapes, with questions of one-word answers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIDE, PATCH = 48, 8
"""Pixels of a picture's side, and of a patch's."""
TOKENS = (SIDE // PATCH) ** 2
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (235, 215, 50),
           "purple": (150, 50, 190), "white": (250, 250, 250)}
KINDS = ("circle", "square", "triangle", "cross")
COUNTS = ("one", "two", "three")
_CELLS, _CELL = 3, 16
"""Each shape has one of 3 x 3 cells to itself."""
_LEAST = 10
"""Pixels of a patch from which on it shows a shape."""


@dataclass(frozen=True)
class Group:
    """Equal shapes of a picture; no other group has its colour or its kind."""

    count: int
    colour: str
    kind: str

    @property
    def words(self) -> tuple[str, str, str]:
        """Count, colour and kind."""
        return COUNTS[self.count - 1], self.colour, self.kind


@dataclass(frozen=True)
class ShapeQuestion:
    """A question, its one-word answer and what it is about: count, colour or kind."""

    text: str
    answer: str
    about: str


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn: one to three groups of one to three shapes.

    Attributes:
        seed: of everything; equal seeds give equal pictures.
    """

    seed: int

    @cached_property
    def groups(self) -> list[Group]:
        """What it shows."""
        draw = random.Random(f"{self.seed} groups")
        number = draw.randint(1, 3)
        return [Group(draw.randint(1, 3), colour, kind) for colour, kind in zip(
            draw.sample(list(COLOURS), number), draw.sample(KINDS, number), strict=True)]

    @cached_property
    def questions(self) -> list[ShapeQuestion]:
        """Three for each group."""
        return [one for group in self.groups for one in (
            ShapeQuestion(f"How many {_plural(group.kind)}?", group.words[0], "count"),
            ShapeQuestion(f"What colour is the {group.kind}?", group.colour, "colour"),
            ShapeQuestion(f"Which shape is {group.colour}?", group.kind, "kind"))]

    def drawn(self) -> tuple[Image, list[Group | None]]:
        """The picture, RGB [SIDE, SIDE], and for each patch, row by row, the group that it shows most of."""
        from PIL import Image, ImageDraw

        draw = random.Random(f"{self.seed} places")
        shade = draw.randint(60, 150)
        picture = Image.new("RGB", (SIDE, SIDE), tuple(shade + draw.randint(-15, 15) for _ in range(3)))
        marks = Image.new("L", (SIDE, SIDE), 0)
        pens = ImageDraw.Draw(picture), ImageDraw.Draw(marks)
        cells = iter(draw.sample(range(_CELLS**2), _CELLS**2))
        for number, group in enumerate(self.groups, start=1):
            for _ in range(group.count):
                row, column = divmod(next(cells), _CELLS)
                size = draw.uniform(5, 6.5)
                at = [_CELL * (place + 0.5) + draw.uniform(-1.5, 1.5) for place in (column, row)]
                colour = tuple(min(255, max(0, part + draw.randint(-20, 20))) for part in COLOURS[group.colour])
                _draw(pens[0], group.kind, at, size, colour)
                _draw(pens[1], group.kind, at, size, number)
        return picture, [self._shown(marks, patch) for patch in range(TOKENS)]

    def _shown(self, marks: Image, patch: int) -> Group | None:
        row, column = divmod(patch, SIDE // PATCH)
        box = column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH
        counts = marks.crop(box).histogram()[1 : len(self.groups) + 1]
        return self.groups[counts.index(max(counts))] if max(counts) >= _LEAST else None


def _draw(pen: ImageDraw, kind: str, at: list[float], size: float, ink: int | tuple[int, ...]) -> None:
    x, y = at
    if kind == "circle":
        pen.ellipse((x - size, y - size, x + size, y + size), fill=ink)
    elif kind == "square":
        pen.rectangle((x - size * 0.9, y - size * 0.9, x + size * 0.9, y + size * 0.9), fill=ink)
    elif kind == "triangle":
        corners = [(x + size * math.sin(turn), y - size * math.cos(turn)) for turn in (0, 2.2, -2.2)]
        pen.polygon(corners, fill=ink)
    else:
        thin = size * 0.35
        pen.rectangle((x - size, y - thin, x + size, y + thin), fill=ink)
        pen.rectangle((x - thin, y - size, x + thin, y + size), fill=ink)


def _plural(kind: str) -> str:
    return kind + ("es" if kind.endswith("s") else "s")
