"""Sources of weights by name: a loaded model, safetensors, and changed views of another source."""

from __future__ import annotations

import json
import re
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HALF = 16
"""Bytes of the numbers of an MXFP4 block: half of its numbers."""
_NUMBERED = re.compile(r"((?:[^.]+\.)*?)(\d+)(\..+)")
"""The name of a layer's tensor: the part before the layer's number, the number, and the rest."""


@dataclass(frozen=True)
class Published:
    """How a model type's published checkpoints name what transformers' modules have.

    Attributes:
        parts: pairs of transformers' part of a name and theirs.
        mixer: of the recurrence, below which they have the convolutions of q, k and v apart.
    """

    parts: tuple[tuple[str, str], ...]
    mixer: str


_FORGET = tuple((f".forget_gate.{part}", f".{part}") for part in ("f_a_proj", "f_b_proj", "f_proj", "dt_bias", "A_log"))
PUBLISHED: Mapping[str, Published] = MappingProxyType({
    "olmo_hybrid": Published((("input_layernorm", "attention_layer_norm"),
                              ("post_attention_layernorm", "feedforward_layer_norm")), "linear_attn."),
    "hy_v3": Published(((".mlp.shared_experts.", ".mlp.shared_mlp."),), ""),
    "kimi_linear": Published((*_FORGET, (".mlp.", ".block_sparse_moe.")), "self_attn."),
    "bailing_hybrid": Published((
        ("model.embed_tokens.", "model.word_embeddings."), (".o_proj.", ".dense."), (".self_attn", ".attention"),
        (".gate.e_score_correction_bias", ".gate.expert_bias"), *_FORGET), "self_attn."),
})
"""Model types whose checkpoints use other names, which transformers changes as it loads them."""
BY_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "gpt2": (".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
    "llama4_text": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
})
"""Ends of the names of matrices that have columns for outputs, by model type."""


class Source(Protocol):
    """Maps names to tensors."""

    def names(self) -> Sequence[str]:
        """Names of all tensors."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def __getitem__(self, name: str) -> Tensor:
        """The tensor; it may share memory with its model or file, so never write to it."""


class PlacedSource(Source):
    """A source that has, by name, where each tensor lies, in `_places`."""

    _places: Mapping[str, Any]

    @override
    def names(self) -> list[str]:
        return sorted(self._places)

    @override
    def has(self, name: str) -> bool:
        return name in self._places


class TensorSource(PlacedSource):
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._places = tensors

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._places[name]
        return found


class ModelSource(TensorSource):
    """The parameters of a loaded transformers model, shared and never written to."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.state_dict())


class FileSource(Source):
    """Tensors of a folder of safetensors. Files are opened for each read, so that mapped pages do not pile up.

    Args:
        folder: a folder with one file, or several and their index.
        single: name of the one file.

    Raises:
        ValueError: a file is missing or cannot be read, or lacks tensors that the index says it has.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        index = folder / INDEX
        info = _weight_map(index) if index.is_file() else {}
        self._files: dict[str, Path] = {}
        for name in sorted(set(info.values())) or [single]:
            with _opened(folder / name) as file:
                self._files.update(dict.fromkeys(file.keys(), folder / name))
        if absent := sorted(info.keys() - self._files.keys()):
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise ValueError(f"{INDEX} names the tensor {absent[0]!r}{more}, and {info[absent[0]]!r} does not hold it. "
                             "Fetch the model again")

    @override
    def names(self) -> list[str]:
        return sorted(self._files)

    def outlines(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The types of all tensors as safetensors calls them, such as "BF16", and their shapes."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in sorted(set(self._files.values())):
            with _opened(path) as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found.update({name: (one.get_dtype(), tuple(one.get_shape())) for name, one in parts.items()})
        return found

    def types(self) -> dict[str, str]:
        """The types of all tensors."""
        return {name: kind for name, (kind, _) in self.outlines().items()}

    @override
    def has(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        with _opened(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


class ChangedSource(Source, ABC):
    """A source that changes tensors of another one and keeps their names."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @override
    def names(self) -> list[str]:
        return list(self._source.names())

    @override
    def has(self, name: str) -> bool:
        return self._source.has(name)


class ColumnsAsRows(ChangedSource):
    """Matrices that have columns for outputs in checkpoints and modules, with rows for them.

    Args:
        ends: of their names.
    """

    def __init__(self, source: Source, ends: tuple[str, ...]) -> None:
        super().__init__(source)
        self._ends = ends

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        return tensor.mT if name.endswith(self._ends) else tensor


