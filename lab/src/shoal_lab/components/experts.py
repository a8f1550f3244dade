"""The gated MLPs of a dense decoder, split into groups of neurons of which a token runs some.

They are the experts of Read-ME (arXiv 2410.19123). All groups of a layer together give what its MLP gives, up to the
order of sums. Groups are copies, packed as the executor packs its matrices, so that each is contiguous in memory.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.experts import ExpertMLPs, Opened
from shoal.model.hf import HFRunner
from shoal.model.packed import native
from shoal.model.packed.linear import ACTIVATIONS, Dense, Linear, Quantised, parts_of
from shoal.model.packed.native.library import LANES, BatchStruct, Weight
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.weights import Layer, Role
from shoal.model.runner import ModelRunner

MOST_GROUPS = 32
"""Most groups of a layer; the groups that a token runs are the bits of a 32-bit word."""
UNIT = 16
"""The size of a group is a multiple of this: a row block of the kernels."""
_SAME = 64
"""Tolerance for sums in another order, in units of the dtype's eps."""
_PIECE = 256
"""Columns of a matrix that are dequantised at a time."""


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


class SplitMLPs(ExpertMLPs):
    """The MLPs of all layers, in groups.

    Args:
        down_biases: [hidden] for each layer, or None.

    Attributes:
        layers: the groups of each layer.
        kernels: the groups in the form of the native kernels, or None.
    """

    def __init__(
        self, layers: Sequence[Sequence[MLPGroup]], activation: Callable[[Tensor], Tensor],
        down_biases: Sequence[Tensor | None],
    ) -> None:
        self.layers, self._activation, self._down_biases = layers, activation, down_biases
        self.kernels: NativeExperts | None = None

    @property
    def plain(self) -> bool:
        """Whether no MLP has a bias."""
        biases = (*self._down_biases, *(group.gate_up_bias for layer in self.layers for group in layer))
        return all(bias is None for bias in biases)

    @property
    @override
    def native(self) -> bool:
        return self.kernels is not None

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

    @override
    def mixed(
        self, x: Tensor, layer: int, opened: Sequence[Opened | None], whole: Callable[[Tensor], Tensor]
    ) -> Tensor:
        places: dict[int, list[int]] = {}
        for place, one in enumerate(opened):
            places.setdefault(0 if one is None else id(one[0]), []).append(place)
        parts, order = [], list[int]()
        for same in places.values():
            index = torch.tensor(same, device=x.device)
            some = [one for place in same if (one := opened[place]) is not None]
            mlps = some[0][0] if some else None
            assert mlps is None or isinstance(mlps, SplitMLPs)
            parts.append(whole(x[index]) if mlps is None else mlps(layer, x[index], [mask for _, mask in some]))
            order += same
        wide = [part.to(torch.promote_types(x.dtype, torch.float32)) for part in parts]
        return torch.cat(wide)[torch.tensor(order, device=x.device).argsort()]

    @override
    def put_into(self, batch: BatchStruct, masks: Sequence[Sequence[int]]) -> None:
        assert self.kernels is not None
        self.kernels.put_into(batch, masks)


