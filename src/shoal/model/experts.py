"""The gated MLPs of a dense decoder, split into groups of neurons of which a token runs some.

They are the experts of Read-ME (arXiv 2410.19123). All groups of a layer together give what its MLP gives, up to the
order of sums. Groups are copies, packed as the executor packs its matrices, so that each is contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.model.packed.linear import Linear
    from shoal.model.stack import LayerWork, SequenceChunk

MOST_GROUPS = 32
"""Most groups of a layer; the groups that a token runs are the bits of a 32-bit word."""
UNIT = 16
"""The size of a group is a multiple of this: a row block of the kernels."""


@dataclass(frozen=True)
class MLPGroup:
    """Some neurons of one MLP.

    Attributes:
        gate_up: [2 * neurons, hidden]: gate, then up.
        down: [hidden, neurons].
        gate_up_bias: [2 * neurons], or None.
    """

    gate_up: Linear
    down: Linear
    gate_up_bias: Tensor | None = None


class ExpertMLPs:
    """The MLPs of all layers, in groups.

    Args:
        down_biases: [hidden] for each layer, or None.

    Attributes:
        layers: the groups of each layer.
        plain: whether no MLP has a bias.
        native: the groups in the form of the native kernels; set by an executor that has them.
    """

    def __init__(
        self, layers: Sequence[Sequence[MLPGroup]], activation: Callable[[Tensor], Tensor],
        down_biases: Sequence[Tensor | None],
    ) -> None:
        self.layers, self._activation, self._down_biases = layers, activation, down_biases
        biases = (*down_biases, *(group.gate_up_bias for layer in layers for group in layer))
        self.plain = all(bias is None for bias in biases)
        self.native: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(group.gate_up.nbytes + group.down.nbytes for layer in self.layers for group in layer)

    def __call__(self, layer: int, x: Tensor, masks: Sequence[int]) -> Tensor:
        """Outputs of the chosen groups for normed inputs [T, hidden], in float32 or wider.

        Args:
            masks: for each input the groups that it runs, bit g for group g.
        """
        bias, wide = self._down_biases[layer], torch.promote_types(x.dtype, torch.float32)
        out = x.new_zeros(len(x), self.layers[layer][0].down.rows, dtype=wide)
        for number, group in enumerate(self.layers[layer]):
            chosen = [place for place, mask in enumerate(masks) if mask >> number & 1]
            if chosen:
                index = torch.tensor(chosen, device=x.device)
                out.index_add_(0, index, self._run(group, x[index]).to(wide))
        return out if bias is None else out + bias

    def _run(self, group: MLPGroup, x: Tensor) -> Tensor:
        both = group.gate_up(x)
        if group.gate_up_bias is not None:
            both = both + group.gate_up_bias.to(both.dtype)
        gate, up = both.chunk(2, dim=-1)
        return group.down(self._activation(gate) * up)


@dataclass(frozen=True)
class ExpertChoice:
    """Which groups of the MLPs the tokens of a chunk run.

    Attributes:
        mlps: the groups.
        masks: for each token and layer, the groups that it runs, bit g for group g; None for the whole MLPs.
    """

    mlps: ExpertMLPs
    masks: Sequence[Sequence[int] | None]


Opened = tuple[ExpertMLPs, int]
"""The groups, and the mask of those that one token runs in one layer."""


def opened_at(chunk: SequenceChunk, layer: int, node: int) -> Opened | None:
    """The groups that token `node` of a chunk runs in a layer; None for the whole MLP."""
    if chunk.experts is None or (masks := chunk.experts.masks[node]) is None:
        return None
    return chunk.experts.mlps, masks[layer]


def opened_in(chunks: Sequence[SequenceChunk], layer: int, piece: LayerWork) -> list[Opened | None] | None:
    """The groups that each token of a piece of work runs; None if all tokens run the whole MLP."""
    if all(chunk.experts is None for chunk in chunks):
        return None
    ends = zip(chunks, piece.first, piece.last, strict=True)
    return [opened_at(chunk, layer, node) for chunk, first, last in ends for node in range(first, last)]


def mixed(x: Tensor, layer: int, opened: Sequence[Opened | None], whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Outputs of an MLP for normed inputs [T, hidden]; some of them run groups, the others `whole`."""
    places: dict[int, list[int]] = {}
    for place, one in enumerate(opened):
        places.setdefault(0 if one is None else id(one[0]), []).append(place)
    parts, order = [], list[int]()
    for same in places.values():
        index = torch.tensor(same, device=x.device)
        some = [one for place in same if (one := opened[place]) is not None]
        parts.append(some[0][0](layer, x[index], [mask for _, mask in some]) if some else whole(x[index]))
        order += same
    wide = [part.to(torch.promote_types(x.dtype, torch.float32)) for part in parts]
    return torch.cat(wide)[torch.tensor(order, device=x.device).argsort()]


def check_groups(neurons: Sequence[Tensor], widths: Sequence[int]) -> None:
    """Refuse groups that do not divide the neurons of each layer.

    Args:
        neurons: int64 [groups, n] for each layer.
        widths: number of neurons of each layer.

    Raises:
        Unsupported: the groups are not those of the model's layers, or do not fit the kernels' blocks.
    """
    why = ""
    if len(neurons) != len(widths):
        why = f"they are of {len(neurons)} layers, and the model has {len(widths)}"
    elif any(groups.shape[1] % UNIT or len(groups) > MOST_GROUPS for groups in neurons):
        why = f"there may be {MOST_GROUPS} of them, each of a multiple of {UNIT} neurons"
    for layer, (groups, width) in enumerate(zip(neurons, widths, strict=False)):
        if len(neurons) == len(widths) and groups.flatten().sort().values.tolist() != list(range(width)):
            why = f"layer {layer}, of {width} neurons, is divided into {list(groups.shape)} others"
            break
    if why:
        raise Unsupported("groups of neurons that do not fit the model", why, "Train them anew: shoal train read_me")
