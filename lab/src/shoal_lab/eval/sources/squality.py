"""SQuALITY v1.3 (Wang et al. 2022): questions on stories of several thousand words, each answered by four readers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal_lab.eval.items import read_lines
from shoal_lab.eval.sources import folder


@dataclass(frozen=True)
class Story:
    """A story with its questions, and the answers to each."""

    name: str
    text: str
    asked: tuple[tuple[str, tuple[str, ...]], ...]


def read(data: Path | None) -> list[Story]:
    """The stories of the development set.

    Raises:
        ValueError: the data folder does not hold the data set.
    """
    rows = read_lines(folder(data, "squality") / "v1-3" / "txt" / "dev.jsonl")
    return [
        Story(row["metadata"]["passage_id"], " ".join(row["document"].split()), tuple(
            (one["question_text"], tuple(said["response_text"] for said in one["responses"]))
            for one in row["questions"]
        ))
        for row in rows
    ]