class EitherWay(ChangedSource):
    """Matrices that have columns for outputs in some checkpoints, told by their sizes as transformers tells them.

    Args:
        sizes: rows and columns of matrices with rows for outputs, by ends of their names.
    """

    def __init__(self, source: Source, sizes: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(source)
        self._sizes = sizes

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        wanted = next((size for end, size in self._sizes.items() if name.endswith(end)), None)
        return tensor if wanted in (None, tuple(tensor.shape[-2:])) else tensor.mT


class RowsOfParts(ChangedSource):
    """Reorders the rows of a checkpoint's fused matrix and bias: first all of q, then k, then v.

    Args:
        part: the fused matrix's own name.
        rows: where they are.
    """

    def __init__(self, source: Source, part: str, rows: Tensor) -> None:
        super().__init__(source)
        self._part, self._rows = part, rows

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        fused = name.split(".")[-2] == self._part and len(tensor) == len(self._rows)
        return tensor[self._rows] if fused else tensor


def halves_order(head_dim: int, rotary_dim: int) -> list[int]:
    """The dimensions of a head that rotates neighbours together, first those of all pairs' first halves."""
    turned, rest = range(rotary_dim), range(rotary_dim, head_dim)
    return [*turned[::2], *turned[1::2], *rest]


class HalvesPaired(ChangedSource):
    """Reorders q and k of a checkpoint that rotates dimensions 2j and 2j + 1 together; the packed block pairs halves.

    Rows of q and k move alike, which keeps their products. The order is that of RoFormer (arXiv 2104.09864, 3.2.2).
    """

    def __init__(self, source: Source, head_dim: int, rotary_dim: int) -> None:
        super().__init__(source)
        self._head_dim, self._order = head_dim, halves_order(head_dim, rotary_dim)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        if name.split(".")[-2] in ("q_norm", "k_norm") and tensor.dim() == 2:
            return tensor[:, self._order]
        order = self.order(name, len(tensor) if tensor.dim() else 0)
        return tensor if order is None else tensor[order]

    def order(self, name: str, rows: int) -> Tensor | None:
        """The rows of a matrix, or a bias, in the packed block's order; None if it is neither of q nor of k."""
        if name.split(".")[-2] not in ("q_proj", "k_proj") or rows % self._head_dim:
            return None
        return torch.arange(rows).view(-1, self._head_dim)[:, self._order].flatten()


class GatesBelow(ChangedSource):
    """Reorders the rows of q of a checkpoint that has each head's gate after its q: first all of q, then all gates."""

    def __init__(self, source: Source, head_dim: int) -> None:
        super().__init__(source)
        self._head_dim = head_dim

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        order = self.order(name, len(tensor) if tensor.dim() else 0)
        return tensor if order is None else tensor[order]

    def order(self, name: str, rows: int) -> Tensor | None:
        """The rows of a matrix in the packed block's order; None if it is not q."""
        if name.split(".")[-2] != "q_proj":
            return None
        return torch.arange(rows).view(-1, 2, self._head_dim).transpose(0, 1).flatten()


class ExpertsByRows(ChangedSource):
    """gpt-oss's experts as those of other models: rows are outputs, those of gates above those of ups.

    Checkpoints and modules have columns for outputs, gates and ups by turns; published checkpoints have MXFP4 blocks in
    rows (`_blocks`, `_scales`), whose numbers bfloat16 holds exactly.
    """

    _BY_TURNS, _MATRICES = "mlp.experts.gate_up_proj", ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

    @override
    def names(self) -> list[str]:
        return sorted({name.removesuffix("_blocks").removesuffix("_scales") for name in self._source.names()})

    @override
    def has(self, name: str) -> bool:
        return self._source.has(name) or self._source.has(f"{name}_blocks")

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith(self._MATRICES):
            rows = self._source[name].mT if self._source.has(name) else self._dequantised(name)
            return _apart(rows) if name.endswith(self._BY_TURNS) else rows
        tensor = self._source[name]
        return _apart(tensor) if name.endswith(f"{self._BY_TURNS}_bias") else tensor

    def _dequantised(self, name: str) -> Tensor:
        """Bfloat16 [experts, rows, columns]."""
        return torch.stack([blocks.dequantise(torch.bfloat16) for blocks in self._in_blocks(name)])

    def blocks(self, name: str) -> list[Blocks] | None:
        """The matrices of all experts as MXFP4 blocks, None if they are none; rows as of the tensor of that name."""
        if not self._source.has(f"{name}_blocks"):
            return None
        found = self._in_blocks(name)
        if not name.endswith(self._BY_TURNS):
            return found
        order = torch.arange(found[0].rows).view(-1, 2).T.flatten()
        return [one.select(order) for one in found]

    def _in_blocks(self, name: str) -> list[Blocks]:
        """The same with the rows of the checkpoint."""
        stored, scales = self._source[f"{name}_blocks"], self._source[f"{name}_scales"]
        if stored.shape[:-1] != scales.shape or stored.dim() != 4 or stored.shape[-1] != _HALF:
            what = f"a checkpoint whose {name}_blocks are {list(stored.shape)}, and their scales {list(scales.shape)}"
            raise Unsupported(what, f"it must be [experts, rows, n, {_HALF}] and [experts, rows, n]", "Fetch it again")
        return [mxfp4(pairs, exponents) for pairs, exponents in zip(stored, scales, strict=True)]


class ExpertsApart(ChangedSource):
    """DBRX's experts as those of other models.

    Checkpoints and modules have those of a layer in three matrices, one expert above the other: gates, ups, and outputs
    by columns.

    Args:
        count: of the experts of a layer.
    """

    _HELD: ClassVar[Mapping[str, tuple[str, ...]]] = {"gate_up_proj": ("mlp.w1", "mlp.v1"), "down_proj": ("mlp.w2",)}

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source)
        self._count = count

    @override
    def names(self) -> list[str]:
        ours = {one: name for name, held in self._HELD.items() for one in held}
        parts = ((name, name.partition("experts.")) for name in self._source.names())
        return sorted({f"{before}experts.{ours[held]}" if held in ours else name for name, (before, _, held) in parts})

    @override
    def has(self, name: str) -> bool:
        return all(map(self._source.has, self._held(name)))

    def __getitem__(self, name: str) -> Tensor:
        held = self._held(name)
        if held == [name]:
            return self._source[name]
        parts = [self._by_expert(one) for one in held]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].mT

    def _by_expert(self, name: str) -> Tensor:
        """A tensor of the checkpoint as [experts, rows, columns]."""
        tensor = self._source[name]
        if tensor.dim() != 2 or len(tensor) % self._count:
            what = f"a checkpoint whose {name!r} is {list(tensor.shape)}"
            raise Unsupported(what, f"its rows must be those of {self._count} experts", "Fetch it again")
        found: Tensor = tensor.unflatten(0, (self._count, -1))
        return found

    def _held(self, name: str) -> list[str]:
        """The tensors of the checkpoint that have one of ours."""
        before, _, own = name.partition("experts.")
        return [f"{before}experts.{one}" for one in self._HELD[own]] if own in self._HELD else [name]


