"""Random heads of Medusa and MLP speculators in the layouts in which others write them, and what they guess.

The formulas are those of Medusa (arXiv 2401.10774, section 2.2) and of MLP speculators (arXiv 2404.19124, section 3).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import PreTrainedModel

from backends import reference
from eagle_drafters import kept_folder
from eagle_part import IDS
from families import HIDDEN, VOCAB

COUNT, INNER = 3, 24


@dataclass(frozen=True)
class HeadsForm:
    """One layout, and heads in it.

    Attributes:
        method: that runs it.
        config: what its `config.json` holds.
        file: where the tensors lie.
        sizes: of the tensors.
        kept: the tokens that are guessed, where they are some alone.
    """

    method: str
    config: Mapping[str, Any]
    file: str
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kept: tuple[int, ...] = ()


def _by_place(layers: int, own: bool, prefix: str = "") -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for head in range(COUNT):
        for layer in range(layers):
            name = f"{prefix}{head}.{layer}.linear."
            found |= {f"{name}weight": (HIDDEN, HIDDEN), f"{name}bias": (HIDDEN,)}
        found |= {f"{prefix}{head}.{layers}.weight": (VOCAB, HIDDEN)} if own else {}
    return found


def _by_name(rows: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    blocks = {f"medusa_heads.blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN) for head in range(COUNT)}
    return blocks | {f"medusa_heads.{name}": size for name, size in rows.items()}


def _mlp(inner: int, heads: int, projections: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for head in range(projections):
        found[f"speculator.proj.{head}.weight"] = inner, inner if head else HIDDEN
    for head in range(heads):
        found |= dict.fromkeys((f"speculator.emb.{head}.weight", f"speculator.head.{head}.weight"), (VOCAB, inner))
        found |= dict.fromkeys((f"speculator.ln.{head}.weight", f"speculator.ln.{head}.bias"), (inner,))
    return found


_VLLM = {"model_type": "medusa", "num_heads": COUNT, "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB}
_IBM = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": HIDDEN,
        "n_predict": COUNT, "vocab_size": VOCAB, "n_candidates": 3, "top_k_tokens_per_head": [1, 1, 1]}

HEADS_FORMS: dict[str, HeadsForm] = {
    "medusa": HeadsForm("medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1}, "medusa_lm_head.pt",
                        _by_place(1, own=True)),
    "medusa with the model's head": HeadsForm(
        "medusa", {"medusa_num_heads": COUNT, "medusa_num_layers": 2}, "medusa_lm_head.safetensors",
        _by_place(2, own=False, prefix="medusa_head.")),
    "medusa, vLLM": HeadsForm("medusa", {**_VLLM, "truncated_vocab_size": VOCAB}, "model.safetensors", _by_name(
        {f"lm_heads.{head}.weight": (VOCAB, HIDDEN) for head in range(COUNT)})),
    "medusa of some tokens, vLLM": HeadsForm(
        "medusa", {**_VLLM, "truncated_vocab_size": len(IDS), "original_lm_head": True}, "model.safetensors",
        _by_name({"lm_head.weight": (VOCAB, HIDDEN)}), kept=IDS),
    "mlp": HeadsForm("mlp_speculator", {**_IBM, "inner_dim": INNER}, "model.safetensors", _mlp(INNER, COUNT, COUNT)),
    "mlp, shared": HeadsForm("mlp_speculator", {**_IBM, "inner_dim": 0, "tie_weights": True, "scale_input": True},
                             "model.safetensors", _mlp(HIDDEN, 1, 2)),
}


def drawn(form: HeadsForm, seed: int = 1) -> dict[str, Tensor]:
    """The tensors, float32, by the layout's names."""
    generator = torch.Generator().manual_seed(seed)
    return {name: float(".ln." in name and name.endswith("weight")) + 0.3 * torch.randn(size, generator=generator)
            for name, size in form.sizes.items()}


def write(folder: Path, form: HeadsForm, seed: int = 1) -> Path:
    """Write the heads as others do."""
    tensors = drawn(form, seed)
    if form.kept:
        tensors["medusa_heads.token_map"] = torch.tensor(form.kept)
    if form.file.endswith(".pt"):
        torch.save(tensors, folder / form.file)
    else:
        save_file(tensors, folder / form.file)
    (folder / "config.json").write_text(json.dumps(dict(form.config)), "utf-8")
    return folder


