"""How far a model's next-token distribution moves when tokens after the prompt run fewer layers: KL against all layers.

Teacher-forced: the prompt runs every layer and is read once per text, and one forward judges the answer's tokens. The
shallow distribution is compared with the full model's own, so a text needs no right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.model.runner import ModelRunner, SequenceChunk, Start

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and at least two of its answer."""


@dataclass
class DivergenceSums:
    """Sums over judged tokens: KL(full || shallow) in nats, how many argmaxes agree, and how many tokens they are."""

    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def add(self, other: DivergenceSums) -> None:
        """Add the sums of another text."""
        self.kl, self.agreed, self.tokens = self.kl + other.kl, self.agreed + other.agreed, self.tokens + other.tokens

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.kl / max(self.tokens, 1)

    @property
    def agreement(self) -> float:
        """Share of equal argmaxes."""
        return self.agreed / max(self.tokens, 1)


class Judged:
    """A text read at full depth, ready to be read again with less.

    Args:
        text: prompt and answer; the first token of the answer comes from the prompt and is not judged.
        every: one token of the answer in this many is judged, which saves most of the LM head.
    """

    def __init__(self, runner: ModelRunner, text: Text, every: int = 1) -> None:
        prompt, answer = text
        self._runner, self._every = runner, every
        self._answer, self._full = list(answer[:-1]), DepthPlan.full(runner.num_layers)
        self._steps = list(range(1, len(answer)))
        self._cache = runner.new_cache(1)
        for first in range(0, len(prompt), runner.prefill_chunk):
            part = list(prompt[first : first + runner.prefill_chunk])
            runner.forward([SequenceChunk(0, part, [0] * len(part), self._full)], self._cache)
            self._cache.commit(0, range(len(part)))
        self._states: list[Tensor] = []
        self._forward(self._full, None, lambda _, hidden: self._states.append(hidden.clone()))
        self._truth = self._probs(self._states[-1])

    def without(self, layer: int) -> DivergenceSums:
        """All tokens without one layer and those that read it. The layers below it are not run again where they can."""
        sources = self._runner.sources
        if layer < min((one for one in sources if one is not None), default=self._runner.num_layers):
            return self._judge(self._full, Start(layer + 1, self._states[layer]))
        gone = [layer, *(reader for reader, source in enumerate(sources) if source == layer)]
        return self._judge(DepthPlan.skipping(self._runner.num_layers, gone, gone), None)

    def under(self, plan: DepthPlan) -> DivergenceSums:
        """Token j of the answer at step j of a plan."""
        return self._judge(plan, None)

    def turn(self) -> Tensor:
        """For every layer, 1 - cosine of its input and output, summed over the answer's tokens: [L] float64."""
        pairs = zip(self._states, self._states[1:], strict=False)
        return torch.stack([(1 - torch.cosine_similarity(a[0].float(), b[0].float(), dim=-1)).sum().double()
                            for a, b in pairs])

    def _forward(self, plan: DepthPlan, start: Start | None, hook: Callable[[int, Tensor], None]) -> None:
        self._runner.forward([SequenceChunk(0, self._answer, self._steps, plan)], self._cache, hook, start=start)
        self._cache.rollback(0)

    def _judge(self, plan: DepthPlan, start: Start | None) -> DivergenceSums:
        last: list[Tensor] = []
        layers = self._runner.num_layers
        if start is not None and start.layer == layers:
            last.append(start.hidden)
        else:
            self._forward(plan, start, lambda layer, hidden: last.append(hidden) if layer == layers else None)
        found = self._probs(last[-1])
        kl = (self._truth.exp() * (self._truth - found)).sum(-1).double().sum()
        agreed = (self._truth.argmax(-1) == found.argmax(-1)).sum()
        return DivergenceSums(float(kl), int(agreed), len(found))

    def _probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [tokens, V] float32 of the judged tokens."""
        return self._runner.exit_logits(hidden[0, :: self._every]).float().log_softmax(-1)
