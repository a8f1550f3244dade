"""Recurrent mixers against transformers' modules, against their formulas written plainly, and cut into pieces."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu, softplus
from transformers import DynamicCache

from families import RECURRENT
from mixers import KINDS, TOKENS, inputs, module_of
from shoal.model.layers.convolution import Convolution
from shoal.model.layers.gated_delta import GatedDelta
from shoal.model.layers.lightning import LightningAttention
from shoal.model.layers.mamba import SelectiveScan
from shoal.model.layers.mamba2 import Mamba2
from shoal.model.layers.mixer import Memory, Mixer
from shoal.model.layers.rg_lru import LinearUnit
from shoal.model.layers.short_conv import ShortConv

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")


def of_module(name: str, config: Any, module: Any, x: Tensor, first: int) -> tuple[Tensor, list[Tensor]]:
    """The module's outputs of `first` tokens together and then of single ones, and its states in our layout."""
    pieces = [x[:first], *(one[None] for one in x[first:])]
    if name == "recurrent_gemma":
        places = torch.arange(len(x))[None].split([len(piece) for piece in pieces], dim=1)
        outs = [module(piece[None], where, None)[0][0] for piece, where in zip(pieces, places, strict=True)]
        return torch.cat(outs), [module.conv1d_state[0].t(), module.rg_lru.recurrent_states[0], torch.ones(1)]
    if name == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        cache = MiniMaxCache()
        outs = [module(piece[None], None, None, cache)[0][0] for piece in pieces]
        return torch.cat(outs), [cache.get_linear_cache(0)[0]]
    cache = DynamicCache(config=config)
    word = "past_key_values" if name.startswith("lfm") else "cache_params"
    outs = [module(piece[None], **{word: cache})[0] for piece in pieces]
    window = cache.get_conv_state(0, state_idx=0)[0].t()
    if name.startswith("lfm"):
        return torch.cat(outs), [window]
    matrix = cache.get_recurrent_state(0, state_idx=0)[0]
    turned = isinstance(KINDS[name].mixer(module), Mamba2 | SelectiveScan)  # ours have the outputs' channels last
    return torch.cat(outs), [window, matrix.mT if turned else matrix]


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_outputs_and_states_are_those_of_the_module(name: str) -> None:
    config, module = module_of(name)
    mixer, x = KINDS[name].mixer(module), inputs(torch.float32)
    state = mixer.empty(x)
    found = mixer.step(x, state)
    first = TOKENS if name == "mamba2" else 5  # its module keeps to its limits in prompts alone
    wanted, states = of_module(name, config, copy.deepcopy(module), x, first)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    for own, theirs in zip(state, states, strict=True):
        assert (own - theirs[-len(own) :]).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_pieces_give_the_same_bits(name: str) -> None:
    mixer, x, dice = KINDS[name].mixer(module_of(name)[1]), inputs(torch.float32, 24), random.Random(name)
    whole, parts = mixer.empty(x), mixer.empty(x)
    wanted = mixer.step(x, whole)
    found, first = [], 0
    while first < len(x):
        last = min(len(x), first + dice.choice((1, 1, 2, 3, 7)))
        found.append(mixer.step(x[first:last], parts))
        first = last
    assert torch.equal(torch.cat(found), wanted) and all(map(torch.equal, parts, whole))


def convolved(conv: Convolution, past: list[Tensor]) -> Tensor:
    """The convolution of the last of all inputs so far."""
    taps, size = past[-len(conv.weight) :], len(conv.weight)
    total = sum((conv.weight[size - len(taps) + at] * tap for at, tap in enumerate(taps)), torch.zeros(()))
    return total if conv.bias is None else total + conv.bias


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt()


def delta_formula(mixer: GatedDelta, x: Tensor) -> Iterator[Tensor]:
    """Equation by equation, with the transition as a matrix and a state per head of its own."""
    heads, value, past = len(mixer.rate), len(mixer.norm), list[Tensor]()
    key = (mixer.conv.weight.shape[1] - heads * value) // 2 // mixer.key_heads
    states = [x.new_zeros(key, value) for _ in range(heads)]
    for line in mixer.project(x):
        qkv, gate, b, f = line.split([mixer.conv.weight.shape[1], heads * value, heads, mixer.decay_bias.numel()])
        past.append(qkv)
        q, k, v = silu(convolved(mixer.conv, past)).split([mixer.key_heads * key] * 2 + [heads * value])
        outs = []
        for head in range(heads):
            group = head * mixer.key_heads // heads
            own_q, own_k = (one.view(-1, key)[group] for one in (q, k))
            own_q, own_k = (one / (one @ one + 1e-6).sqrt() for one in (own_q, own_k))
            raw = f.view(heads, -1)[head] + mixer.decay_bias[head]
            log = -mixer.rate[head] * softplus(raw) if mixer.bound is None else (
                mixer.bound * torch.sigmoid(mixer.rate[head] * raw))
            beta = torch.sigmoid(b[head]) * (1 + mixer.doubled)
            turn = torch.eye(key, dtype=x.dtype) - beta * torch.outer(own_k, own_k)
            own_v = v.view(heads, value)[head]
            states[head] = turn @ (log.exp().expand(key)[:, None] * states[head]) + beta * torch.outer(own_k, own_v)
            out = root_mean_square(states[head].t() @ own_q / key**0.5, mixer.eps) * mixer.norm
            own_gate = gate.view(heads, value)[head]
            outs.append(out * torch.sigmoid(own_gate) * (own_gate if mixer.gate_act == "silu" else 1))
        yield torch.cat(outs)


