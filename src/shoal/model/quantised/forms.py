"""How other tools store a matrix W [out, in], and what it is.

A form names the tensor that stands for the matrix, those beside it, and reads them. The layouts are those of the tools
that write them: GPTQModel, AutoAWQ, compressed-tensors, bitsandbytes; FP8 as DeepSeek-V3's checkpoints have it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.gguf.blocks import Blocks
from shoal.model.packed.source import Source, mxfp4
from shoal.model.quantised.levels import GroupScaled, unpack

REMEDY = "Fetch it again, or convert it to plain weights or GGUF"
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AutoAWQ's word has the number of each of eight columns."""
_E2M1 = torch.tensor([sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Stored:
    """The tensors of one matrix.

    Args:
        source: the checkpoint.
        types: of its tensors by name, as safetensors calls them.
        stem: what their names begin with.
    """

    def __init__(self, source: Source, types: Mapping[str, str], stem: str) -> None:
        self._source, self._types, self.stem = source, types, stem

    def has(self, part: str) -> bool:
        """Whether there is a part."""
        return self._source.has(f"{self.stem}.{part}")

    def __getitem__(self, part: str) -> Tensor:
        """A part; Unsupported if it is missing."""
        if not self.has(part):
            what = f"a checkpoint without {f'{self.stem}.{part}'!r}"
            raise Unsupported(what, "the numbers of that matrix mean nothing without it", REMEDY)
        return self._source[f"{self.stem}.{part}"]

    def type(self, part: str) -> str | None:
        """The type of a part, by which nothing is read; None if there is none."""
        return self._types.get(f"{self.stem}.{part}")

    def misfit(self, why: str) -> Unsupported:
        """The error for parts that do not belong together."""
        return Unsupported(f"a checkpoint whose {self.stem!r} contradicts itself: {why}", "no matrix is so", REMEDY)


class StoredForm(ABC):
    """A way to store matrices.

    Args:
        said: the checkpoint's `quantization_config`.

    Attributes:
        main: the part that stands for a matrix.
        beside: the parts that may lie beside it.
    """

    main: ClassVar[str]
    beside: ClassVar[tuple[str, ...]]

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.said = said

    def reads(self, stored: Stored) -> bool:
        """Whether a matrix whose `main` is there is stored so; else it is a plain one."""
        return True

    def in_blocks(self, stored: Stored) -> bool:
        """Whether it may be held as blocks of the same numbers."""
        return True

    @abstractmethod
    def read(self, stored: Stored) -> GroupScaled | Blocks | Tensor:
        """The matrix, as integers with scales, in blocks or in float32."""

    def group(self, key: str, columns: int) -> int:
        """A size of groups of the config; -1 stands for all columns."""
        size = self.said.get(key, -1)
        size = columns if size in (-1, None) else size
        if not isinstance(size, int) or size < 1:
            raise Unsupported(f"a checkpoint whose {key} is {size!r}", "it must be -1 or positive", REMEDY)
        return size

    def bits(self, key: str, known: Sequence[int]) -> int:
        """The bits of a level."""
        bits = self.said.get(key)
        if not isinstance(bits, int) or bits not in known:
            raise Unsupported(f"{self.said.get('quant_method')} with {key} {bits!r}",
                              f"it must be one of {', '.join(map(str, known))}", REMEDY)
        return bits


class Gptq(StoredForm):
    """GPTQ (arXiv 2210.17323): levels packed along the inputs, zero points less one unless the format is `gptq_v2`."""

    main, beside = "qweight", ("qzeros", "scales", "g_idx")

    @override
    def read(self, stored: Stored) -> GroupScaled:
        bits = self.bits("bits", (2, 3, 4, 8))
        levels = unpack(stored["qweight"].t().contiguous(), bits)
        scales, zeros = stored["scales"].t(), unpack(stored["qzeros"], bits).t().to(torch.int16)
        size = self.group("group_size", levels.shape[1])
        before = self.said.get("checkpoint_format", "gptq") != "gptq_v2"
        order = torch.arange(levels.shape[1]) // size
        group = stored["g_idx"].long() if stored.has("g_idx") else order
        if len(group) != len(order) or int(group.min()) < 0 or int(group.max()) >= scales.shape[1]:
            raise stored.misfit(f"g_idx names {len(group)} groups, up to {int(group.max())}, of {scales.shape[1]}")
        return checked(stored, levels, scales, zeros[: len(levels)] + before,
                       None if torch.equal(group, order) else group)


class Awq(StoredForm):
    """AWQ (arXiv 2306.00978) as AutoAWQ writes it for its `gemm` kernels: packed along the outputs."""

    main, beside = "qweight", ("qzeros", "scales")

    @override
    def read(self, stored: Stored) -> GroupScaled:
        bits = self.bits("bits" if "bits" in self.said else "w_bit", (4,))
        if (version := str(self.said.get("version", "gemm")).lower()) != "gemm":
            raise Unsupported(f"AWQ of version {version!r}", "its order of numbers is not known here", REMEDY)
        levels, zeros = (self._ordered(unpack(stored[part], bits)).t() for part in ("qweight", "qzeros"))
        return checked(stored, levels, stored["scales"].t(), zeros.to(torch.int16))

    def _ordered(self, packed: Tensor) -> Tensor:
        by_eight: Tensor = packed.unflatten(1, (-1, len(_AWQ_PLACES)))
        return by_eight[..., list(_AWQ_PLACES)].flatten(1)


class Packed(StoredForm):
    """compressed-tensors' `pack-quantized`: levels packed along the inputs, less half of their range."""

    main = "weight_packed"
    beside = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point")

    @override
    def read(self, stored: Stored) -> GroupScaled:
        packed, scales = stored["weight_packed"], stored["weight_scale"]
        if packed.dtype != torch.int32 or packed.dim() != 2 or scales.dim() != 2:
            why = f"it is {packed.dtype} {list(packed.shape)}; integers are int32 [out, n], scales [out, groups]"
            raise Unsupported(f"a checkpoint whose {stored.stem}.weight_packed cannot be read", why, REMEDY)
        rows, columns = (int(size) for size in stored["weight_shape"])
        bits = next((bits for bits in range(1, 9) if -(-columns * bits // 32) == packed.shape[1]), 0)
        if not bits or rows != len(packed):
            raise stored.misfit(f"integers {list(packed.shape)} hold no matrix [{rows}, {columns}]")
        levels = unpack(packed, bits)[:, :columns]
        zeros = torch.full(scales.shape, 1 << bits - 1, dtype=torch.int16)
        if stored.has("weight_zero_point"):
            zeros = unpack(stored["weight_zero_point"].t().contiguous(), bits).t()[:rows].to(torch.int16)
        group = stored["weight_g_idx"].long() if stored.has("weight_g_idx") else None
        if group is not None and int(group.min()) < 0:  # -1 everywhere stands for neighbours
            group = None
        return checked(stored, levels, scales, zeros, group)


class FourBitFloats(StoredForm):
    """compressed-tensors' `mxfp4-pack-quantized` and `nvfp4-pack-quantized`: two neighbours in a byte, E2M1 each.

    MXFP4 has an exponent for 32 numbers; NVFP4 an E4M3 scale for 16, over one of the whole matrix.
    """

    main, beside = "weight_packed", (*Packed.beside, "weight_global_scale", "input_global_scale")

    @override
    def reads(self, stored: Stored) -> bool:
        return stored.type("weight_packed") == "U8"

    @override
    def in_blocks(self, stored: Stored) -> bool:
        return stored.type("weight_scale") == "U8"

    @override
    def read(self, stored: Stored) -> Blocks | Tensor:
        pairs, scales = stored["weight_packed"], stored["weight_scale"]
        each = 2 * pairs.shape[1] // max(1, scales.shape[1])
        if pairs.dim() != 2 or scales.shape != (len(pairs), 2 * pairs.shape[1] // max(1, each)):
            raise stored.misfit(f"bytes {list(pairs.shape)} with scales {list(scales.shape)}")
        if scales.dtype == torch.uint8:
            return mxfp4(pairs.unflatten(1, (-1, each // 2)), scales)
        whole = scales.float() / stored["weight_global_scale"].float()
        if not whole.isfinite().all():
            raise stored.misfit("a scale is no finite number")
        numbers = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
        return _E2M1[numbers.long()] * whole.repeat_interleave(each, 1)


class Scaled(StoredForm):
    """Int8 or FP8 numbers with scales: of the whole matrix, of rows, or of blocks of rows and columns."""

    main = "weight"
    beside = ("weight_scale_inv", "weight_scale", "input_scale", "weight_zero_point", "input_zero_point",
              "activation_scale", "input_scale_ub")

    @override
    def reads(self, stored: Stored) -> bool:
        return stored.type("weight") in ("F8_E4M3", "F8_E5M2", "I8")

    @override
    def in_blocks(self, stored: Stored) -> bool:
        return stored.type("weight") == "I8"

    @override
    def read(self, stored: Stored) -> GroupScaled | Tensor:
        numbers = stored["weight"]
        scales = stored["weight_scale_inv" if stored.has("weight_scale_inv") else "weight_scale"].float()
        if numbers.dtype in FP8 and numbers.float().isnan().any() or not scales.isfinite().all():
            raise Unsupported(f"a checkpoint whose {stored.stem}.weight holds NaN", "an FP8 weight is a number", REMEDY)
        if not scales.numel() or scales.dim() > 2 or numbers.dim() != 2:
            raise stored.misfit(f"scales {list(scales.shape)} for numbers {list(numbers.shape)}")
        if scales.numel() == 1:
            scales = scales.reshape(1, 1)
        scales = scales.unsqueeze(1) if scales.dim() == 1 else scales
        if numbers.dtype == torch.int8 and scales.shape in ((1, 1), (len(numbers), 1)):
            if stored.has("weight_zero_point") and stored["weight_zero_point"].any():
                return (numbers.float() - stored["weight_zero_point"].float()) * scales
            scales = scales.expand(len(numbers), 1)
            return checked(stored, numbers, scales, torch.zeros_like(scales, dtype=torch.int16))
        return numbers.float() * self._wide(stored, scales, numbers)

    def _wide(self, stored: Stored, scales: Tensor, numbers: Tensor) -> Tensor:
        """The scale of each number; a last block of rows or columns may be a part of one."""
        sizes = self.said.get("weight_block_size") or [-(-size // count) for size, count in
                                                       zip(numbers.shape, scales.shape, strict=True)]
        if min(sizes) < 1:
            raise Unsupported(f"a checkpoint whose weight_block_size is {sizes}", "sizes are positive", REMEDY)
        for place, (size, block) in enumerate(zip(numbers.shape, sizes, strict=True)):
            if scales.shape[place] == 1:
                continue
            if scales.shape[place] != -(-size // block):
                raise stored.misfit(f"scales {list(scales.shape)} in blocks of {sizes} for {list(numbers.shape)}")
            scales = scales.repeat_interleave(block, place).narrow(place, 0, size)
        return scales


class NormalFloats(StoredForm):
    """bitsandbytes' nf4 and fp4 (QLoRA, arXiv 2305.14314, section 3), with scales in 8 bits or plain, and its int8."""

    main = "weight"
    beside = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
              "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format")

    @override
    def reads(self, stored: Stored) -> bool:
        return stored.type("weight") in ("U8", "I8")

    @override
    def in_blocks(self, stored: Stored) -> bool:
        return False

    @override
    def read(self, stored: Stored) -> Tensor:
        numbers = stored["weight"]
        if numbers.dtype == torch.int8:
            return numbers.float() * (stored["SCB"].float() / 127).unsqueeze(1)
        kind = "fp4" if stored.has("weight.quant_state.bitsandbytes__fp4") else "nf4"
        state = json.loads(stored[f"weight.quant_state.bitsandbytes__{kind}"].numpy().tobytes())
        largest = stored["weight.absmax"]
        if largest.dtype == torch.uint8:
            outer = stored["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(largest)]
            largest = stored["weight.nested_quant_map"][largest.long()] * outer + state["nested_offset"]
        both = torch.stack([numbers.flatten() >> 4, numbers.flatten() & 15], 1).flatten()
        rows, columns = state["shape"]
        size = state["blocksize"]
        if len(both) < rows * columns or not 0 < size <= len(both) or len(largest) * size < rows * columns:
            raise stored.misfit(f"{len(both)} numbers and {len(largest)} scales for a matrix {[rows, columns]}")
        values = stored["weight.quant_map"][both[: rows * columns].long()]
        return (values * largest.repeat_interleave(size)[: len(values)]).view(rows, columns)


def checked(stored: Stored, levels: Tensor, scales: Tensor, zeros: Tensor, group: Tensor | None = None) -> GroupScaled:
    """Levels whose parts fit each other; the error names them if they do not."""
    if scales.shape != zeros.shape or len(scales) != len(levels) or not scales.shape[1] or (
            group is None and levels.shape[1] % scales.shape[1]):
        raise stored.misfit(f"levels {list(levels.shape)}, scales {list(scales.shape)}, zeros {list(zeros.shape)}")
    if not scales.isfinite().all():
        raise stored.misfit("a scale is no finite number")
    return GroupScaled(levels, scales, zeros, group)


FORMS: Mapping[str, tuple[type[StoredForm], ...]] = {
    "gptq": (Gptq,), "awq": (Awq,), "fp8": (Scaled,), "fbgemm_fp8": (Scaled,), "bitsandbytes": (NormalFloats,),
    "compressed-tensors": (FourBitFloats, Packed, Scaled),
}
"""By the config's `quant_method`."""


def settings(config: Any) -> Mapping[str, Any]:
    """A config's `quantization_config`; Unsupported if weights mean nothing without what else it names."""
    held = getattr(config, "quantization_config", None) or config.get_text_config().quantization_config
    said: dict[str, Any] = held if isinstance(held, dict) else held.to_dict()
    for key in ("transform_config", "sparsity_config"):
        part = said.get(key) or {}
        if part.get("format", "dense") != "dense" or part.get("config_groups"):
            raise Unsupported(f"a checkpoint with a {key}", "its weights are read through it alone", REMEDY)
    return said
