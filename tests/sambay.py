"""SambaY by the paper's formulas (arXiv 2507.06607, 2312.00752, 2410.05258), token by token, in plain loops.

Nothing here is shared with the library but the published names: the oracle reads a config's dictionary and tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drive import prompt
from schedules import Job
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.prompt_lookup import PromptLookup

VOCAB, WINDOW, LAYERS = 97, 8, 16
SIZES: dict[str, Any] = {
    "model_type": "phi4flash", "architectures": ["Phi4FlashForCausalLM"], "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 48, "layer_norm_eps": 1e-5, "max_position_embeddings": 512, "mb_per_layer": 2,
    "num_attention_heads": 8, "num_hidden_layers": LAYERS, "num_key_value_heads": 4, "sliding_window": WINDOW,
    "tie_word_embeddings": True, "vocab_size": VOCAB, "mamba_d_state": 5, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "mlp_bias": False, "lm_head_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0,
    "resid_pdrop": 0.0, "initializer_range": 0.02, "use_cache": True, "transformers_version": "4.46.1",
    "auto_map": {"AutoConfig": "configuration_phi4flash.Phi4FlashConfig",
                 "AutoModelForCausalLM": "modeling_phi4flash.Phi4FlashForCausalLM"},
}
"""As the published config.json is, but tiny."""


def role(layer: int, layers: int = LAYERS) -> str:
    """What a layer is, by its number, as the index of the published tensors shows."""
    even, half = layer % 2 == 0, layers // 2
    if layer < half + 2:
        return "mamba" if even else "full" if layer > half else "window"
    return "memory" if even else "cross"


def shapes(sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor by its published name."""
    hidden, heads, kv = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    size, state, inner, rank = hidden // heads, sizes["mamba_d_state"], 2 * hidden, math.ceil(hidden / 16)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    norms = ["model.final_layernorm"]
    for layer in range(sizes["num_hidden_layers"]):
        name, kind = f"model.layers.{layer}.", role(layer, sizes["num_hidden_layers"])
        norms += [name + "input_layernorm", name + "post_attention_layernorm"]
        own: dict[str, tuple[int, ...]] = {"mlp.fc1.weight": (2 * sizes["intermediate_size"], hidden),
                                           "mlp.fc2.weight": (hidden, sizes["intermediate_size"])}
        if kind == "mamba":
            own |= {"attn.in_proj.weight": (2 * inner, hidden), "attn.conv1d.weight": (inner, 1, 4),
                    "attn.conv1d.bias": (inner,), "attn.x_proj.weight": (rank + 2 * state, inner),
                    "attn.dt_proj.weight": (inner, rank), "attn.dt_proj.bias": (inner,), "attn.A_log": (inner, state),
                    "attn.D": (inner,), "attn.out_proj.weight": (hidden, inner)}
        elif kind == "memory":
            own |= {"attn.in_proj.weight": (inner, hidden), "attn.out_proj.weight": (hidden, inner)}
        else:
            rows = hidden + (0 if kind == "cross" else 2 * kv * size)
            own |= {"attn.Wqkv.weight": (rows, hidden), "attn.Wqkv.bias": (rows,), "attn.out_proj.bias": (hidden,),
                    "attn.out_proj.weight": (hidden, hidden), "attn.inner_cross_attn.subln.weight": (2 * size,),
                    **{f"attn.inner_cross_attn.lambda_{one}": (size,) for one in ("q1", "k1", "q2", "k2")}}
        found |= {name + key: shape for key, shape in own.items()}
    return found | {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}