class NativeExperts:
    """The MLP groups of all layers, in the library's form.

    Args:
        layers: for each layer equally many groups: gate and up [2 * neurons, hidden], packed with `paired=True` and all
            of one kind, and down [hidden, neurons]. Neurons are multiples of 16.
        hidden: width of the model.
        ffn: neurons of its widest layer.

    Attributes:
        count: number of groups per layer, at most 32.

    Raises:
        ValueError: a matrix has another shape.
    """

    def __init__(
        self, layers: Sequence[Sequence[tuple[native.PackedWeight, native.PackedWeight]]], hidden: int, ffn: int
    ) -> None:
        self._layers, self.count = layers, len(layers[0])
        for number, layer in enumerate(layers):
            sizes = [down.columns for _, down in layer]
            shapes = all((pair.rows, pair.columns, pair.paired) == (2 * down.columns, hidden, True)
                         and down.rows == hidden and not down.paired for pair, down in layer)
            fits = sum(sizes) <= ffn and not any(size % LANES for size in sizes) and len(layer) == self.count <= 32
            if not shapes or not fits or len({pair.kind for pair, _ in layer}) > 1:
                raise ValueError(f"layer {number} has groups of {sizes} neurons; in every layer there must be as many, "
                                 f"at most 32, of multiples of {LANES} and {ffn} together, of models of {hidden}, and "
                                 "of one type of numbers")
        every = [one.struct() for layer in layers for group in layer for one in group]
        self._structs = (Weight * len(every))(*every)

    def put_into(self, struct: BatchStruct, masks: Sequence[Sequence[int]]) -> None:
        """Set the groups that the tokens of a batch run.

        Args:
            struct: the batch; it keeps the arguments alive.
            masks: for each running layer and token, the groups that it runs, bit g for group g; 0 for the whole MLP.
        """
        if len(masks) != struct.active_count or any(len(line) != struct.tokens for line in masks):
            raise ValueError(f"masks must be [{struct.active_count} running layers][{struct.tokens} tokens]")
        words = array("I", [mask for line in masks for mask in line])
        struct.experts, struct.groups = ctypes.addressof(self._structs), words.buffer_info()[0]
        struct.expert_count, struct.memory = self.count, (struct.memory, words, self)


@torch.no_grad()
def split_mlps(runner: ModelRunner, neurons: Sequence[Tensor]) -> SplitMLPs:
    """Copy a model's MLPs into groups of neurons, which chunks can name as their `experts`.

    Quantised matrices are quantised again, with other columns; on the native kernels those in types of a file become
    int8.

    Args:
        neurons: int64 [groups, n] for each layer: all of its neurons, each in one group.

    Raises:
        Unsupported: the MLPs are not gated, or do not have these neurons.
    """
    if isinstance(runner, HFRunner):
        return _of_modules(runner, neurons)
    assert isinstance(runner, PackedRunner)
    shape, layers = runner.shape, runner.weights.layers
    if shape.experts is not None:
        raise Unsupported("groups of neurons in a model with experts", "a router chooses them already",
                          "Leave out layers instead, as d3 does")
    if shape.cutoffs or shape.sub_norms:
        raise Unsupported("groups of neurons where gates are cut off or all neurons are normalised",
                          "what one gives depends on all of a layer", "Leave out layers instead, as d3 does")
    _check_groups(neurons, shape.ffns)
    made = SplitMLPs(
        [_split(runner, layer, groups) for layer, groups in zip(layers, neurons, strict=True)],
        ACTIVATIONS[shape.activation], [layer.down_bias for layer in layers],
    )
    if isinstance(runner, NativeRunner) and made.plain:
        pairs = [[(_native(one.gate_up), _native(one.down)) for one in layer] for layer in made.layers]
        made.kernels = NativeExperts(pairs, shape.hidden, max(shape.ffns))
    return made


def group_bytes(runner: ModelRunner) -> int:
    """Bytes of the copies that `split_mlps` makes."""
    if isinstance(runner, HFRunner):
        return sum(one.nbytes for layer in runner.parts.layers for one in _gated_mlp(layer).parameters())
    assert isinstance(runner, PackedRunner)
    return sum(_bytes_in_groups(one) for layer in runner.weights.layers for one in (layer.gate_up, layer.down))


def _bytes_in_groups(matrix: Linear) -> int:
    first = parts_of(matrix)[0]
    if not isinstance(first, native.PackedWeight) or first.kind in native.OWN:
        return matrix.nbytes
    return native.packed_bytes("int8", matrix.rows, matrix.columns)


def _split(runner: PackedRunner, layer: Layer, groups: Tensor) -> list[MLPGroup]:
    """The groups of one packed MLP."""
    gate, up = _plain(runner, layer.gate_up).chunk(2)
    down, bias = _plain(runner, layer.down), layer.gate_up_bias
    return [MLPGroup(
        _packed_as(layer.gate_up, torch.cat([gate[group], up[group]]), "pair"),
        _packed_as(layer.down, down[:, group].contiguous(), "matrix"),
        None if bias is None else torch.cat([half[group] for half in bias.chunk(2)]),
    ) for group in groups.to(runner.device)]


