"""Recurrences in the library, held against those of `shoal.model.layers`.

A state has the same tensors there, in float32 and one after the other in memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from shoal.errors import Unsupported
from shoal.model.layers.convolution import Convolution
from shoal.model.layers.gated_delta import GatedDelta
from shoal.model.layers.lightning import LightningAttention
from shoal.model.layers.mamba import SelectiveScan
from shoal.model.layers.mamba2 import Mamba2
from shoal.model.layers.mixer import Mixer
from shoal.model.layers.rg_lru import LinearUnit
from shoal.model.layers.short_conv import ShortConv
from shoal.model.packed.native.batch import address
from shoal.model.packed.native.library import LANES, MOST_KEYS, MOST_TAPS, RecurrenceStruct, require
from shoal.model.packed.shape import REMEDY

_GATED_DELTA, _MAMBA2, _SHORT_CONV, _SCAN, _UNIT, _LIGHTNING = range(6)


class NativeRecurrence:
    """A mixer's recurrence on the kernels; Unsupported if they do not have it, or not in this size.

    Attributes:
        struct: the library's form, without matrices.
        floats: numbers of a state.
        outputs: O.
    """

    def __init__(self, mixer: Mixer) -> None:
        self._kept: list[Tensor] = []
        if isinstance(mixer, GatedDelta):
            self.struct = self._delta(mixer)
        elif isinstance(mixer, Mamba2):
            self.struct = self._dual(mixer)
        elif isinstance(mixer, SelectiveScan):
            self.struct = self._scan(mixer)
        elif isinstance(mixer, LinearUnit):
            self.struct = self._unit(mixer)
        elif isinstance(mixer, ShortConv):
            self.struct = self._convolved(mixer.conv, kind=_SHORT_CONV, heads=1, groups=1)
        elif isinstance(mixer, LightningAttention):
            self.struct = self._lightning(mixer)
        else:
            raise Unsupported("such a layer on the kernels", f"they have no {type(mixer).__name__}", REMEDY)
        if self.struct.width > MOST_TAPS or self.struct.key_dim > MOST_KEYS:
            found = f"a convolution of {self.struct.width} taps and keys of {self.struct.key_dim} dimensions"
            raise Unsupported(found, f"the kernels take up to {MOST_TAPS} and {MOST_KEYS}", REMEDY)
        self.floats = sum(map(math.prod, mixer.state_sizes))
        self.outputs = (self.struct.heads * self.struct.value_dim or self.struct.channels) + mixer.memory

    def recur(self, inputs: Tensor, state: Tensor, threads: int = 1) -> Tensor:
        """As `Mixer.recur`, in float32, on the tensors of a state one after the other.

        The inputs of a selective scan, and of a gated delta rule with second matrices, are those that `whole` gives.
        """
        lines = inputs.float().contiguous()
        at = address("a state", state, (self.floats,))
        out, scratch = torch.empty(len(lines), self.outputs), torch.empty(len(lines), self.struct.channels)
        require().shoal_recur(self.struct, lines.data_ptr(), lines.shape[1], len(lines), at, scratch.data_ptr(),
                              out.data_ptr(), self.outputs, threads)
        return out

    @property
    def input_line(self) -> int:
        """Numbers from one token's inputs to the next one's: I rounded up to whole vectors."""
        struct = self.struct
        rows: int = sum(part.rows for part in struct.into)
        if struct.kind == _GATED_DELTA and struct.rank:
            rows += struct.heads * (struct.value_dim + struct.decays)
        if struct.kind == _SCAN:
            rows += struct.rank + 2 * struct.key_dim + struct.channels
        return -(-rows // LANES) * LANES

    def _delta(self, mixer: GatedDelta) -> RecurrenceStruct:
        _, (heads, key, value) = mixer.state_sizes
        return self._convolved(
            mixer.conv, kind=_GATED_DELTA, rate=self._at(mixer.rate), bias=self._at(mixer.decay_bias),
            norm=self._at(mixer.norm), heads=heads, groups=mixer.key_heads, key_dim=key, value_dim=value,
            decays=mixer.decay_bias.shape[1], sigmoid=mixer.gate_act == "sigmoid", doubled=mixer.doubled,
            by_turns=mixer.by_turns, eps=mixer.eps, bound=mixer.bound or 0.0, rank=mixer.rank,
        )

    def _dual(self, mixer: Mamba2) -> RecurrenceStruct:
        norm = None if mixer.norm is None else self._at(mixer.norm)
        return self._convolved(
            mixer.conv, kind=_MAMBA2, rate=self._at(mixer.a), bias=self._at(mixer.dt_bias), skip=self._at(mixer.d),
            norm=norm, heads=len(mixer.a), groups=mixer.groups, key_dim=mixer.state_dim, value_dim=mixer.head_dim,
            decays=1, gate_first=mixer.gate_first, eps=mixer.eps, least=mixer.limits[0], most=mixer.limits[1],
        )

    def _scan(self, mixer: SelectiveScan) -> RecurrenceStruct:
        state, channels = mixer.a.shape
        norm = None if mixer.norms is None else self._at(torch.cat(mixer.norms))
        return self._convolved(
            mixer.conv, kind=_SCAN, rate=self._at(mixer.a), bias=self._at(mixer.dt_bias), skip=self._at(mixer.d),
            norm=norm, heads=1, groups=1, key_dim=state, value_dim=channels, rank=mixer.rank, eps=mixer.eps,
            shows=mixer.shows,
        )

    def _unit(self, mixer: LinearUnit) -> RecurrenceStruct:
        heads, size = mixer.gates[0][1].shape
        weights, biases = (torch.stack([gate[part] for gate in mixer.gates]) for part in range(2))
        return self._convolved(
            mixer.conv, kind=_UNIT, rate=self._at(-8 * softplus(mixer.scale)), bias=self._at(biases),
            gates=self._at(weights), heads=heads, groups=1, value_dim=size,
        )

    def _lightning(self, mixer: LightningAttention) -> RecurrenceStruct:
        ((heads, size, _),) = mixer.state_sizes
        return RecurrenceStruct(kind=_LIGHTNING, rate=self._at(mixer.decay), norm=self._at(mixer.norm), width=1,
                                heads=heads, groups=1, key_dim=size, value_dim=size, eps=mixer.eps)

    def _convolved(self, conv: Convolution, **fields: int | float | None) -> RecurrenceStruct:
        bias = None if conv.bias is None else self._at(conv.bias)
        width, channels = conv.weight.shape
        return RecurrenceStruct(conv=self._at(conv.weight), conv_bias=bias, width=width, channels=channels, **fields)

    def _at(self, tensor: Tensor) -> int:
        """The address of a float32 copy."""
        self._kept.append(tensor.detach().float().contiguous().clone())
        return self._kept[-1].data_ptr()
