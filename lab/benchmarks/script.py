"""Shared by the scripts: a parser with the option --json, and the report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.cli import env
from shoal_lab.bench import report


def parser(doc: str | None, **json: Any) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring, with the option --json; `json` goes to that option."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="file of the report", **json)
    return made


def heading(file: str, argv: Sequence[str], machine: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fields that a script's report begins with; `machine` was collected just now by default."""
    command = ["python", f"lab/benchmarks/{Path(file).name}", *argv]
    return report.heading(env.collect() if machine is None else machine, command)


def add_vocabulary(writer: Any, count: int) -> None:
    """Give a GGUF file, by a `gguf.GGUFWriter`, a vocabulary of that many tokens without a meaning."""
    normal, tokens = 1, [chr(33 + place) if place < 94 else f"<{place}>" for place in range(count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*tokens[:94], "!!", *tokens[95:]])
    writer.add_token_types([normal] * count)
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(count - 1)


def publish(file: str, argv: Sequence[str], found: Mapping[str, Any], path: Path | None) -> None:
    """Write the report of a script to a path, if there is one, and print it on one line."""
    report.publish({**heading(file, argv), **found}, path)
