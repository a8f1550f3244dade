"""The weights of a GGUF file under the names of transformers, in its row order and conventions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.config import shared_sources
from shoal.model.gguf.blocks import PLAIN, Blocks
from shoal.model.gguf.classics import head_norm, in_modules
from shoal.model.gguf.config import family_of
from shoal.model.gguf.family import Family
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import GgmlType, TensorInfo
from shoal.model.gguf.hybrids import JOINED, as_in_checkpoint, by_key_heads, grouped_heads
from shoal.model.gguf.latent import EXPAND, KEYS, VALUES, expanded
from shoal.model.gguf.metadata import Metadata
from shoal.model.gguf.mixtures import DOWN, FUSED, GATE, UP, expert_of, unnumbered
from shoal.model.modules import expected
from shoal.model.packed.source import Source

_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
_PRE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_SANDWICH = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm", **_BEHIND}
_LAYER = re.compile(r"(?:(?:model|backbone|gpt_neox)\.layers|transformer\.(?:h|blocks))\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.weight")
ASIDE = re.compile(r"(^|\.)rope_(freqs|factors_long|factors_short)\.weight$")
"""Tensors that only the rotary embedding reads."""
_STACKED = re.compile(r"(.+\.layers\.\d+\.)((?:.+\.)?experts\.)(gate_up_proj|up_proj|down_proj)")
"""The tensors of transformers' modules that have the matrices of all experts."""
_MATRICES = ("_exps.weight", "attn_k_b.weight", "attn_v_b.weight", "altup_proj.weight", "altup_unembd_proj.weight")
"""What the names of tensors that are several matrices end with."""
CONV = "self_attn.conv1d.weight"
"""The convolution of Kimi Linear, which files have in parts."""
_TURNED = "mlp.experts.gate_up_proj_bias"
_BIASES = {_TURNED: ("mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias")}
"""The biases of gpt-oss's gates and ups, which its modules have by turns, and their parts."""
_KEY_HEADS = {"in_proj_b": 0, "in_proj_a": 1}
"""Halves of a matrix whose rows are ordered by key heads."""


def gguf_name(name: str, family: Family) -> str | None:
    """The name in GGUF files of the tensor that transformers calls `name`; None if there is none."""
    if family.place is not None:
        return family.place(name)
    if unnumbered(name) in family.ends:
        return family.ends[unnumbered(name)]
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    layer, rest = found[1], unnumbered(found[2])
    if rest in family.layer:
        return f"blk.{layer}.{family.layer[rest]}"
    part, _, kind = rest.rpartition(".")
    inside = (_parts(family) | _norms(family)).get(part)
    return f"blk.{layer}.{inside}.{kind}" if inside and kind in ("weight", "bias") else None


def matrix_names(family: Family) -> dict[str, str]:
    """The names of matrices below a layer, in GGUF files, with those of transformers' modules."""
    own = {place.removesuffix(".weight"): name.removesuffix(".weight") for name, place in family.layer.items()}
    return {place: part for part, place in _parts(family).items()} | own


def matrix_sizes(file: GgufFile) -> dict[tuple[int, str], tuple[int, int]]:
    """Rows and columns of the matrices of layers, by the layer and the name below it in transformers."""
    names, found = matrix_names(family_of(Metadata(file.header))), dict[tuple[int, str], tuple[int, int]]()
    for name, info in file.header.tensors.items():
        place = _BLOCK.fullmatch(name)
        if place is not None and place[2] in names and len(info.shape) == 2:
            found[int(place[1]), names[place[2]]] = info.shape[0], info.shape[1]
    return found


def _parts(family: Family) -> dict[str, str]:
    if family.model_type != "phi3":
        return _PARTS
    fused = {name: part for name, part in _PARTS.items() if name not in ("mlp.gate_proj", "mlp.up_proj")}
    return fused | {"mlp.gate_up_proj": "ffn_up"}


def _norms(family: Family) -> dict[str, str]:
    if not family.sandwich:
        return _PRE_NORMS
    return _SANDWICH if family.pre_norm else _BEHIND


