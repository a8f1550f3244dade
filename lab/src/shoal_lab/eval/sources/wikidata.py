"""Short facts as completions, from BIG-bench by way of llm-foundry, for base models."""

from __future__ import annotations

from pathlib import Path

from shoal_lab.eval.items import Item, Part, part_of, read_lines
from shoal_lab.eval.sources import folder

_SHOTS = 8
"""Calibration facts shown first; they are not used for calibration."""
_ASK = "Complete this with a word or a few, in one sentence: "


def read(data: Path | None, part: Part) -> list[Item]:
    """Facts whose answer continues the prompt."""
    rows = read_lines(folder(data, "wikidata_qa") / "bigbench_qa_wikidata.jsonl")
    facts = list({row["context"]: row["continuation"] for row in rows}.items())
    kept = [fact for fact in facts if part_of(fact[0]) == "calibration"]
    shots = "".join(f"{context} {answer}.\n" for context, answer in kept[:_SHOTS])
    chosen = kept[_SHOTS:] if part == "calibration" else [fact for fact in facts if part_of(fact[0]) == "evaluation"]
    return [
        Item(f"wikidata_qa/{context}", _ASK + context, f" {answer}", answer, judge="contains", golds=(answer,),
             plain=shots + context, stop=("\n",))
        for context, answer in chosen
    ]
