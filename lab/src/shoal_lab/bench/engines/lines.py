"""The other end: questions come as lines of JSON on standard input, answers go out as lines of JSON.

Needs nothing but Python, since it is run in the engines' own environments. What libraries print goes to standard
error, so that it does not get between the answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol


class Absent(Exception):
    """The engine cannot do it; the message says why."""


class Running(Protocol):
    """A loaded engine."""

    def __call__(self, prompt: list[int], new_tokens: int, seen: Clock) -> None:
        """Decode greedily, never ending early; every token is told to the clock as it comes."""


class Prepare(Protocol):
    """Converts and loads: returns the engine and the facts of it, `detail` and `bits` per weight."""

    def __call__(self, folder: Path, work: Path, bits: int, threads: int) -> tuple[Running, dict[str, Any]]:
        """`folder` has the weights, `work` takes what is converted."""


class Clock:
    """Tokens and the seconds after which they came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self._start = time.perf_counter()

    def note(self, token: int) -> None:
        """A token has come."""
        self.times.append(time.perf_counter() - self._start)
        self.tokens.append(int(token))


def serve(package: str, prepare: Prepare) -> None:
    """Answer until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    running: Running | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question.pop("do") == "prepare":
                running, facts = _prepared(prepare, **question)
                answer = {"version": metadata.version(package), **facts}
            else:
                answer = _generated(running, **question)
        except Absent as reason:
            answer = {"absent": str(reason)}
        except ImportError as error:
            answer = {"absent": f"{error}; is {package} installed in {sys.executable}?"}
        except Exception as error:  # whatever an engine raises is for the other side to report
            answer = {"absent": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def _prepared(prepare: Prepare, folder: str, work: str, bits: int, threads: int) -> tuple[Running, dict[str, Any]]:
    target = Path(work)
    return prepare(older(Path(folder), target.with_name("older")), target, bits, threads)


def _generated(running: Running | None, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    if running is None:
        raise Absent("it was not prepared")
    clock = Clock()
    running(prompt, new_tokens, clock)
    return {"times": clock.times, "tokens": clock.tokens}


def older(folder: Path, to: Path) -> Path:
    """The same folder as earlier transformers read it: links to its files, but for two that name things as they did.

    These are the base of rotary embeddings, the type of the weights, and the class of a tokenizer.
    """
    to.mkdir(parents=True)
    for path in folder.iterdir():
        (to / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    base = (config.get("rope_parameters") or {}).get("rope_theta")
    more = {"torch_dtype": config.get("dtype", "bfloat16"), **({"rope_theta": base} if base is not None else {})}
    _rewrite(to / "config.json", {**more, **config})
    if (folder / "tokenizer_config.json").is_file():
        told = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if told.get("tokenizer_class") == "TokenizersBackend":
            _rewrite(to / "tokenizer_config.json", {**told, "tokenizer_class": "PreTrainedTokenizerFast"})
    return to


def _rewrite(path: Path, content: dict[str, Any]) -> None:
    path.unlink()
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
