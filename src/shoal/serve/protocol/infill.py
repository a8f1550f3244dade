"""Filling a gap in a text: the prompt for it, where the tokenizer has tokens that mark the gap, and `/infill`.

The order is prefix, suffix, middle (Bavarian et al., arXiv 2207.14255), with other files before it as Qwen2.5-Coder
learned it (arXiv 2409.12186). Which tokens there are follows llama.cpp's `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typing_extensions import override

from shoal.decode.sequence import SequenceState
from shoal.engine.scheduling.request_handle import Placed
from shoal.serve.errors import ApiError, refused
from shoal.serve.protocol.bodies import CompletionBody
from shoal.serve.protocol.fields import INFILL
from shoal.serve.protocol.wire import Json, Wire, event
from shoal.types import Result, Step

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Before prefix, suffix and middle: of Qwen and CodeGemma, StarCoder and Granite, others, GLM, DeepSeek."""
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>")
"""Tokens after which another file would begin."""
_REPO, _FILE = "<|repo_name|>", "<|file_sep|>"


class InfillBody(CompletionBody):
    """`/infill`, as of llama.cpp's server."""

    unread = INFILL

    prompt: str = ""
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[dict[str, Any]] = []

    @override
    def check(self) -> None:
        super().check()
        if self.suffix:
            raise refused("suffix", "give the text after the gap as input_suffix")
        if self.n > 1 or self.best_of not in (None, 1) or self.echo or self.alternatives is not None:
            raise refused("n", "/infill gives one answer, without echo and log-probabilities; ask /v1/completions")


def marks_in(known: Collection[str]) -> tuple[str, str, str] | None:
    """The tokens of a vocabulary before prefix, suffix and middle; None if it has none."""
    return next((marks for marks in _MARKS if all(mark in known for mark in marks)), None)


class Gap:
    """Makes prompts for one tokenizer; ApiError 400 for one without such tokens."""

    def __init__(self, tokenizer: Any) -> None:
        known: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
        marks = marks_in(known)
        if marks is None:
            raise refused("suffix", "this model's tokenizer has no tokens around a gap, such as <|fim_prefix|>; take a "
                          "model for code that was trained to fill gaps")
        self._prefix, self._suffix, self._middle = (known[mark] for mark in marks)
        self._tokenizer, self._known = tokenizer, known
        self.ends = [known[text] for text in (*marks, *_ENDS) if text in known]

    def prompt(self, prefix: str, suffix: str, files: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The token ids of a prompt for what stands between prefix and suffix.

        Args:
            files: others of the project, each with a `filename` and a `text`.
        """
        begin = [self._tokenizer.bos_token_id] if self._tokenizer("")["input_ids"] else []
        return [*begin, *self._before(files), self._prefix, *self._ids(prefix), self._suffix, *self._ids(suffix),
                self._middle]

    def _before(self, files: Sequence[Mapping[str, Any]]) -> list[int]:
        if not files:
            return []
        if _FILE not in self._known:
            raise refused("input_extra", f"this model's tokenizer has no token {_FILE} between files; leave it out")
        found = [self._known[_REPO], *self._ids("myproject\n")] if _REPO in self._known else []
        for place, one in enumerate(files):
            name, text = one.get("filename", "tmp"), one.get("text", "")
            if not isinstance(name, str) or not isinstance(text, str):
                raise refused("input_extra", f"input_extra.{place} must have texts as filename and text")
            found += [self._known[_FILE], *self._ids(f"{name}\n{text}")]
        return [*found, self._known[_FILE], *self._ids("filename\n")]

    def _ids(self, text: str) -> list[int]:
        """A text as it is, special tokens in it as plain text."""
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


class InfillWire(Wire):
    """Writes what fills a gap, whole or as events; `seq` is the sequence behind it."""

    def __init__(self, model: str, seq: SequenceState) -> None:
        self._model, self._seq = model, seq

    @override
    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        return {**self._piece(results[0].text, True), **self._end(results[0], usage)}

    @override
    def opening(self, count: int) -> str:
        return ""

    @override
    def events(self, came: Sequence[tuple[int, Step | Placed]], usage: Json | None) -> str:
        texts = (item.text for _, item in came if isinstance(item, Step))
        return "".join(event(self._piece(text, False)) for text in texts if text)

    @override
    def closing(self, results: Sequence[Result], usage: Json, more: Json) -> str:
        return event({**self._piece("", True), **self._end(results[0], usage)})

    @override
    def error(self, error: ApiError) -> str:
        return event(error.to_dict())

    def _piece(self, text: str, last: bool) -> Json:
        return {"index": 0, "content": text, "stop": last}

    def _end(self, result: Result, usage: Json) -> Json:
        """What the last piece says, by llama.cpp's names; times are in milliseconds."""
        stats, word = result.stats, self._seq.stop.stop_string
        kind = "limit" if result.finish_reason == "length" else "eos" if word is None else "word"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        timings: Json = {"cache_n": cached}
        for name, count, seconds in (("prompt", usage["prompt_tokens"] - cached, stats.prefill_seconds),
                                     ("predicted", usage["completion_tokens"], stats.decode_seconds)):
            timings |= {f"{name}_n": count, f"{name}_ms": 1e3 * seconds,
                        f"{name}_per_second": count / seconds if seconds else 0.0}
        return {"model": self._model, "tokens_predicted": usage["completion_tokens"], "truncated": False,
                "tokens_evaluated": usage["prompt_tokens"], "tokens_cached": cached, "stop_type": kind,
                "stopping_word": word or "", "timings": timings}
