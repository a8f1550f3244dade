"""Constraints written down in a test: rules over token ids, beside any method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.decode import sampling
from shoal.decode.recipe import Recipe
from shoal.decode.sampling import Allowed
from shoal.methods.base import Method
from shoal.types import ModelInfo, Sampling

Rule = Callable[[Sequence[int], int], bool]
"""Whether a token may follow the generated ones."""


def turns(words: Sequence[int], token: int, size: int = 97) -> bool:
    """About two thirds of all tokens, by the last one; after every third token one alone."""
    last = words[-1] if words else 0
    return token == (2 * last + len(words)) % size if last % 3 == 1 else (token + last) % 3 != 0


@dataclass(frozen=True)
class Ruled:
    """The component `constraint` for a rule over `size` tokens."""

    rule: Rule
    size: int = 97

    def __call__(self) -> RuledWords:
        return RuledWords(self)


@dataclass(frozen=True)
class RuledWords(Allowed):
    """Asks the rule about every token."""

    ruled: Ruled

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([self.ruled.rule(tokens, token) for token in range(self.ruled.size)])


@dataclass(frozen=True)
class Bound(Method):
    """A method under a constraint."""

    name: ClassVar[str] = "bound"

    inner: object
    constraint: object

    def recipe(self, info: ModelInfo) -> Recipe:
        return replace(self.inner.recipe(info), constraint=self.constraint)  # type: ignore[attr-defined, arg-type]


@torch.inference_mode()
def by_hand(
    model: PreTrainedModel,
    prompt: Sequence[int],
    constraint: Ruled,
    new: int,
    row: int = 0,
    seed: int = 0,
    **options: Any,
) -> tuple[int, ...]:
    """Token after token: the whole text is run every time, and what the rule forbids has no chance."""
    settings, text = Sampling(**options), list(prompt)
    for index in range(new):
        logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        scores = sampling.scores(logits, text, len(prompt), settings).clone()
        for token in range(len(scores)):
            if not constraint.rule(text[len(prompt) :], token):
                scores[token] = -torch.inf
        if settings.greedy:
            text.append(int(scores.argmax()))
        else:
            number = sampling.uniform(seed, row, index, "sample")
            text.append(sampling.draw(sampling.probs_of(scores, settings), number))
    return tuple(text[len(prompt) :])
