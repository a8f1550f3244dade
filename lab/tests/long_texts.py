"""Novels and stories of nonsense, in folders and files like the real ones."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from random import Random

NAMES = ("Stevenson_Treasure_1883.txt", "Doyle_Micah_1889.txt", "Other_Novel_1899.txt")


def book(seed: int) -> str:
    """Random sentences, some hundred thousand characters."""
    dice = Random(seed)
    vocabulary = [f"{a}{b}" for a in ("ba", "de", "ki", "mo", "tu") for b in ("l", "ran", "s", "ton", "ver")]
    return " ".join(" ".join(dice.choices(vocabulary, k=dice.randrange(4, 12))).capitalize() + "." for _ in range(2500))


def write(folder: Path) -> Path:
    """A data folder with novels and stories, written into `folder`."""
    (folder / "novels").mkdir()
    with tarfile.open(folder / "novels" / "novels_before_1900.tar.xz", "w:xz") as archive:
        for number, name in enumerate(NAMES):
            raw = book(number).encode()
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    stories = folder / "squality" / "v1-3" / "txt"
    stories.mkdir(parents=True)
    said = [{"response_text": "A miller."}, {"response_text": "No."}]
    asked = [{"question_text": f"Who is number {number}?", "responses": said} for number in range(5)]
    rows = [{"metadata": {"passage_id": str(seed)}, "document": book(seed)[:size], "questions": asked}
            for seed, size in ((7, 900), (8, 9000), (9, 700))]
    (stories / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
