"""llama.cpp with drafts through llama-cpp-python: prompt lookup, and a second model behind the package's draft hook.

The package ships no draft model, and the llama.cpp library that it binds has no speculative decoding, only its programs
do. A second model behind the hook `LlamaDraftModel` takes the few lines below.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shoal_lab.bench.baselines.llama_cpp import library

NAMES = ("llama.cpp", "llama.cpp-prompt-lookup", "llama.cpp-draft-model")
"""Plain decoding, and one name per drafter."""
_GUESSES = 10
"""Tokens guessed by prompt lookup: the default of the package and of transformers' documentation."""
_SECOND = 4
"""Tokens guessed by a second model: as many as `draft_model` guesses here."""
_SKIPPED = 2
"""Forwards that are not timed: the prompt's, and the first one that guesses, which reads the prompt again."""
_GREEDY = {"temp": 0.0, "repeat_penalty": 1.0}


@dataclass(frozen=True)
class LlamaAnswer:
    """An answer: all tokens, how many of them `seconds` covers, and tokens per forward after the prompt's."""

    tokens: tuple[int, ...]
    timed: int
    seconds: float
    per_forward: float


class LlamaDrafts:
    """Decodes a GGUF file with `llama_cpp.Llama`.

    Args:
        file: the GGUF file.
        context: most tokens of prompt and answer together.
        threads: CPU threads.
        name: one of `NAMES`.
        assistant: GGUF file of the model that drafts for "llama.cpp-draft-model".

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
        # Drafts need all logits, and the package only makes room for them if it is told so here as well.
        self._model = Llama(file, draft_model=drafts, logits_all=drafts is not None, **options)
        self._forwards, self._eval = 0, self._model.eval
        self._model.eval = self._counted

    def _counted(self, tokens: Any) -> None:
        self._eval(tokens)
        self._forwards += 1

    def decode(self, prompt: Sequence[int], new_tokens: int, eos: frozenset[int]) -> LlamaAnswer:
        """Decode greedily up to `new_tokens` tokens or an end of sequence."""
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
    """Wrap a second model in the package's draft hook."""
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Second(LlamaDraftModel):  # type: ignore[misc]
        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            return np.array([*islice(model.generate(input_ids.tolist(), **_GREEDY), _SECOND)], np.intc)

    return Second()