def _plain(runner: PackedRunner, matrix: Linear) -> Tensor:
    """A dequantised copy [rows, columns]."""
    if isinstance(runner, NativeRunner):
        return torch.cat([_native(part).unpack(runner.dtype) for part in parts_of(matrix)])
    columns = torch.eye(matrix.columns, dtype=runner.dtype, device=runner.device).split(_PIECE)
    return torch.cat([matrix(some) for some in columns]).t().contiguous()


def _packed_as(matrix: Linear, weight: Tensor, role: Role) -> Linear:
    """Pack a part of a matrix as the whole is packed."""
    first = parts_of(matrix)[0]
    if isinstance(first, native.PackedWeight):
        return native.pack(weight, first.kind if first.kind in native.OWN else "int8", paired=role == "pair")
    return Quantised(weight, matrix.quant) if isinstance(matrix, Quantised) else Dense(weight)


def _native(matrix: Linear) -> native.PackedWeight:
    assert isinstance(matrix, native.PackedWeight)
    return matrix


def _of_modules(runner: HFRunner, neurons: Sequence[Tensor]) -> SplitMLPs:
    mlps = [_gated_mlp(layer) for layer in runner.parts.layers]
    _check_groups(neurons, [mlp.down_proj.in_features for mlp in mlps])
    layers = [_split_module(mlp, groups.to(runner.device)) for mlp, groups in zip(mlps, neurons, strict=True)]
    made = SplitMLPs(layers, _activation(mlps[0]), [mlp.down_proj.bias for mlp in mlps])
    _check_sum(made, mlps)
    return made


def _gated_mlp(layer: nn.Module) -> Any:
    """The layer's MLP, if its matrices have the names of Llama or Phi-3."""
    mlp: Any = getattr(layer, "mlp", None)
    names = set() if mlp is None else set(mlp._modules)
    if "down_proj" not in names or not ({"gate_proj", "up_proj"} <= names or "gate_up_proj" in names):
        raise Unsupported(f"groups of neurons in {type(layer).__name__}", "it has no gated MLP of its own, with "
                          "matrices gate, up and down", "Leave out layers instead, as d3 does")
    return mlp


def _check_sum(made: SplitMLPs, mlps: Sequence[Any]) -> None:
    """Refuse MLPs that do more than gating: all groups together must give what the MLP gives."""
    weight = mlps[0].down_proj.weight
    x = torch.linspace(-1, 1, 2 * weight.shape[0], dtype=torch.float64).view(2, -1).to(weight)
    for layer, mlp in enumerate(mlps):
        wanted = mlp(x).double()
        apart = made(layer, x, [(1 << len(made.layers[layer])) - 1] * 2).double() - wanted
        if apart.norm() > _SAME * torch.finfo(weight.dtype).eps * wanted.norm():
            raise Unsupported(f"groups of neurons in {type(mlp).__name__}", "together they do not give what the MLP "
                              "gives, which does more than to gate", "Leave out layers instead, as d3 does")


def _activation(mlp: Any) -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] = getattr(mlp, "activation_fn", None) or mlp.act_fn
    return found


def _split_module(mlp: Any, groups: Tensor) -> list[MLPGroup]:
    """The groups of one MLP, as copies."""
    parts = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
    halves = torch.cat([part.weight for part in parts]).chunk(2)
    biases = None if parts[0].bias is None else torch.cat([part.bias for part in parts]).chunk(2)
    return [MLPGroup(
        Dense(torch.cat([half[group] for half in halves])), Dense(mlp.down_proj.weight[:, group].contiguous()),
        None if biases is None else torch.cat([bias[group] for bias in biases]),
    ) for group in groups]


def _check_groups(neurons: Sequence[Tensor], widths: Sequence[int]) -> None:
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
