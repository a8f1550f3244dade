"""Depth that rises again, which no depth plan allows; D3 played backwards needs it.

A layer that comes back needs the positions at which it was skipped. So a skipped layer still makes keys and values from
the passing hidden states (the state propagation of CALM, arXiv 2207.07061), and only adds nothing to them. The engine
runs such a model at full depth: the runner exchanges layers from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor
from typing_extensions import override

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.linear import Dense, Linear
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.weights import Layer
from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk, Start

Executor = tuple[ModelRunner, DepthPlan]
"""A runner, and the plan that it is given."""


@dataclass(frozen=True)
class RisingPlan:
    """A number of layers per step that may rise.

    Attributes:
        counts: layers of steps 0, 1, ...; later steps keep the last count. Step 0, the prompt's, runs all.
        removal: layers in the order in which they are left out.
        num_layers: L.

    Raises:
        ValueError: a count needs layers outside the removal order to go, or more layers than there are.
    """

    counts: tuple[int, ...]
    removal: tuple[int, ...]
    num_layers: int

    def __post_init__(self) -> None:
        least = self.num_layers - len(self.removal)
        for step, count in enumerate(self.counts):
            if not least <= count <= self.num_layers:
                raise ValueError(
                    f"{count} layers at step {step}; it must be {least}..{self.num_layers}, since {len(self.removal)} "
                    f"of {self.num_layers} layers may be left out"
                )
        if not self.counts:
            raise ValueError("a plan needs the number of layers of at least one step")

    def depth(self, step: int) -> int:
        """Number of layers at `step`."""
        return self.counts[min(step, len(self.counts) - 1)] if step else self.num_layers

    def layer_tokens(self, tokens: int) -> int:
        """Layers summed over tokens 0..tokens-1, token 0 at L."""
        return sum(map(self.depth, range(tokens)))


class RisingStack(PackedRunner):
    """A packed runner whose layers come and go with the step; its caller sees every layer run.

    Args:
        runner: the whole model; its weights are shared.
        plan: number of layers by step.
    """

    def __init__(self, runner: PackedRunner, plan: RisingPlan) -> None:
        super().__init__(runner.shape, runner.weights, runner.rotary, runner.dtype, runner.device)
        self.prefill_chunk, self._plan, self._every = runner.prefill_chunk, plan, DepthPlan.full(runner.num_layers)
        self._at = {runner.num_layers: runner}
        first = runner.weights.layers[0]
        self._out, self._down = self._zeros(first.out), self._zeros(first.down)

    @override
    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        cache: KVCache,
        hook: HiddenStateHook | None = None,
        *,
        start: Start | None = None,
    ) -> Tensor:
        # Tokens of one depth that follow one another run together.
        assert hook is None and start is None
        done, logits = [0] * len(chunks), [list[Tensor]() for _ in chunks]
        while left := [at for at, chunk in enumerate(chunks) if done[at] < len(chunk.tokens)]:
            depth = self._plan.depth(chunks[left[0]].steps[done[left[0]]])
            parts = {at: part for at in left if (part := self._part(chunks[at], done[at], depth)).tokens}
            found = self._runner(depth).forward([*parts.values()], cache).split([p.wanted for p in parts.values()])
            for (at, part), values in zip(parts.items(), found, strict=True):
                logits[at].append(values)
                done[at] += len(part.tokens)
        return torch.cat([torch.cat(rows)[-chunk.wanted :] for chunk, rows in zip(chunks, logits, strict=True)])

    def _part(self, chunk: SequenceChunk, first: int, depth: int) -> SequenceChunk:
        """The tokens from index `first` on that run at this depth; empty if the next one runs at another."""
        steps = list(takewhile(lambda step: self._plan.depth(step) == depth, chunk.steps[first:]))
        tokens = chunk.tokens[first : first + len(steps)]
        parents, depths = (None if nodes is None else nodes[: first + len(steps)]
                           for nodes in (chunk.parents, chunk.depths))
        return SequenceChunk(chunk.seq, tokens, steps, self._every, parents, depths, min(len(tokens), chunk.wanted),
                             fed=first)

    def _runner(self, depth: int) -> PackedRunner:
        """A runner in which only `depth` layers add anything."""
        if depth not in self._at:
            gone, layers = self._plan.removal[: self.num_layers - depth], list(self.weights.layers)
            for number in gone:
                layers[number] = self._idle(layers[number])
            whole = self._at[self.num_layers]
            weights = replace(self.weights, layers=layers)
            self._at[depth] = type(whole)(whole.shape, weights, whole.rotary, whole.dtype, whole.device)
        return self._at[depth]

    def _idle(self, layer: Layer) -> Layer:
        """A layer that adds nothing to the hidden states."""
        return replace(layer, out=self._out, down=self._down, out_bias=None, down_bias=None)

    def _zeros(self, like: Linear) -> Linear:
        zeros = torch.zeros(like.rows, like.columns, dtype=self.dtype, device=self.device)
        return native.pack(zeros, "int8") if isinstance(like, native.PackedWeight) else Dense(zeros)


def executor(runner: ModelRunner, plan: DepthPlan | RisingPlan) -> Executor:
    """Make a plan executable on a model.

    Raises:
        Unsupported: a rising plan on a model that is not packed, or whose layers are of other kinds.
    """
    if isinstance(plan, DepthPlan):
        return runner, plan
    if not isinstance(runner, PackedRunner):
        raise Unsupported(
            "a plan that brings layers back", "only packed models run plans that are not nested",
            'Load the model with backend="packed", or leave this control out',
        )
    if not all(kind.attends and kind.has_mlp for kind in map(runner.shape.kind, range(runner.num_layers))):
        raise Unsupported("a plan that brings layers back", "some layers of this model are recurrent, or lack an MLP",
                          "Leave this control out (--groups, --loss-groups)")
    return RisingStack(runner, plan), DepthPlan.full(plan.num_layers)
