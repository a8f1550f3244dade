"""llama.cpp with drafts, as llama-cpp-python offers them: prompt lookup, and a hook for a draft model of one's own.

The package has no draft model ready-made, and llama.cpp's library, which it binds, has no speculative decoding: that is
in its programs. The hook is `LlamaDraftModel`; a second model behind it takes the few lines that are here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shoal_lab.bench.baselines.llama_cpp import library

NAMES = ("llama.cpp", "llama.cpp-prompt-lookup", "llama.cpp-draft-model")
"""Plain, and who guesses."""
_GUESSES = 10
"""Of prompt lookup: the package's own default, and what transformers' documentation uses."""
_SECOND = 4
"""Of a second model: as many as `draft_model` guesses here."""
_SKIPPED = 2
"""Forwards that are not timed: the prompt's, and the first one that guesses, in which a second model reads it too."""
_GREEDY = {"temp": 0.0, "repeat_penalty": 1.0}


@dataclass(frozen=True)
class LlamaAnswer:
    """What came of a prompt: all tokens; how many of them `seconds` covers; tokens per forward after the prompt's."""

    tokens: tuple[int, ...]
    timed: int
    seconds: float
    per_forward: float


class LlamaDrafts:
    """A GGUF file as `llama_cpp.Llama` decodes it.

    Args:
        file: the file.
        context: most tokens of prompt and answer.
        threads: CPU threads.
        name: one of `NAMES`.
        assistant: file of the model that drafts for "llama.cpp-draft-model".

    Raises:
        NotMeasured: the package is missing.
    """

    def __init__(self, file: str, context: int, threads: int, name: str, assistant: str | None = None) -> None:
        library()
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        options: dict[str, Any] = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        drafts: Any = None
        if name == NAMES[1]:
            drafts = LlamaPromptLookupDecoding(num_pred_tokens=_GUESSES)
        elif name == NAMES[2]:
            drafts = _second(Llama(str(assistant), **options))
        # The package wants all logits for drafts, but makes room for them only where it is told so as well.
        self._model = Llama(file, draft_model=drafts, logits_all=drafts is not None, **options)
        self._forwards, self._eval = 0, self._model.eval
        self._model.eval = self._counted

    def _counted(self, tokens: Any) -> None:
        self._eval(tokens)
        self._forwards += 1

    def decode(self, prompt: Sequence[int], new_tokens: int, eos: frozenset[int]) -> LlamaAnswer:
        """The likeliest tokens to `new_tokens` or an end."""
        self._model.reset()
        self._forwards = 0
        tokens, moments, forwards = list[int](), list[float](), list[int]()
        stream = self._model.generate(list(prompt), **_GREEDY)
        for token in islice(stream, new_tokens):
            tokens.append(token)
            moments.append(time.perf_counter())
            forwards.append(self._forwards)
            if token in eos:
                break
        stream.close()
        first = sum(number < _SKIPPED + 1 for number in forwards)
        return LlamaAnswer(tuple(tokens), len(tokens) - first, moments[-1] - moments[first - 1],
                           (len(tokens) - 1) / max(1, forwards[-1] - 1))


def _second(model: Any) -> Any:
    """A second model as the package's hook wants it."""
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Second(LlamaDraftModel):  # type: ignore[misc]
        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            return np.array([*islice(model.generate(input_ids.tolist(), **_GREEDY), _SECOND)], np.intc)

    return Second()
