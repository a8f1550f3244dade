"""What a request forbids in its answer, as logits processors of a sequence: tokens, texts, and an early end.

A forbidden token loses so much of its score that it is never drawn while another one may come. A constraint that allows
nothing else goes before it: an answer with forbidden words is of more use than none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

NEVER = -1e5
"""Added to forbidden scores: larger than any logit, and small enough for float32 to keep logits apart."""


class Forbidden:
    """A logits processor of one sequence; see `shoal.decode.sampling.LogitsProcessor`.

    Args:
        start: tokens of the sequence's prompt.
        sequences: token ids that must not come in this order; their beginning may lie in the prompt.
        only: the ids that may come; None for all.
        ends: ids that must not come before `least` tokens were generated.
        least: see `ends`.
    """

    def __init__(
        self, start: int, sequences: Iterable[Sequence[int]] = (), only: Sequence[int] | None = None,
        ends: Iterable[int] = (), least: int = 0,
    ) -> None:
        self._start, self._least, self._ends = start, least, sorted(ends)
        self._only = None if only is None else torch.tensor(sorted(set(only)))
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self._alone: list[int] = []
        for *before, last in sequences:
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))
            else:
                self._alone.append(last)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after ids [1, T]."""
        lost = torch.zeros_like(scores)
        if self._only is not None:
            lost.fill_(NEVER)[:, self._only.to(lost.device)] = 0
        wrong = [*self._alone, *self._ending(ids)]
        if ids.shape[1] - self._start < self._least:
            wrong += self._ends
        if wrong:
            lost[:, [token for token in wrong if token < lost.shape[1]]] = NEVER
        return scores + lost

    def _ending(self, ids: Tensor) -> list[int]:
        """Last tokens of sequences whose other tokens have just come."""
        likely = self._after.get(int(ids[0, -1]), ()) if self._after and ids.shape[1] else ()
        return [last for before, last in likely if ids[0, -len(before) :].tolist() == list(before)]


class Suppressed:
    """Tokens without a chance, as a logits processor: transformers' own looks through all tokens at each step.

    Args:
        tokens: their ids; those that the vocabulary lacks are passed over.
        length: of the text, at which alone they have none; None for any.
    """

    def __init__(self, tokens: Iterable[int], length: int | None = None) -> None:
        self._tokens, self._length = torch.tensor(sorted({token for token in tokens if token >= 0})), length

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after ids [1, T], changed in place."""
        if self._length is None or ids.shape[1] == self._length:
            known = self._tokens[: int(torch.searchsorted(self._tokens, scores.shape[1]))]
            scores[:, known.to(scores.device)] = -torch.inf
        return scores


def spelled(texts: Iterable[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """The words as a tokenizer spells them, with and without a space before; ValueError for one that it cannot."""
    found = dict[tuple[int, ...], None]()
    for word in texts:
        if tokenizer is None:
            raise ValueError("bad_words are texts, which a model without a tokenizer does not know; use logit_bias")
        ways = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (word, " " + word.lstrip())]
        if not word.strip() or not all(ways):
            raise ValueError(f"bad_words holds {word!r}, which is no word that the tokenizer knows. Remove it")
        found.update(dict.fromkeys(ways))
    return list(found)


def check_ids(options: Mapping[str, Iterable[int]], vocabulary: int) -> None:
    """ValueError for an id that is no token, named by its option."""
    for name, ids in options.items():
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"{name} names token {wrong}; the model's tokens are 0..{vocabulary - 1}")