def write_for(folder: Path, name: str, vocabulary: int) -> Path:
    """Write heads in a form of `HEADS_FORMS`, for a tiny model with so many tokens."""
    form = HEADS_FORMS[name]
    sizes = {key: tuple(vocabulary if size == VOCAB else size for size in sizes) for key, sizes in form.sizes.items()}
    counts = {key: vocabulary if key == "truncated_vocab_size" else value for key, value in form.config.items()}
    return write(folder, replace(form, sizes=sizes, config={**counts, "vocab_size": vocabulary}))


@functools.cache
def heads_drafter(name: str) -> str:
    """The folder of heads in a form of `HEADS_FORMS`, the same in every process, since tests show it."""
    return kept_folder(f"heads-{list(HEADS_FORMS).index(name)}", lambda fresh: write(fresh, HEADS_FORMS[name]))


class HeadsReference:
    """Heads in plain torch and float64.

    Args:
        form: of the heads.
        model: whose states they read.
    """

    def __init__(self, form: HeadsForm, model: PreTrainedModel, seed: int = 1) -> None:
        self._form, self._model = form, model
        self._held = {name.removeprefix("medusa_heads.").removeprefix("medusa_head.").removeprefix("speculator."):
                      tensor.double() for name, tensor in drawn(form, seed).items()}
        self.ids = torch.tensor(form.kept or range(VOCAB))

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Tensor:
        """Logits [heads, ids] after a text; the guesses before are the given ones, as many as heads but one."""
        state = self._model.model(torch.tensor([[*tokens[:-1]]])).last_hidden_state[0, -1].double()
        return self.of_state(state, tokens[-1], guesses)

    @torch.no_grad()
    def of_state(self, state: Tensor, last: int, guesses: Sequence[int] = ()) -> Tensor:
        """The same, of a normed state [D] and the token after it."""
        if self._form.method == "mlp_speculator":
            return self._of_mlp(state, [last, *guesses])
        return torch.stack([self._of_medusa(head, state) for head in range(COUNT)])[:, self.ids]

    def _of_medusa(self, head: int, x: Tensor) -> Tensor:
        held, config = self._held, self._form.config
        layers = config.get("medusa_num_layers", 1)
        for layer in range(layers):
            name = f"{head}.{layer}.linear." if "medusa_num_heads" in config else f"blocks.{head}.layers.{layer}."
            x = x + silu(held[f"{name}weight"] @ x + held.get(f"{name}bias", 0.0))
        for name in (f"{head}.{layers}.weight", f"lm_heads.{head}.weight", "lm_head.weight"):
            if name in held:
                return held[name] @ x
        return self._model.get_output_embeddings().weight.double() @ x

    def _of_mlp(self, state: Tensor, tokens: Sequence[int]) -> Tensor:
        held, config = self._held, self._form.config
        tied, inner = bool(config.get("tie_weights")), config["inner_dim"] or HIDDEN
        if config.get("scale_input"):
            state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
        share, found = 0.5 ** (0.5 / COUNT), []
        factor = math.sqrt((1 - share**2) * inner / 2)
        for head, token in enumerate(tokens[:COUNT]):
            own, joins = (0, min(head, 1)) if tied else (head, head)
            x = held[f"proj.{joins}.weight"] @ state + factor / share * held[f"emb.{own}.weight"][token]
            x = x / (x.square().mean() + 1e-6).sqrt()
            state = gelu(held[f"ln.{own}.weight"] * x + held[f"ln.{own}.bias"])
            found.append(held[f"head.{own}.weight"] @ state)
        return torch.stack(found)

    def guesses(self, tokens: Sequence[int], bias: Mapping[int, float]) -> list[int]:
        """The likeliest chain of guesses, after some tokens' logits were raised."""
        found = list[int]()
        for head in range(COUNT):
            logits = self.logits(tokens, found)[head].clone()
            for token, value in bias.items():
                logits[self.ids == token] += value
            found.append(int(self.ids[logits.argmax()]))
        return found


def of_heads(name: str, family: str = "llama") -> HeadsReference:
    """What heads of `HEADS_FORMS` guess beside a tiny model."""
    return HeadsReference(HEADS_FORMS[name], reference(family))