def random_tensors(sizes: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random float64 weights under which every layer counts and greedy texts wander."""
    draw, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in sorted(shapes(sizes).items()):
        noise = torch.randn(shape, generator=draw, dtype=torch.float64)
        if name.endswith("norm.weight") or name.endswith("subln.weight"):
            found[name] = 1 + 0.1 * noise
        elif len(shape) == 1 or name.endswith("A_log"):
            found[name] = 0.3 * noise
        else:
            found[name] = (0.5 if "embed" in name else 1.3) * noise / shape[-1] ** 0.5
    found["model.embed_tokens.weight"] *= sizes["hidden_size"] ** 0.5
    found["model.final_layernorm.weight"] *= 4 / found["model.embed_tokens.weight"].std() / sizes["hidden_size"] ** 0.5
    return found


def write(folder: Path, sizes: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder as the published one is: config.json and safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


Runs = Callable[[int, int], bool]
"""Whether a layer runs a position."""


class Oracle:
    """One text, one token after the other; each layer keeps what the formulas say."""

    def __init__(self, sizes: dict[str, Any], tensors: dict[str, Tensor], runs: Runs = lambda *_: True) -> None:
        self.sizes, self._tensors, self._runs = sizes, tensors, runs
        self._layers = sizes["num_hidden_layers"]
        self.keys: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self.states: dict[int, Tensor] = {}
        self.inputs: dict[int, list[Tensor]] = {}
        self.position = 0

    def feed(self, token: int) -> Tensor:
        """Logits [V] after one more token."""
        memory, x = torch.empty(0), self._tensors["model.embed_tokens.weight"][token]
        for layer in range(self._layers):
            if not self._runs(layer, self.position):
                continue
            name, kind = f"model.layers.{layer}.", role(layer, self._layers)
            normed = self._norm(x, name + "input_layernorm")
            if kind == "mamba":
                out, memory = self._mamba(normed, layer, name + "attn.")
            elif kind == "memory":
                out = self._matrix(name + "attn.out_proj", memory * _silu(self._matrix(name + "attn.in_proj", normed)))
            else:
                out = self._attend(normed, layer, name + "attn.", kind)
            x = x + out
            both = self._matrix(name + "mlp.fc1", self._norm(x, name + "post_attention_layernorm"))
            gate, up = both[: len(both) // 2], both[len(both) // 2 :]
            x = x + self._matrix(name + "mlp.fc2", _silu(gate) * up)
        self.position += 1
        return self._tensors["model.embed_tokens.weight"] @ self._norm(x, "model.final_layernorm")

    def read(self, ids: Sequence[int]) -> Tensor:
        """Logits [T, V] of a text."""
        return torch.stack([self.feed(token) for token in ids])

    def greedy(self, ids: Sequence[int], new: int) -> tuple[list[int], Tensor]:
        """The tokens that follow, and the logits behind each of them [new, V]."""
        logits = [self.read(ids)[-1]]
        tokens = [int(logits[0].argmax())]
        for _ in range(new - 1):
            logits.append(self.feed(tokens[-1]))
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.stack(logits)

    def _matrix(self, name: str, x: Tensor) -> Tensor:
        out = self._tensors[f"{name}.weight"] @ x
        return out + self._tensors[f"{name}.bias"] if f"{name}.bias" in self._tensors else out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean()
        unit = centred / ((centred * centred).mean() + self.sizes["layer_norm_eps"]) ** 0.5
        return unit * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]

    def _mamba(self, x: Tensor, layer: int, name: str) -> tuple[Tensor, Tensor]:
        """What the layer adds, and its memory: the read of the state, before the gate."""
        both, kernel = self._matrix(name + "in_proj", x), self._tensors[name + "conv1d.weight"][:, 0]
        inner, size = len(both) // 2, self.sizes["mamba_d_state"]
        before = self.inputs.setdefault(layer, [])
        before.append(both[:inner])
        convolved = self._tensors[name + "conv1d.bias"].clone()
        for back in range(4):
            if back < len(before):
                convolved = convolved + kernel[:, 3 - back] * before[-1 - back]
        u = _silu(convolved)
        selected = self._tensors[name + "x_proj.weight"] @ u
        rank = len(selected) - 2 * size
        step = torch.log1p(torch.exp(self._matrix(name + "dt_proj", selected[:rank])))
        b, c = selected[rank : rank + size], selected[rank + size :]
        state, rate = self.states.get(layer, torch.zeros(inner, size, dtype=x.dtype)), self._tensors[name + "A_log"]
        state = torch.exp(-step[:, None] * torch.exp(rate)) * state + (step * u)[:, None] * b[None]
        self.states[layer] = state
        memory = state @ c + self._tensors[name + "D"] * u
        return self._tensors[name + "out_proj.weight"] @ (memory * _silu(both[inner:])), memory

    def _attend(self, x: Tensor, layer: int, name: str, kind: str) -> Tensor:
        heads, kv_heads = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        size = self.sizes["hidden_size"] // heads
        rows = self._matrix(name + "Wqkv", x).view(-1, size)
        held = self.keys.setdefault(self._layers // 2 + 1 if kind == "cross" else layer, [])
        if kind != "cross":
            held.append((self.position, rows[heads : heads + kv_heads], rows[heads + kv_heads :]))
        seen = [one for one in held if kind != "window" or one[0] > self.position - self.sizes["sliding_window"]]
        q1, k1, q2, k2 = (self._tensors[f"{name}inner_cross_attn.lambda_{one}"] for one in ("q1", "k1", "q2", "k2"))
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        share, out = math.exp(q1 @ k1) - math.exp(q2 @ k2) + start, []
        for pair in range(heads // 2):
            of_kv = pair // (heads // kv_heads)
            values = torch.stack([torch.cat([v[2 * of_kv], v[2 * of_kv + 1]]) for _, _, v in seen])
            parts = []
            for side in range(2):
                keys = torch.stack([k[2 * of_kv + side] for _, k, _ in seen])
                parts.append(_softmax(keys @ rows[2 * pair + side] / size**0.5) @ values)
            mixed = parts[0] - share * parts[1]
            unit = mixed / ((mixed * mixed).mean() + 1e-5) ** 0.5
            out.append(unit * self._tensors[f"{name}inner_cross_attn.subln.weight"] * (1 - start))
        return self._matrix(name + "out_proj", torch.cat(out))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _softmax(x: Tensor) -> Tensor:
    weights = torch.exp(x - x.max())
    return weights / weights.sum()


JOBS: list[Job] = [
    ([*prompt(stem, 50)[:stem], *prompt(rest, number)],
     {"max_new_tokens": new, "method": method, "n": 1 + (number == 1)})
    for number, (stem, rest, new, method) in enumerate([
        (0, 1, 9, "full"), (20, 2, 5, "full"), (20, 9, 14, PromptLookup(min_ngram=1)), (30, 1, 9, D3(alpha=0.85)),
        (30, 4, 6, "full"), (8, 3, 12, D3Spec(length=2)), (30, 2, 9, PromptLookup(min_ngram=1, length=4))])
]
"""Requests whose texts begin alike, by several methods."""
