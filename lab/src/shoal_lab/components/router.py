"""A trained router: predicts from the last few tokens alone which groups of MLP neurons the next forward needs.

It sees no hidden state, so the groups of every layer are known before a token's forward begins: the router of Read-ME
(arXiv 2410.19123), decoupled from the layers. There it is a small attention with one choice for all layers; here it is
a convolution over the last tokens with a choice per layer, because groups of different layers do not correspond.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

if TYPE_CHECKING:
    from shoal.model.runner import ModelRunner
    from shoal.speculative.draft_head_file import DraftHead
    from shoal_lab.components.experts import SplitMLPs

TABLE, MIX, OUT, BIAS, NEURONS = "table", "mix", "out", "{}.bias", "neurons"
"""Names of a component's tensors: embeddings of tokens [vocab, width]; the matrix over a window [hidden,
window * width], and the one to scores [layers * (groups - shared), hidden]; their biases; and the neurons of the
groups, int32 [layers, groups, n]."""
_REMEMBERED = 1 << 14
"""Windows whose choice is cached."""


def router_scores(seen: Tensor, mix: Tensor, mix_bias: Tensor, out: Tensor, out_bias: Tensor) -> Tensor:
    """Scores [..., layers * (groups - shared)] of a window's embeddings [..., window * width], newest token last."""
    return linear(gelu(linear(seen, mix, mix_bias)), out, out_bias)


def bits(chosen: Sequence[Sequence[int]], shared: int) -> tuple[int, ...]:
    """Per layer a mask of groups: the first `shared` of all, and the chosen ones among the others."""
    always = (1 << shared) - 1
    return tuple(always | sum(1 << shared + group for group in layer) for layer in chosen)


class ExpertRouter:
    """The router of a trained component.

    It judges each window by itself, in float64, so that a choice depends on the window's tokens only.

    Args:
        part: a component from `shoal train read_me`.

    Attributes:
        layers, groups: of the model, and of each of its MLPs.
        shared: the first groups, which always run.
        window: number of tokens that it sees, the fed one included.

    Raises:
        ValueError: tensors are missing, or have another size than the card says.
    """

    def __init__(self, part: DraftHead) -> None:
        self.layers, self.groups, self.window = (part.size(name) for name in ("layers", "groups", "window"))
        self.shared = int(part.shape.get("shared", 0))
        vocab, width, hidden = (part.size(name) for name in ("vocab", "width", "hidden"))
        if not 0 <= self.shared < self.groups:
            raise ValueError(f"the card of the trained part {part.name!r} says that shared is {self.shared}; it must "
                             f"be in [0, {self.groups - 1}]. Train the part anew")
        scores = self.layers * (self.groups - self.shared)
        self._table = part.take(TABLE, vocab, width)
        self._weights = [tensor.double() for tensor in (
            part.take(MIX, hidden, self.window * width), part.take(BIAS.format(MIX), hidden),
            part.take(OUT, scores, hidden), part.take(BIAS.format(OUT), scores))]
        self.neurons = part.take(NEURONS, self.layers, self.groups, part.size("neurons")).long()
        part.check_taken()
        self._made: WeakKeyDictionary[ModelRunner, SplitMLPs] = WeakKeyDictionary()
        self._known: dict[tuple[tuple[int, ...], int, int | None], tuple[int, ...]] = {}

    def mlps(self, runner: ModelRunner) -> SplitMLPs:
        """The model's MLPs in these groups; made once.

        Raises:
            Unsupported: the model has no gated MLPs.
        """
        from shoal_lab.components.experts import split_mlps

        if runner not in self._made:
            self._made[runner] = split_mlps(runner, list(self.neurons))
        return self._made[runner]

    def bytes_to_come(self, runner: ModelRunner) -> int:
        """Memory that the groups will take; 0 once they are made."""
        from shoal_lab.components.experts import group_bytes

        return 0 if runner in self._made else group_bytes(runner)

    def masks(self, tokens: Sequence[int], experts: int, seed: int | None = None) -> tuple[int, ...]:
        """Groups that the last of some tokens runs, per layer.

        Args:
            tokens: the text up to it; tokens before the window have no effect.
            experts: number of groups, shared ones included.
            seed: by which the others are drawn instead; None for the router's choice.
        """
        key = tuple(tokens[-self.window :]), experts, seed
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = bits(self._chosen(key[0], experts - self.shared, seed), self.shared)
        return self._known[key]

    def _chosen(self, tokens: tuple[int, ...], count: int, seed: int | None) -> list[list[int]]:
        if seed is not None:
            draw, others = random.Random(f"{seed}/{tokens}"), range(self.groups - self.shared)
            return [draw.sample(others, count) for _ in range(self.layers)]
        found: list[list[int]] = self.scores(tokens).topk(count).indices.tolist()
        return found

    @torch.no_grad()
    def scores(self, tokens: Sequence[int]) -> Tensor:
        """Scores of groups that are not shared, [layers, groups - shared] in float64, after at most `window` tokens."""
        lines = torch.zeros(self.window, self._table.shape[1], dtype=torch.float64, device=self._table.device)
        lines[self.window - len(tokens) :] = self._table[list(tokens)].double()
        return router_scores(lines.flatten(), *self._weights).view(self.layers, -1)