def dual_formula(mixer: Mamba2, x: Tensor) -> Iterator[Tensor]:
    """Each head's output as a sum over all earlier tokens, without a state."""
    heads, size, past = len(mixer.a), mixer.head_dim, list[Tensor]()
    wide, shared, seen = heads * size, mixer.groups * mixer.state_dim, list[Any]()
    for line in mixer.project(x):
        gate, xbc, dt = line.split([wide, wide + 2 * shared, heads])
        past.append(xbc)
        own, b, c = silu(convolved(mixer.conv, past)).split([wide, shared, shared])
        step = softplus(dt + mixer.dt_bias).clamp(*mixer.limits)
        seen.append((own.view(heads, size), b.view(mixer.groups, -1), step))
        outs = []
        for head in range(heads):
            group, total = head * mixer.groups // heads, mixer.d[head] * own.view(heads, size)[head]
            for at, (earlier, keys, weight) in enumerate(seen):
                decay = sum((later[2][head] * mixer.a[head] for later in seen[at + 1 :]), torch.zeros(())).exp()
                score = keys[group] @ c.view(mixer.groups, -1)[group]
                total = total + decay * weight[head] * score * earlier[head]
            outs.append(total)
        y = torch.cat(outs)
        y = y * silu(gate) if mixer.norm is None or mixer.gate_first else y
        if mixer.norm is not None:
            y = torch.cat([root_mean_square(one, mixer.eps) for one in y.chunk(mixer.groups)]) * mixer.norm
            y = y if mixer.gate_first else y * silu(gate)
        yield y


def scan_formula(mixer: SelectiveScan, x: Tensor) -> Iterator[Tensor]:
    size, channels = mixer.a.shape
    past, state = list[Tensor](), x.new_zeros(channels, size)
    for line in mixer.project(x):
        before, gate = line.chunk(2)
        past.append(before)
        u = silu(convolved(mixer.conv, past))
        r, b, c = mixer.select(u[None])[0].split([len(mixer.select(u[None])[0]) - 2 * size, size, size])
        if mixer.norms is not None:
            r, b, c = (root_mean_square(one, mixer.eps) * norm
                       for one, norm in zip((r, b, c), mixer.norms, strict=True))
        dt = softplus(mixer.widen(r[None])[0] + mixer.dt_bias)
        for one in range(size):
            state[:, one] = (dt * mixer.a[one]).exp() * state[:, one] + dt * b[one] * u
        yield (state @ c + mixer.d * u) * silu(gate)


def short_formula(mixer: ShortConv, x: Tensor) -> Iterator[Tensor]:
    past = list[Tensor]()
    for line in mixer.project(x):
        b, c, own = line.chunk(3)
        past.append(b * own)
        yield c * convolved(mixer.conv, past)


def lightning_formula(mixer: LightningAttention, x: Tensor) -> Iterator[Tensor]:
    """Each head's output as a sum over all earlier tokens."""
    heads, seen = len(mixer.decay), list[Any]()
    for line in mixer.project(x):
        qkv, gate = line.split([3 * len(mixer.norm), len(mixer.norm)])
        seen.append([one.chunk(3) for one in silu(qkv).chunk(heads)])
        outs = [sum((mixer.decay[head] ** age * (k @ seen[-1][head][0]) * v
                     for age, (_, k, v) in enumerate(one[head] for one in reversed(seen))), torch.zeros(()))
                for head in range(heads)]
        yield torch.sigmoid(gate) * root_mean_square(torch.cat(outs), mixer.eps) * mixer.norm


def unit_formula(mixer: LinearUnit, x: Tensor) -> Iterator[Tensor]:
    past, hidden = list[Tensor](), torch.zeros(())
    for line in mixer.project(x):
        branch, before = line.chunk(2)
        past.append(before)
        own = convolved(mixer.conv, past)
        r, i = (torch.sigmoid(torch.block_diag(*weight).t() @ own + bias.flatten()) for weight, bias in mixer.gates)
        a = torch.exp(-8 * r * softplus(mixer.scale))
        hidden = i * own if len(past) == 1 else a * hidden + (1 - a**2).sqrt() * (i * own)
        yield hidden * gelu(branch, approximate="tanh")


FORMULAS: dict[type[Mixer], Callable[[Any, Tensor], Iterator[Tensor]]] = {
    GatedDelta: delta_formula, Mamba2: dual_formula, SelectiveScan: scan_formula, ShortConv: short_formula,
    LightningAttention: lightning_formula, LinearUnit: unit_formula,
}


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_outputs_are_those_of_the_formulas(name: str) -> None:
    mixer, x = KINDS[name].mixer(module_of(name, torch.float64)[1]), inputs(torch.float64)
    state: Memory = mixer.empty(x)
    found = mixer.recur(mixer.project(x), state)
    wanted = torch.stack([*FORMULAS[type(mixer)](mixer, x)])
    assert (found - wanted).abs().max() < 1e-10 * wanted.abs().max()


@torch.no_grad()
def test_a_state_that_is_not_kept_is_noticed() -> None:
    for name in ("qwen3_5", "lfm2"):
        mixer, x = KINDS[name].mixer(module_of(name)[1]), inputs(torch.float32)
        wanted = mixer.step(x, mixer.empty(x))
        found = torch.cat([mixer.step(piece, mixer.empty(x)) for piece in x.split(5)])
        assert torch.equal(found[:5], wanted[:5]) and not torch.allclose(found[5:7], wanted[5:7], atol=1e-3)