def mxfp4(pairs: Tensor, exponents: Tensor) -> Blocks:
    """Bytes [rows, n, 16] of two neighbours, the low half first, as GGUF blocks, which pair numbers of the two halves.

    Args:
        exponents: uint8 [rows, n], of each 32 numbers.
    """
    numbers = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    data = torch.cat([exponents.unsqueeze(-1), numbers[..., :_HALF] | numbers[..., _HALF:] << 4], -1)
    return Blocks(GgmlType.MXFP4, data.flatten(1), 2 * _HALF * pairs.shape[1])


def _apart(by_turns: Tensor) -> Tensor:
    """Rows [experts, rows, ..] of two matrices, by turns, as one above the other."""
    return torch.cat([by_turns[:, ::2], by_turns[:, 1::2]], 1)


class PublishedNames(ChangedSource):
    """A checkpoint by transformers' names."""

    def __init__(self, source: Source, published: Published) -> None:
        super().__init__(source)
        self._published, self._conv = published, f"{published.mixer}conv1d.weight"

    @override
    def names(self) -> list[str]:
        return sorted(set(map(self._ours, self._source.names())))

    @override
    def has(self, name: str) -> bool:
        return all(map(self._source.has, self._held(name)))

    def __getitem__(self, name: str) -> Tensor:
        parts = [self._source[held] for held in self._held(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _ours(self, name: str) -> str:
        """Transformers' name of a tensor of the checkpoint."""
        for ours, theirs in reversed(self._published.parts):
            name = name.replace(theirs, ours) if ours not in name else name
        for part in "qkv":
            name = name.replace(f"{part}_conv1d.weight", "conv1d.weight")
        return name

    def _held(self, name: str) -> tuple[str, ...]:
        """The names in the checkpoint."""
        if self._source.has(name):
            return (name,)
        if not name.endswith(self._conv):
            return (self._theirs(name),)
        stem = name.removesuffix("conv1d.weight")
        return tuple(self._theirs(f"{stem}{part}_conv1d.weight") for part in "qkv")

    def _theirs(self, name: str) -> str:
        for ours, theirs in self._published.parts:
            if not self._source.has(name):
                name = name.replace(ours, theirs)
        return name


class KeyHeadsApart(ChangedSource):
    """Splits the projections of Qwen3-Next's gated delta rule, ordered by key heads, as Qwen3.5 has them.

    Args:
        groups: key heads.
        parts: rows per key head of q and k together, v (and as many of the gate), and b (and as many of a).
    """

    _SPLIT: Mapping[str, tuple[str, int]] = {"in_proj_qkv": ("in_proj_qkvz", 0), "in_proj_z": ("in_proj_qkvz", 1),
                                             "in_proj_b": ("in_proj_ba", 0), "in_proj_a": ("in_proj_ba", 1)}

    def __init__(self, source: Source, groups: int, parts: tuple[int, int, int]) -> None:
        super().__init__(source)
        self._groups, (keys, values, heads) = groups, parts
        self._sizes = {"in_proj_qkvz": (keys + values, values), "in_proj_ba": (heads, heads)}

    @override
    def names(self) -> list[str]:
        found = list[str]()
        for name in self._source.names():
            apart = [part for part, (whole, _) in self._SPLIT.items() if name.split(".")[-2:-1] == [whole]]
            found += [name.replace(name.split(".")[-2], part) for part in apart] or [name]
        return found

    @override
    def has(self, name: str) -> bool:
        whole = self._whole(name)
        return self._source.has(whole[0] if whole else name)

    def __getitem__(self, name: str) -> Tensor:
        whole = self._whole(name)
        if whole is None:
            return self._source[name]
        tensor, sizes = self._source[whole[0]], self._sizes[whole[1]]
        if len(tensor) != self._groups * sum(sizes):
            return tensor  # whose size is refused
        first: Tensor
        second: Tensor
        first, second = tensor.unflatten(0, (self._groups, -1)).split(sizes, 1)
        if whole[2]:
            return second.flatten(0, 1)
        if whole[1] == "in_proj_ba":
            return first.flatten(0, 1)
        key = (sizes[0] - sizes[1]) // 2
        return torch.cat([part.flatten(0, 1) for part in first.split([key, key, sizes[1]], 1)])

    def _whole(self, name: str) -> tuple[str, str, int] | None:
        """The tensor of the checkpoint that has a part, its own name and the number of the part."""
        stem = name.split(".")[-2:-1]
        found = self._SPLIT.get(stem[0]) if stem else None
        return None if found is None else (name.replace(stem[0], found[0]), *found)


class FewerLayers(Source):
    """Some layers of a source, ascending and renumbered from 0, and all tensors that belong to no layer.

    Attributes:
        source: the checkpoint itself, even if layers were already left out of it.

    Raises:
        ValueError: the checkpoint has more than one stack of layers.
    """

    def __init__(self, source: Source, layers: Sequence[int]) -> None:
        stacks = {found[1] for name in source.names() if (found := _NUMBERED.fullmatch(name))}
        if len(stacks) > 1:
            raise ValueError(f"tensors are numbered under {', '.join(sorted(stacks))}; it must be one stack of layers")
        below = source if isinstance(source, FewerLayers) else None
        self.source: Source = below.source if below else source
        self._layers: list[int] = [below._layers[layer] for layer in layers] if below else list(layers)

    @override
    def names(self) -> list[str]:
        numbers = {old: new for new, old in enumerate(self._layers)}
        return [new for name in self.source.names() if (new := _renumbered(name, numbers)) is not None]

    def origin(self, name: str) -> str | None:
        """The name of the tensor in the checkpoint; None if it belongs to a layer that is not kept."""
        return _renumbered(name, dict(enumerate(self._layers)))

    @override
    def has(self, name: str) -> bool:
        place = self.origin(name)
        return place is not None and self.source.has(place)

    def __getitem__(self, name: str) -> Tensor:
        place = self.origin(name)
        if place is None:
            raise KeyError(name)
        return self.source[place]


def _renumbered(name: str, numbers: Mapping[int, int]) -> str | None:
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return name
    number = numbers.get(int(found[2]))
    return None if number is None else f"{found[1]}{number}{found[3]}"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {str(path)!r} cannot be read: {error}. Fetch the file again") from error


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as the index of shards says."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in found.values()):
            return dict(found)
        why = "its weight_map must name files beside it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ValueError(f"the index {str(index)!r} is none: {why}. Fetch the model again")


def has_safetensors(folder: Path) -> bool:
    """Whether the folder holds a checkpoint that `FileSource` reads."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()
