"""Novels long out of copyright: the texts that are held out for a part."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

from shoal_lab.eval.items import Part
from shoal_lab.eval.sources import folder

_PLAIN = (("\u201c", '"'), ("\u201d", '"'), ("\u2019", "'"), ("\u2018", "'"), ("\u2014", "--"), ("_", ""))
_HELD_OUT = {
    "evaluation": ("Stevenson_Treasure_1883.txt", "Doyle_Micah_1889.txt"),
    "calibration": ("Gaskell_Ruth_1855.txt",),
}


def read(data: Path | None, part: Part) -> list[tuple[str, str]]:
    """Name and text of each novel, one line per paragraph, with plain quotation marks.

    Raises:
        ValueError: the data folder holds no novels.
    """
    path = folder(data, "novels") / "novels_before_1900.tar.xz"
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    found: list[tuple[str, str]] = []
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            name = Path(member.name).name
            file = archive.extractfile(member) if name in _HELD_OUT[part] else None
            if file is not None:
                found.append((name, _paragraphs(file.read().decode("utf-8", errors="replace"))))
    return found


def _paragraphs(text: str) -> str:
    for fine, plain in _PLAIN:
        text = text.replace(fine, plain)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text.replace("\r", "")))
    return "\n".join(part for part in paragraphs if part)
