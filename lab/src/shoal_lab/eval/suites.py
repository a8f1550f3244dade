"""The quick suites by name: where their items come from, and which of them may be used for calibration.

Items of the calibration part never occur in the evaluation part: they are in other files, or are told apart by the
words of their question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.errors import Unsupported, unknown
from shoal_lab import reference
from shoal_lab.eval import prompts
from shoal_lab.eval.items import Item, Part, part_of, problem, read_lines, stretches
from shoal_lab.eval.sources import bbh, code, folder, gsm8k, novels, parallel, squad, wikidata

Kind = Literal["problems", "text", "prompts"]
Read = Callable[[Path | None, Part], list[Item]]
_PROMPT_WORDS, _TEXT_WORDS = 16, 144


@dataclass(frozen=True)
class Suite:
    """A named set of items.

    Attributes:
        name: name on the command line and in results.
        kind: problems are answered and judged; text is only read; prompts are answered without a judge.
        about: one-line description.
        read: returns the items of a part from the data folder.
        max_new_tokens: longest answer by default.
    """

    name: str
    kind: Kind
    about: str
    read: Read
    max_new_tokens: int = 256

    def items(
        self, data: Path | None, part: Part = "evaluation", limit: int | None = None, seed: int = 0
    ) -> list[Item]:
        """The items of a part, shuffled by `seed`, the first `limit` of them.

        Raises:
            ValueError: the data folder or a file in it is missing, or holds no item.
        """
        found = self.read(data, part)
        if not found:
            raise ValueError(f"suite {self.name} has no items for {part}; give another suite or data folder")
        random.Random(f"{self.name}/{seed}").shuffle(found)
        return found if limit is None else found[:limit]


def names() -> list[str]:
    """Names of all suites."""
    return sorted(_table())


def get(name: str) -> Suite:
    """A suite by its name, or a suite of problems by the path of a `.jsonl` or `.jsonl.gz` file.

    Raises:
        ValueError: there is no such suite.
    """
    if name.endswith((".jsonl", ".jsonl.gz")):
        path = Path(name)
        return Suite(path.name, "problems", f"problems of {name}", lambda _, part: _split(path, part))
    table = _table()
    if name not in table:
        raise unknown("suite", name, [*table, "FILE.jsonl"])
    return table[name]


def _table() -> dict[str, Suite]:
    suites = [
        Suite("gsm8k", "problems", "GSM8K test set; calibrates on its training set", gsm8k.read),
        Suite("gsm8k_8shot", "problems", "the same behind eight worked problems", gsm8k.eight_shots),
        Suite("gsm8k_chat", "problems", "the same behind none, for models with a chat template", gsm8k.zero_shot),
        Suite("bbh", "problems", "BIG-Bench Hard, 27 tasks as one pool, behind three worked examples", bbh.read),
        Suite("humaneval", "problems", "HumanEval, executed; calibrates on MBPP", code.humaneval, 384),
        Suite("mbpp", "problems", "all 974 tasks of MBPP, executed; calibrates on HumanEval", code.mbpp, 384),
        Suite("programs", "problems", "HumanEval and MBPP, executed; for evaluation only", code.both, 384),
        Suite("squad", "problems", "questions of SQuAD, answered in a sentence; calibrates on three articles",
              squad.read, 64),
        Suite("wikidata_qa", "problems", "short facts to complete, for base models", wikidata.read, 24),
        Suite("parallel", "problems", "lists, squares, sums and sentences on which words decided together clash",
              parallel.read, 16),
        Suite("gsm8k_renumbered", "problems", "GSM8K training problems with new numbers, as equations",
              lambda data, part: _split(folder(data, "gsm8k") / "renumbered_heldout.jsonl", part)),
        Suite("novels", "text", "chapters of novels, long out of copyright", _novels),
        Suite("wikitext2", "text", "Wikipedia articles", _wikitext2),
    ]
    kinds = [kind for kind in reference.PROBLEM_KINDS if kind != "calibration"]
    suites += [Suite(kind, "problems", "word problems that ship with Shoal", _packaged(kind)) for kind in kinds]
    for name, about in (("known", "known problems with new numbers"), ("unseen", "problems never seen in training")):
        parts = [kind for kind in kinds if kind.startswith(name) and not kind.endswith("equations")]
        suites.append(Suite(name, "problems", f"{about}: {' and '.join(parts)}", _packaged(*parts)))
    suites += [Suite(name, "prompts", about, _prompts(read)) for name, about, read in (
        ("chat", "questions of Vicuna and MT-bench", prompts.chat),
        ("instructions", "user-oriented instructions of Self-Instruct", prompts.instructions),
        ("code", "tasks of HumanEval and MBPP", prompts.code),
        ("mathematics", "word problems of Spec-Bench and GSM8K", prompts.mathematics),
        ("articles", "beginnings of Wikipedia articles", prompts.articles),
    )]
    return {suite.name: suite for suite in suites}


def _prompts(read: Callable[[Path, Part], list[Item]]) -> Read:
    def found(data: Path | None, part: Part) -> list[Item]:
        if data is None:
            raise Unsupported("this suite", "no data folder was named", "Name the folder that holds it: --data DIR")
        return read(data, part)

    return found


def _problems(rows: Sequence[Mapping[str, Any]], source: str) -> list[Item]:
    return [problem(f"{source}/{number}", row, source) for number, row in enumerate(rows)]


def _split(path: Path, part: Part) -> list[Item]:
    return [item for item in _problems(read_lines(path), path.name) if part_of(item.prompt) == part]


def _packaged(*kinds: str) -> Read:
    def read(_: Path | None, part: Part) -> list[Item]:
        chosen = kinds if part == "evaluation" else ("calibration",)
        return [item for kind in chosen for item in _problems(reference.problems(kind), kind)]

    return read


def _wikitext2(data: Path | None, part: Part) -> list[Item]:
    path = folder(data, "wikitext2") / ("test.txt" if part == "evaluation" else "valid.txt")
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    return stretches(path.name, path.read_text("utf-8"), _PROMPT_WORDS, _TEXT_WORDS)


def _novels(data: Path | None, part: Part) -> list[Item]:
    return [item for name, text in novels.read(data, part)
            for item in stretches(name, text, _PROMPT_WORDS, _TEXT_WORDS)]
