"""A line of the output: what came of a line of the input."""

from __future__ import annotations

from typing import Any

from shoal.types import Result, TokenLogprob, finite_logprob

Record = dict[str, Any]
"""A JSON object whose `line` is the number of the input's line; it has a `text`, or an `error` in its place."""


def answered(line: int, name: str | int | None, result: Result, *, with_tokens: bool) -> Record:
    """The record of an answer.

    Args:
        line: number of the input's line.
        name: its id.
        result: the answer.
        with_tokens: whether the token ids are written too, as where there is no tokenizer to make text of them.
    """
    stats = result.stats
    return {
        "line": line,
        "id": name,
        "text": result.text,
        **({"tokens": result.tokens} if with_tokens else {}),
        "finish_reason": result.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "mean_layers": round(stats.mean_layers, 4),
        **stats.beside,
        "seed": result.seed,
        **({"alternatives": [text for text, *_ in result.alternatives]} if result.alternatives else {}),
        **({} if result.logprobs is None else {"logprobs": [_logprob(entry) for entry in result.logprobs]}),
    }


def failed(line: int, name: str | int | None, error: BaseException) -> Record:
    """The record of a line that has no answer, and why."""
    message = " ".join(str(error).split())
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return {"line": line, "id": name, "error": kind + message}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [[token, finite_logprob(value)] for token, value in entry.top]
    return {"token": entry.token, "logprob": finite_logprob(entry.logprob), "top": top}
