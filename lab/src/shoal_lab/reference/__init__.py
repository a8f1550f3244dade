"""The word problems that ship with the package, held out from the training of the test model shoal-reference."""

from __future__ import annotations

import bz2
import json
from pathlib import Path

PROBLEM_KINDS = (
    "known_templates",
    "unseen_templates",
    "known_gsm8k",
    "known_gsm8k_equations",
    "unseen_gsm8k",
    "calibration",
)
MBPP_TESTED = 600
"""The last of MBPP's tasks that nothing is trained on; its training part follows (arXiv 2108.07732)."""


def problems(kind: str) -> list[dict[str, str]]:
    """A set of word problems, each with `question`, `solution` (it ends with `#### answer`), `answer` and `kind`.

    The prompt is the question and a line break. `calibration` shares no problem with the other sets.

    Raises:
        ValueError: there is no such set.
        FileNotFoundError: the package was installed without its problems.
    """
    if kind not in PROBLEM_KINDS:
        raise ValueError(f"there are no problems called {kind!r}; choose one of {', '.join(PROBLEM_KINDS)}")
    file = Path(__file__).parent / "problems" / f"{kind}.jsonl.bz2"
    if not file.is_file():
        raise FileNotFoundError(f"the packaged problems are missing: {file}; reinstall shoal")
    return [json.loads(line) for line in bz2.decompress(file.read_bytes()).decode("utf-8").splitlines()]
