"""Run a command and draw what it says as a terminal in an SVG file, tints included.

    python tools/terminal_picture.py docs/images/terminal.svg shoal generate --method auto \
        --temperature 0 "What is the water cycle?"

The README's picture is made so, on an idle machine. The command runs under a terminal of its own, so it is what a user
sees; nothing is added but the line with the command.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

COLUMNS, SIZE, LINE, MARGIN = 100, 14, 20, 18
ADVANCE = 0.6 * SIZE  # of a character of a monospaced font
PLAIN, FAINT = "#c9d1d9", "#8b949e"
_CODE = re.compile(r"\x1b\[([\d;]*)m")
_OTHER = re.compile(r"\x1b\[[\d;?]*[A-LN-Za-ln-z]")
SpeedJob = tuple[str, str]


def main(out: str, *command: str) -> None:
    said = recorded(command)
    lines = [[(letter, FAINT) for letter in line] for line in shown(command)]
    lines += wrapped(list(cells(said)))
    Path(out).write_text(svg(lines), encoding="utf-8")


def recorded(command: tuple[str, ...]) -> str:
    """What a command writes to a terminal; SystemExit where it fails."""
    parts: list[bytes] = []

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        parts.append(data)
        return data

    os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    os.environ.pop("NO_COLOR", None)
    code = os.waitstatus_to_exitcode(pty.spawn(list(command), read))
    if code:
        raise SystemExit(f"{command[0]} ended with exit code {code}")
    return b"".join(parts).decode("utf-8").replace("\r\n", "\n")


def shown(command: tuple[str, ...]) -> list[str]:
    """The command as it would be typed, on as many lines as it takes."""
    words = shlex.join([Path(command[0]).name, *command[1:]]).replace("'", '"')
    return textwrap.wrap(f"$ {words}", COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def cells(text: str) -> Iterator[SpeedJob]:
    """Every character with its colour; what a carriage return writes over is left out, as progress bars are."""
    text = _OTHER.sub("", text)
    text = "\n".join(line.rsplit("\r", 1)[-1] for line in text.strip().split("\n"))
    colour, place = PLAIN, 0
    for code in [*_CODE.finditer(text), None]:
        end = len(text) if code is None else code.start()
        yield from ((letter, colour) for letter in text[place:end])
        if code is not None:
            place, colour = code.end(), _colour(code[1])


def _colour(code: str) -> str:
    numbers = [int(number) for number in code.split(";") if number]
    return "#{:02x}{:02x}{:02x}".format(*numbers[2:5]) if numbers[:2] == [38, 2] else PLAIN


def wrapped(row: list[SpeedJob]) -> list[list[SpeedJob]]:
    """Cells broken into lines: at line ends, and at the last blank before a line is full."""
    lines: list[list[SpeedJob]] = [[]]
    for cell in row:
        if cell[0] == "\n":
            lines.append([])
            continue
        lines[-1].append(cell)
        if len(lines[-1]) > COLUMNS:
            blank = max((i for i, (letter, _) in enumerate(lines[-1]) if letter == " "), default=None)
            end, start = (COLUMNS, COLUMNS) if blank is None else (blank, blank + 1)
            lines[-1:] = [lines[-1][:end], lines[-1][start:]]
    return lines


def svg(lines: list[list[SpeedJob]]) -> str:
    """The picture."""
    width, height = 2 * MARGIN + round(COLUMNS * ADVANCE), 2 * MARGIN + LINE * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        f'<g font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="{SIZE}">',
    ]
    for number, line in enumerate(lines):
        parts += _spans(line, MARGIN + LINE * number + SIZE)
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _spans(line: list[SpeedJob], y: int) -> Iterator[str]:
    """Runs of one colour; each has its place and length, so that any font keeps the columns."""
    start = 0
    for end in range(1, len(line) + 1):
        if end < len(line) and line[end][1] == line[start][1]:
            continue
        text = "".join(letter for letter, _ in line[start:end])
        if text.strip():
            yield (f'<text x="{MARGIN + start * ADVANCE:.1f}" y="{y}" fill="{line[start][1]}" xml:space="preserve" '
                   f'textLength="{len(text) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>')
        start = end


if __name__ == "__main__":
    main(*sys.argv[1:])
