"""MiniMax against its formulas in float64: lightning attention, experts, residuals that start from normed states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from backends import packed
from drive import gap, prompt
from families import RECURRENT, tiny
from shoal.errors import Unsupported
from shoal.model.packed import build as build_module
from shoal.model.packed import native
from shoal.model.packed.shape import shape_of
from shoal.model.parity import chunked_logits

LAYERS = 4
pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


class Formula:
    """One token after another (MiniMax-01, arXiv 2501.08313, section 2), with the slopes that the modules hold."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.held = dict([*model.named_parameters(), *model.named_buffers()])
        self.angles = model.model.rotary_emb.inv_freq
        self.seen: dict[int, Any] = {}

    def __call__(self, ids: list[int]) -> Tensor:
        return torch.stack([self.token(token, place) for place, token in enumerate(ids)])

    def token(self, token: int, place: int) -> Tensor:
        own, x = self.config, self.held["model.embed_tokens.weight"][token]
        for layer, kind in enumerate(own.layer_types):
            name, linear = f"model.layers.{layer}.", kind == "linear_attention"
            part, mix = ("linear_attn", self.lightning) if linear else ("full_attn", self.attention)
            inner = normed(x, self.held[f"{name}input_layernorm.weight"], own.rms_norm_eps)
            mixed = mix(layer, f"{name}self_attn.", inner, place)
            x = getattr(own, f"{part}_alpha_factor") * inner + getattr(own, f"{part}_beta_factor") * mixed
            inner = normed(x, self.held[f"{name}post_attention_layernorm.weight"], own.rms_norm_eps)
            x = own.mlp_alpha_factor * inner + own.mlp_beta_factor * self.experts(f"{name}mlp.", inner)
        return self.held["lm_head.weight"] @ normed(x, self.held["model.norm.weight"], own.rms_norm_eps)

    def lightning(self, layer: int, name: str, x: Tensor, place: int) -> Tensor:
        heads, out = self.config.num_attention_heads, []
        lines = silu(self.held[f"{name}qkv_proj.weight"] @ x).view(heads, 3, -1)
        states = self.seen.setdefault(layer, [0.0] * heads)
        for head, (q, k, v) in enumerate(lines):
            # the twin takes the exponential of a slope in float32
            decay = torch.exp(-self.held[f"{name}slope_rate"][head, 0, 0].float()).double()
            states[head] = states[head] * decay + torch.outer(k, v)
            out.append(q @ states[head])
        mixed = normed(torch.cat(out), self.held[f"{name}norm.weight"], 1e-6)
        return self.held[f"{name}out_proj.weight"] @ (torch.sigmoid(self.held[f"{name}output_gate.weight"] @ x) * mixed)

    def attention(self, layer: int, name: str, x: Tensor, place: int) -> Tensor:
        own = self.config
        size = own.hidden_size // own.num_attention_heads
        q, k, v = ((self.held[f"{name}{part}_proj.weight"] @ x).view(-1, size) for part in "qkv")
        seen = self.seen.setdefault(layer, [])
        seen.append((self.turned(k, place), v))
        out = []
        for head, query in enumerate(self.turned(q, place)):
            shared = head // (own.num_attention_heads // own.num_key_value_heads)
            scores = torch.stack([query @ key[shared] * size**-0.5 for key, _ in seen]).softmax(0)
            out.append(sum(share * value[shared] for share, (_, value) in zip(scores, seen, strict=True)))
        return self.held[f"{name}o_proj.weight"] @ torch.cat(out)

    def turned(self, x: Tensor, place: int) -> Tensor:
        angle = torch.tensor(float(place)) * self.angles.float()
        found = torch.complex(*x.chunk(2, dim=1)) * torch.complex(angle.cos().double(), angle.sin().double())
        return torch.cat([found.real, found.imag], dim=1)

    def experts(self, name: str, x: Tensor) -> Tensor:
        shares = (self.held[f"{name}gate.weight"] @ x).softmax(0)
        best, out = shares.topk(self.config.num_experts_per_tok), torch.zeros_like(x)
        for share, one in zip(best.values, best.indices.tolist(), strict=True):
            gate, up = (self.held[f"{name}experts.gate_up_proj"][one] @ x).chunk(2)
            out += share / best.values.sum() * (self.held[f"{name}experts.down_proj"][one] @ (silu(gate) * up))
        return out


@torch.no_grad()
def test_logits_are_those_of_the_formulas() -> None:
    model, ids = tiny("minimax", layers=LAYERS), prompt(24)
    wanted, runner = Formula(model)(ids), packed(model)
    for sizes in ((24,), (5, 1, 14, 4)):
        assert gap(chunked_logits(runner, ids, sizes), wanted) < 1e-10 * float(wanted.abs().max())


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@torch.no_grad()
def test_kernels_give_them_however_the_text_is_cut() -> None:
    ids, runner = prompt(40), packed(tiny("minimax", dtype=torch.float32, layers=LAYERS), kernels=True)
    wanted, whole = Formula(tiny("minimax", layers=LAYERS))(ids), chunked_logits(runner, ids, (40,))
    assert gap(whole, wanted) < 1e-4 * float(wanted.abs().max())
    for sizes in ((5, 25, 1, 9), (17, 23), (1,) * 40):
        assert torch.equal(chunked_logits(runner, ids, sizes), whole)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [{"kept": None}, {"kept": (1.3, 0.9, 1.3)}, {"out_scales": (0.8, 1.1, 0.7)}], ids=str)
def test_the_comparison_has_power(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("minimax", layers=LAYERS), prompt(16)
    shape = shape_of(model.config, torch.float64)
    monkeypatch.setattr(build_module, "shape_of", lambda *_: replace(shape, **wrong))
    wanted = Formula(model)(ids)
    assert gap(chunked_logits(packed(model), ids, (16,)), wanted) > 1e-3 * float(wanted.abs().max())


def test_windows_are_refused() -> None:
    config = tiny("minimax", layers=LAYERS).config
    with pytest.raises(Unsupported, match="sliding_window=8"):
        shape_of(type(config)(**{**config.to_dict(), "sliding_window": 8}))
