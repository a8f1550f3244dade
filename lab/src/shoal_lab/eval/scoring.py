"""Scores references: how probable each token is if every token runs the layers of its step. Generates nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import ModelRunner, SequenceChunk

Measure = Callable[[Tensor, Tensor], Tensor]
"""From logits [n, V] in float32 and the tokens [n] that follow, a measure of each: [n, ...]."""


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihood in nats."""
    return cross_entropy(logits, tokens, reduction="none")


@torch.no_grad()
def losses(
    prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]],
    executors: Sequence[tuple[ModelRunner, DepthPlan]],
    measure: Measure = loss,
) -> list[list[Tensor]]:
    """Measure every reference token under each executor: [executor][item] -> [tokens, ...].

    The prompt runs every layer and is read once for all executors, up to its last token; reference token j is decided
    at step j.

    Args:
        prompts: at least one token each.
        references: the tokens that follow, at least one each.
        executors: runners with their plans; the runners must read a prompt alike.
        measure: the measure of a token.
    """
    texts = [_Text(seq, list(prompt), list(reference))
             for seq, (prompt, reference) in enumerate(zip(prompts, references, strict=True))]
    windows = executors[0][0].windows if executors else ()
    cache = KVCache(windows, len(texts), [max(len(text.tokens) for text in texts)] * len(windows))
    return [_read(texts, cache, runner, plan, measure) for runner, plan in executors]


@dataclass(frozen=True)
class _Text:
    """A prompt and its reference, in one sequence of the cache."""

    seq: int
    prompt: list[int]
    reference: list[int]

    @property
    def tokens(self) -> list[int]:
        """All tokens that are read; the last token of the reference decides nothing."""
        return self.prompt + self.reference[:-1]

    @property
    def start(self) -> int:
        """The place of the token that decides the first reference token."""
        return len(self.prompt) - 1

    def chunk(self, first: int, count: int, plan: DepthPlan) -> SequenceChunk:
        """At most `count` tokens from place `first` on."""
        tokens = self.tokens[first : first + count]
        steps = [max(0, place - self.start) for place in range(first, first + len(tokens))]
        return SequenceChunk(self.seq, tokens, steps, plan, wanted=max(1, len(self._decided(first, len(tokens)))))

    def measured(self, measure: Measure, first: int, count: int, logits: Tensor) -> Tensor:
        """Measures of the reference tokens that `count` tokens from place `first` on decide, from the last logits."""
        decided = self._decided(first, count)
        target = torch.tensor(decided, dtype=torch.long, device=logits.device)
        return measure(logits[len(logits) - len(decided) :].float(), target).cpu()

    def _decided(self, first: int, count: int) -> list[int]:
        return self.reference[max(0, first - self.start) : max(0, first + count - self.start)]


def _read(
    texts: Sequence[_Text], cache: KVCache, runner: ModelRunner, plan: DepthPlan, measure: Measure
) -> list[Tensor]:
    """Measures of each text; what the cache holds of its prompt is not read again."""
    found: list[list[Tensor]] = [[] for _ in texts]
    for text in texts:
        cache.truncate(text.seq, text.start)
    while waiting := [text for text in texts if cache.positions[text.seq] < len(text.tokens)][: runner.prefill_chunk]:
        count = runner.prefill_chunk // len(waiting)
        chunks = [text.chunk(cache.positions[text.seq], count, plan) for text in waiting]
        logits = runner.forward(chunks, cache).split([chunk.wanted for chunk in chunks])
        for text, chunk, values in zip(waiting, chunks, logits, strict=True):
            found[text.seq].append(text.measured(measure, cache.positions[text.seq], len(chunk.tokens), values))
            cache.commit(text.seq, range(len(chunk.tokens)))
    return [torch.cat(parts) for parts in found]