class GgufSource(Source):
    """A source that reads a GGUF file, one tensor at a time; Unsupported if Shoal does not know the architecture."""

    def __init__(self, file: GgufFile, config: Any) -> None:
        self._file, self._config = file, config
        self._family = family_of(Metadata(file.header))
        self._heads: dict[str, int] = {}
        if self._family.interleaved:
            self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    @override
    def names(self) -> list[str]:
        """The tensors of transformers' modules that the file has."""
        return sorted(name for name in expected(self._config) if all(map(self.has, self.parts(name))))

    @override
    def has(self, name: str) -> bool:
        if self._number(name) is not None:
            return True
        one = head_norm(name)
        if one is not None:
            return self.has(one[0]) and one[1] < self._info(one[0]).shape[0]
        return self._place(name) is not None or (name.endswith(CONV) and all(map(self.has, self.parts(name))))

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, in its dtype if that is floating point, else dequantised to float32; may be a read-only view."""
        if (number := self._number(name)) is not None:
            return number
        if name.endswith(CONV):
            return torch.cat([self[part] for part in self.parts(name)])
        info = self._info(name)
        order = self._order(name, info)
        if expert_of(name) is not None or (order is not None and len(info.shape) > 1):
            blocks = self.blocks(name)
            return blocks.dequantise(PLAIN.get(blocks.type, torch.float32))
        if _STACKED.fullmatch(name):
            raise KeyError(name)
        values = self._file.values(info.name)
        values = values if order is None else values[order]
        if self._family.norm_shift and info.name.endswith("norm.weight") and not info.name.endswith("ssm_norm.weight"):
            return values - self._family.norm_shift
        found = as_in_checkpoint(info.name, values)
        if name.endswith("moe_statics.e_score_correction_bias"):
            return found.view(1, -1)
        return found.view(1, 1, -1, 1) if self._config.model_type == "kimi_linear" and name.endswith("A_log") else found

    def of_modules(self, name: str) -> Tensor | None:
        """The tensor as transformers' modules have it, dequantised; None if the file lacks it."""
        if (number := self._number(name)) is not None:
            return number.view(1) if "alpha" in name else number
        one, parts = head_norm(name), self.parts(name)
        if one is not None:
            return self[one[0]][one[1]] if self.has(name) else None
        if _STACKED.fullmatch(name):
            places = dict.fromkeys(place for part in parts if (place := self._place(part)) is not None)
            if self._family.model_type == "gpt_oss" and places:  # whose modules have columns for outputs
                return _by_turns([self._file.values(place) for place in places]).mT
            whole = torch.cat([self._file.values(place) for place in places], 1) if places else None
            by_columns = whole is not None and self._family.model_type == "llama4_text"  # likewise
            return whole.mT if whole is not None and by_columns else whole
        if name.endswith(EXPAND) and parts != (name,):
            return expanded(*(self._file.values(self._info(part).name) for part in parts))
        if name.endswith(_TURNED):
            return _by_turns([self[part] for part in parts]) if all(map(self.has, parts)) else None
        if name.endswith("in_proj_qkvz.weight"):
            return by_key_heads(self[parts[0]], self[parts[1]], self._config)
        if parts != (name,):
            return torch.cat([self[part] for part in parts]) if all(map(self.has, parts)) else None
        place = self._place(name)
        if place is None:
            return None
        return in_modules(name, grouped_heads(place, self[name], self._config), self._config)

    def parts(self, name: str) -> tuple[str, ...]:
        """The names under which the file has a tensor of the modules: itself, or its parts; of experts the first."""
        stacked = _STACKED.fullmatch(name)
        if stacked is not None:
            wanted = (DOWN,) if stacked[3] == "down_proj" else (GATE, UP)
            return tuple(stacked[1] + own.replace("#", "0") for own, place in self._family.layer.items()
                         if place in wanted)
        if name.endswith(EXPAND) and not self.has(name):
            return tuple(name.removesuffix(EXPAND) + part.replace("#", "0") for part in (KEYS, VALUES))
        for joined, parts in {**JOINED, **_BIASES}.items():
            if name.endswith(joined):
                return tuple(name.removesuffix(joined) + part for part in parts)
        return (name,)

    def blocks(self, name: str) -> Blocks:
        """The blocks of a matrix in transformers' row order; KeyError if there is none of that name.

        A view of the mapped file, unless rows had to be reordered.
        """
        info, expert = self._info(name), expert_of(name)
        if expert is not None:
            whole, rows = self._file.blocks(info.name), info.shape[1]
            first, last = self._rows_of_expert(name, info)
            return whole.select(slice(expert * rows + first, expert * rows + last))
        if len(info.shape) != 2:
            what = f"blocks of {name!r}, which is {list(info.shape)}"
            raise Unsupported(what, "only matrices have them", "Read its values")
        order, blocks = self._order(name, info), self._file.blocks(info.name)
        return blocks if order is None else blocks.select(order)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of all its parts."""
        return self._file.paths

    def type_of(self, name: str) -> GgmlType:
        """The type of a tensor; KeyError if there is none of that name."""
        return self._info(name).type

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; KeyError if there is none of that name."""
        info = self._info(name)
        if expert_of(name) is not None:
            first, last = self._rows_of_expert(name, info)
            return last - first, info.shape[2]
        order = self._order(name, info)
        return info.shape if order is None or len(info.shape) < 2 else (len(order), info.shape[1])

    def matrices(self) -> list[tuple[GgmlType, tuple[int, int]]]:
        """Type, rows and columns of every matrix in the file, those of experts one by one."""
        found = [(info.type, (info.shape[0], info.shape[1])) for info in self._file.header.tensors.values()
                 if len(info.shape) == 2]
        for info in self._file.header.tensors.values():
            if len(info.shape) == 3 and info.name.endswith(_MATRICES):
                found += [(info.type, (info.shape[1], info.shape[2]))] * info.shape[0]
        return found

    def unread(self, known: Iterable[str]) -> list[str]:
        """Tensors of the file, by its names, that are neither in `known` (transformers' names) nor read otherwise."""
        places = {self._place(part) for name in known for part in self.parts(name)} | set(map(self._place, known))
        further = tuple(f"blk.{layer}." for layer in self._further())
        reading = (layer for layer, source in enumerate(shared_sources(self._config)) if source is not None)
        further += tuple(f"blk.{layer}.attn_{part}" for layer in reading for part in ("k.", "v.", "k_norm."))
        further += self._family.aside
        return [place for place in self._file.header.tensors
                if place not in places and not ASIDE.search(place) and not place.startswith(further)]

    @property
    def by_turns(self) -> bool:
        """Whether value heads of a gated delta rule take turns: the first one of each key head, then the second."""
        return self._family.model_type in ("qwen3_5_text", "qwen3_5_moe_text")

    def _further(self) -> range:
        """Layers of heads that predict further tokens."""
        layers = int(self._config.num_hidden_layers)
        return range(layers, layers + Metadata(self._file.header).whole("nextn_predict_layers", 0, least=0))

    def release(self) -> None:
        """Give back the memory of the pages that were read so far."""
        self._file.release()

    def _number(self, name: str) -> Tensor | None:
        """A tensor of one number that the metadata have; None if it is none of these."""
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in self._family.numbers:
            return None
        each = Metadata(self._file.header).numbers(self._family.numbers[found[2]], self._config.num_hidden_layers)
        return None if each is None else torch.tensor(each[int(found[1])])

    def _info(self, name: str) -> TensorInfo:
        place = self._place(name)
        if place is None:
            raise KeyError(name)
        return self._file.header.tensors[place]

    def _place(self, name: str) -> str | None:
        place, expert = gguf_name(name, self._family), expert_of(name)
        if place is not None and not self._file.has(place) and place.endswith((GATE, UP)):
            place = f"{place.rpartition('.ffn_')[0]}.{FUSED}"
        if place is None or not self._file.has(place):
            return None
        return place if expert is None or expert < self._file.header.tensors[place].shape[0] else None

    def _rows_of_expert(self, name: str, info: TensorInfo) -> tuple[int, int]:
        """The rows of an expert's matrix that a tensor of this name has: one half where gate and up are one matrix."""
        rows = info.shape[1]
        if not info.name.endswith(FUSED):
            return 0, rows
        place = gguf_name(name, self._family)
        assert place is not None
        return (0, rows // 2) if place.endswith(GATE) else (rows // 2, rows)

    def _order(self, name: str, info: TensorInfo) -> Tensor | None:
        """The row order of transformers, as rows of the file: neighbouring pairs become halves. None if they agree."""
        half = _KEY_HEADS.get(name.split(".")[-2])
        if half is not None and info.name.endswith("ssm_ba.weight"):
            groups = self._config.linear_num_key_heads
            return _rows(info, groups, "key heads").view(groups, 2, -1)[:, half].flatten()
        heads = self._heads.get(info.name.split(".")[-2])
        return None if heads is None else halves(info, heads)


def halves(info: TensorInfo, heads: int) -> Tensor:
    """The row order of transformers, as rows of the file, where that has neighbouring pairs in place of halves."""
    return _rows(info, heads, "heads").view(heads, -1, 2).transpose(1, 2).flatten()


def _rows(info: TensorInfo, heads: int, what: str) -> Tensor:
    """The numbers of a tensor's rows, of which each head has as many pairs; ValueError if it cannot be so."""
    rows = info.shape[0 if info.name.endswith("weight") else -1]
    if rows % (2 * heads):
        raise ValueError(f"tensor {info.name!r} has {rows} rows; it must be a multiple of twice its {heads} {what}. "
                         "Convert the model again")
    return torch.arange(rows)


def _by_turns(parts: list[Tensor]) -> Tensor:
    """Matrices or vectors [experts, rows, ..] as one, whose rows are theirs by turns."""
    return torch.stack(parts, 2).flatten(1, 2)
