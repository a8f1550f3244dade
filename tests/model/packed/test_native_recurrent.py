"""Recurrences of the library against those in torch, cut into pieces, and shared among threads."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu
from typing_extensions import override

from families import RECURRENT
from mixers import KINDS, inputs, module_of, row_by_row
from shoal.model.layers.convolution import Convolution
from shoal.model.layers.gated_delta import GatedDelta
from shoal.model.layers.mamba import SelectiveScan
from shoal.model.layers.mamba2 import Mamba2
from shoal.model.layers.mixer import Memory, Mixer
from shoal.model.layers.rg_lru import LinearUnit
from shoal.model.packed import native
from shoal.model.packed.native.recurrence import NativeRecurrence

pytestmark = [
    pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states"),
    pytest.mark.skipif(not native.available(), reason=f"the native kernels do not run here: {native.why_not()}"),
]
NAMES = ("qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "mamba2", "granite4", "falcon_h1",
         "falcon_h1 with a norm", "mamba", "falcon_mamba", "jamba", "lfm2", "recurrent_gemma", "minimax")
NONE = row_by_row(torch.zeros(1, 1))


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def wide_delta(decays: int) -> GatedDelta:
    """Sizes of real models, and more columns than a vector has lanes."""
    heads, groups, key, value = 4, 2, 128, 100
    conv = Convolution(drawn(4, 2 * groups * key + heads * value))
    return GatedDelta(NONE, NONE, groups, conv, drawn(heads, 1).exp(), drawn(heads, decays, seed=1),
                      drawn(value, seed=2), 1e-6)


def wide_dual() -> Mamba2:
    heads, groups, state, value = 6, 2, 128, 80
    conv = Convolution(drawn(4, heads * value + 2 * groups * state), drawn(heads * value + 2 * groups * state, seed=1))
    return Mamba2(NONE, NONE, conv, -drawn(heads).exp(), drawn(heads), drawn(heads, seed=2), value, groups, state,
                  norm=drawn(heads * value, seed=3), eps=1e-5)


def wide_scan(normed: bool) -> SelectiveScan:
    channels, state, rank = 330, 19, 21
    norms = (drawn(rank, seed=8), drawn(state, seed=9), drawn(state, seed=10)) if normed else None
    return SelectiveScan(
        NONE, NONE, Convolution(drawn(4, channels), drawn(channels, seed=1)),
        row_by_row(drawn(rank + 2 * state, channels, seed=3) / 18), row_by_row(drawn(channels, rank, seed=4) / 5),
        -drawn(state, channels, seed=5).exp(), drawn(channels, seed=6), drawn(channels, seed=7), rank, norms, 1e-5)


def wide_unit() -> LinearUnit:
    heads, size = 3, 70
    first, second = ((drawn(heads, size, size, seed=2 + number) / 4, drawn(heads, size, seed=4 + number))
                     for number in range(2))
    return LinearUnit(NONE, NONE, Convolution(drawn(4, heads * size), drawn(heads * size, seed=1)),
                      drawn(heads * size, seed=6), (first, second))


def for_kernels(mixer: Mixer, lines: torch.Tensor) -> torch.Tensor:
    """The inputs as the library takes them: those of a scan with what follows from its convolved x."""
    if isinstance(mixer, GatedDelta):
        return mixer.whole(lines)
    if not isinstance(mixer, SelectiveScan):
        return lines
    window, _ = mixer.empty(lines)
    before = lines[:, : mixer.a.shape[1]]
    return mixer.whole(lines, torch.stack([silu(mixer.conv(one, window)) for one in before]))


def cases() -> dict[str, tuple[Mixer, torch.Tensor]]:
    found = {name: KINDS[name].mixer(module_of(name)[1]) for name in NAMES}
    lines = {name: (mixer, mixer.project(inputs(torch.float32, 24))) for name, mixer in found.items()}
    for name, wide in (("wide", wide_delta(1)), ("wide, by channels", wide_delta(128))):
        size = wide.conv.weight.shape[1] + 4 * 100 + 4 + wide.decay_bias.numel()
        lines[name] = wide, drawn(24, size, seed=5)
    dual = wide_dual()
    lines["wide, dual"] = dual, drawn(24, dual.conv.weight.shape[1] + 6 * 80 + 6, seed=6)
    lines["wide, unit"] = wide_unit(), drawn(24, 420, seed=12)
    lines["wide, scan that shows"] = replace(wide_scan(False), shows=True), drawn(24, 660, seed=13)
    return lines | {f"wide, scan{end}": (wide_scan(bool(end)), drawn(24, 660, seed=11)) for end in ("", " with norms")}


def flat_of(mixer: Mixer) -> torch.Tensor:
    """The state before the first token, its tensors one after the other."""
    return torch.zeros(sum(map(math.prod, mixer.state_sizes)))


@pytest.fixture(params=[*NAMES, "wide", "wide, by channels", "wide, dual", "wide, scan",
                        "wide, scan with norms", "wide, scan that shows", "wide, unit"])
def case(request: pytest.FixtureRequest) -> tuple[Mixer, torch.Tensor]:
    return cases()[request.param]


@torch.no_grad()
def test_outputs_and_states_are_those_of_torch(case: tuple[Mixer, torch.Tensor]) -> None:
    mixer, lines = case
    state, flat = mixer.empty(lines), flat_of(mixer)
    wanted, found = mixer.recur(lines, state), NativeRecurrence(mixer).recur(for_kernels(mixer, lines), flat)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    for one, other in zip(state, mixer.views(flat), strict=True):
        assert (one - other).abs().max() < 1e-5 * one.abs().max()


@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.no_grad()
def test_pieces_and_threads_give_the_same_bits(case: tuple[Mixer, torch.Tensor], threads: int) -> None:
    mixer, lines = case
    kernel, dice, lines = NativeRecurrence(mixer), random.Random(threads), for_kernels(mixer, lines)
    whole, parts = flat_of(mixer), flat_of(mixer)
    wanted, found, first = kernel.recur(lines, whole), [], 0
    while first < len(lines):
        last = min(len(lines), first + dice.choice((1, 1, 2, 5)))
        found.append(kernel.recur(lines[first:last], parts, threads))
        first = last
    assert torch.equal(torch.cat(found), wanted) and torch.equal(parts, whole)


@torch.no_grad()
def test_the_comparison_has_power() -> None:
    mixer, lines = cases()["qwen3_5"]
    assert isinstance(mixer, GatedDelta)
    wanted = mixer.recur(lines, mixer.empty(lines))
    for wrong in (replace(mixer, doubled=True), replace(mixer, gate_act="sigmoid"), replace(mixer, key_heads=1)):
        try:
            found = NativeRecurrence(wrong).recur(lines, flat_of(wrong))
        except ValueError:
            continue
        assert (found - wanted).abs().max() > 1e-3 * wanted.abs().max()


class Unknown(Mixer):
    """A recurrence without a kernel."""

    state_sizes = ((1,),)

    @override
    def recur(self, inputs: torch.Tensor, state: Memory) -> torch.Tensor:
        return inputs


def test_what_the_kernels_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no Unknown"):
        NativeRecurrence(Unknown(NONE, NONE))
    with pytest.raises(ValueError, match="9 taps"):
        NativeRecurrence(replace(wide_dual(), conv=Convolution(drawn(9, 6 * 80 + 4 * 128))))
