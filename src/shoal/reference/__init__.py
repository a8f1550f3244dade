"""The small language models that ship with the package, and the problems held out from their training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

NAME = "shoal-reference"
LAYERSKIP = "shoal-reference-layerskip"
"""The same, trained on with layer dropout and an early-exit loss: its first layers can guess ahead."""
DRAFT = "shoal-reference-draft"
"""A model a twentieth as large with the same tokens, to guess ahead for the others."""
NAMES = (NAME, LAYERSKIP, DRAFT)
PROBLEM_KINDS = (
    "known_templates",
    "unseen_templates",
    "known_gsm8k",
    "known_gsm8k_equations",
    "unseen_gsm8k",
    "calibration",
)


def path(name: str = NAME) -> Path:
    """The folder of a packaged checkpoint, in the Hugging Face format.

    Raises:
        ValueError: no such model is packaged.
        FileNotFoundError: the package was installed without its weights.
    """
    if name not in NAMES:
        raise ValueError(f"there is no packaged model {name!r}; choose one of {', '.join(NAMES)}")
    folder = Path(__file__).parent / name
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the packaged model is missing from {folder}; reinstall shoal or name a model")
    return folder


def find(model: str | None) -> str:
    """Where a model lies: a packaged one by its name, NAME for None; any other name stays as it is.

    A folder of such a name in the working directory goes first.
    """
    packaged = model is None or (model in NAMES and not Path(model).exists())
    return str(path(model or NAME)) if packaged else str(model)


def problems(kind: str) -> list[dict[str, str]]:
    """A set of word problems, each with `question`, `solution` (it ends with `#### answer`), `answer` and `kind`.

    The prompt is the question and a line break. `calibration` shares no problem with the other sets.

    Raises:
        ValueError: there is no such set.
        FileNotFoundError: the package was installed without its problems.
    """
    if kind not in PROBLEM_KINDS:
        raise ValueError(f"there are no problems called {kind!r}; choose one of {', '.join(PROBLEM_KINDS)}")
    file = Path(__file__).parent / "problems" / f"{kind}.jsonl.gz"
    if not file.is_file():
        raise FileNotFoundError(f"the packaged problems are missing: {file}; reinstall shoal")
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode("utf-8").splitlines()]
