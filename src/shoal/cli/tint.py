"""Colour of a token by its depth: from deep water to the shallows; green where it was guessed ahead and kept.

Knows terminals and depths, not engines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

_DEEP = (96, 150, 235)
_SHALLOW = (240, 205, 110)
_DEEP_GUESS = (70, 190, 120)
_SHALLOW_GUESS = (190, 225, 120)
_RESET = "\x1b[0m"


@dataclass(frozen=True)
class Tint:
    """Paints text on a ramp between two depths.

    Attributes:
        shallow: number of layers at the light end of the ramp.
        deep: number of layers at the dark end.
        truecolor: 24-bit colours, else the 256 of xterm.
    """

    shallow: float
    deep: float
    truecolor: bool = True

    def paint(self, text: str, depth: float, guessed: bool = False) -> str:
        """`text` in the colour of `depth`, and back to the terminal's own."""
        return f"\x1b[38;{self._colour(depth, guessed)}m{text}{_RESET}" if text else ""

    def _colour(self, depth: float, guessed: bool) -> str:
        deep, shallow = (_DEEP_GUESS, _SHALLOW_GUESS) if guessed else (_DEEP, _SHALLOW)
        span = self.deep - self.shallow
        share = min(max((self.deep - depth) / span, 0.0), 1.0) if span > 0 else 0.0
        red, green, blue = (round(a + (b - a) * share) for a, b in zip(deep, shallow, strict=True))
        if self.truecolor:
            return f"2;{red};{green};{blue}"
        return f"5;{16 + 36 * _cube(red) + 6 * _cube(green) + _cube(blue)}"


def _cube(channel: int) -> int:
    """The nearest of the six levels 0, 95, 135, 175, 215, 255 of the xterm cube."""
    return 0 if channel < 48 else 1 if channel < 115 else (channel - 35) // 40


def wanted(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour what goes to `stream`: a terminal that can, and nobody said NO_COLOR."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def has_truecolor(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal announces 24-bit colours."""
    return environ.get("COLORTERM", "") in ("truecolor", "24bit")
