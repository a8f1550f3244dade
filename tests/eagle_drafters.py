"""Random drafters of EAGLE's family in the layouts in which others write them, and what they guess by the papers.

The formulas are those of EAGLE (arXiv 2401.15077, section 3.1) and EAGLE-3 (arXiv 2503.01840, section 3.1).
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from backends import reference
from eagle_part import IDS, LayerReference
from families import HEADS, HIDDEN, VOCAB

KV_HEADS, FFN, EPS, THETA = 2, 48, 1e-5, 10000.0
TAPS = (1, 3, 4)
LAYER = "layers.0."


@dataclass(frozen=True)
class Form:
    """One layout, and a drafter in it.

    Attributes:
        wide: whether it is EAGLE-3.
        rename: the file's name of a tensor, given SafeAILab's with `layers.0.` for the layer.
        config: what the layout's config has beside the layer's sizes; `inner` puts the sizes below that name.
        more: further tensors by their sizes.
        without: tensors that it does not have.
        pickled: whether tensors lie in `pytorch_model.bin`.
        hidden: D of the layer.
        kept: the tokens that are guessed, where they are some alone.
        head_dim: of the layer's attention.
        vocabulary: tokens of the model.
    """

    wide: bool
    rename: Callable[[str], str] = lambda name: name
    config: Mapping[str, Any] = field(default_factory=dict)
    inner: str | None = None
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    pickled: bool = False
    hidden: int = HIDDEN
    kept: tuple[int, ...] = ()
    head_dim: int = HIDDEN // HEADS
    vocabulary: int = VOCAB


def _mid(name: str) -> str:
    return name.replace(LAYER, "midlayer.")


def _older(name: str) -> str:
    """As the package `speculators` wrote EAGLE."""
    name = name.replace(LAYER, "transformer.").replace("fc.", "fusion_fc.")
    return name.replace("norm.weight", "pre_lm_head_layernorm.weight") if name == "norm.weight" else name


_SPECULATORS = {"speculators_version": "0.9.0", "speculators_config": {
    "algorithm": "eagle3", "default_proposal_method": "greedy",
    "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "example/model"}}}
_HEADED = {"norm.weight": (HIDDEN,), "lm_head.weight": (len(IDS), HIDDEN)}
_TOP = {"eagle_aux_hidden_state_layer_ids": [*TAPS]}

FORMS: dict[str, Form] = {
    "eagle": Form(False, config={"bias": True}, more={"fc.bias": (HIDDEN,)}, pickled=True),
    "hass": Form(False, config={"bias": False, "qkv_bias": True}, more={
        "embed_tokens.weight": (VOCAB, HIDDEN), f"{LAYER}self_attn.q_proj.bias": (HIDDEN,),
        f"{LAYER}self_attn.k_proj.bias": (HIDDEN // 2,), f"{LAYER}self_attn.v_proj.bias": (HIDDEN // 2,)}),
    "eagle, speculators": Form(False, _older, inner="transformer_layer_config", config={
        "speculators_model_type": "eagle", "layernorms": True, "fusion_bias": True}, more={
            "fc.bias": (HIDDEN,), "embedding_layernorm.weight": (HIDDEN,), f"{LAYER}input_layernorm.weight": (HIDDEN,),
            "norm.weight": (HIDDEN,)}),
    "eagle3": Form(True, _mid, config={**_TOP, "draft_vocab_size": len(IDS)}, more=_HEADED, pickled=True, kept=IDS),
    "eagle3 of another size": Form(
        True, _mid, config={"target_hidden_size": HIDDEN, "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in TAPS]}},
        more={"norm.weight": (24,), "lm_head.weight": (VOCAB, 24), "embed_tokens.weight": (VOCAB, 24)}, hidden=24,
        head_dim=8),
    "eagle3 before the model's head": Form(True, _mid, config=_TOP, more={"norm.weight": (HIDDEN,)}),
    "eagle3, speculators": Form(True, inner="transformer_layer_config", kept=IDS, head_dim=16, config={
        **_SPECULATORS, **_TOP, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
        "draft_vocab_size": len(IDS)}, more={
            **_HEADED, "input_norm.weight": (3 * HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN),
            f"{LAYER}self_attn.q_norm.weight": (16,), f"{LAYER}self_attn.k_norm.weight": (16,)}),
    "eagle3, norms by layer": Form(True, _mid, config={**_TOP, "fc_norm": True}, kept=IDS, more={
        **_HEADED, **{f"fc_norm.{number}.weight": (HIDDEN,) for number in range(3)}}),
}


def drawn(form: Form, seed: int = 1) -> dict[str, Tensor]:
    """A drafter's tensors, float32, by SafeAILab's names with `layers.0.` for the layer."""
    hidden, kv, columns = form.hidden, KV_HEADS * form.head_dim, (1 + form.wide) * form.hidden
    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * HIDDEN if form.wide else 2 * hidden),
        f"{attention}q_proj.weight": (HEADS * form.head_dim, columns),
        f"{attention}k_proj.weight": (kv, columns), f"{attention}v_proj.weight": (kv, columns),
        f"{attention}o_proj.weight": (hidden, HEADS * form.head_dim), f"{mlp}gate_proj.weight": (FFN, hidden),
        f"{mlp}up_proj.weight": (FFN, hidden), f"{mlp}down_proj.weight": (hidden, FFN),
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
    }
    if form.wide:
        sizes |= dict.fromkeys((f"{LAYER}input_layernorm.weight", f"{LAYER}hidden_norm.weight"), (hidden,))
    generator, scale = torch.Generator().manual_seed(seed), 0.3 if form.wide else 0.15
    return {name: float(name.endswith("norm.weight") or name.startswith("fc_norm"))
            + scale * torch.randn(size, generator=generator) for name, size in (sizes | dict(form.more)).items()}


def config_of(form: Form) -> dict[str, Any]:
    """What its `config.json` holds."""
    layer = {"model_type": "llama", "hidden_size": form.hidden, "intermediate_size": FFN, "num_hidden_layers": 1,
             "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": form.head_dim,
             "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": form.vocabulary, "hidden_act": "silu"}
    return {**form.config, form.inner: layer} if form.inner else {**layer, **form.config}


def write(folder: Path, form: Form, seed: int = 1) -> Path:
    """Write a drafter as others do."""
    tensors = {form.rename(name): tensor for name, tensor in drawn(form, seed).items() if name not in form.without}
    if form.kept:
        ids = torch.tensor(form.kept)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(form.vocabulary), ids)}
    if form.pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(form)), "utf-8")
    return folder


@functools.cache
def drafter(name: str) -> str:
    """The folder of a drafter in a form of `FORMS`, the same in every process, since tests show it."""
    kept = Path(tempfile.gettempdir()) / f"shoal-tests-drafter-{list(FORMS).index(name)}"
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-drafter-") as fresh:
        for file in write(Path(fresh), FORMS[name]).iterdir():
            if not (kept / file.name).is_file() or (kept / file.name).read_bytes() != file.read_bytes():
                file.replace(kept / file.name)
    return str(kept)


class DrafterReference(LayerReference):
    """A drafter in plain torch and float64, run over a whole text for each guess.

    Args:
        form: of the drafter.
        model: whose states it continues.
        taps: the model's layers whose inputs EAGLE-3 reads.
    """

    def __init__(self, form: Form, model: PreTrainedModel, taps: Sequence[int] = TAPS, seed: int = 1) -> None:
        self._form, self._model, self._taps = form, model, taps
        self._held = {name: tensor.double() for name, tensor in drawn(form, seed).items()}
        self._ids = torch.tensor(form.kept or range(form.vocabulary))

    def logits(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Tensor:
        """Logits [n, ids] of what follows each token but the first, by the states before them."""
        states, embedded = self._read(tokens[:-1]), self._embedded([*tokens, *guesses])
        for _ in range(len(guesses) + 1):
            outputs = self._layer(states, embedded[1 : len(states) + 1])
            passed = self._normed(outputs, "norm.weight") if self._form.config.get("norm_output") else outputs
            states = torch.cat([states, passed[-1:]])
        head = self._held.get("lm_head.weight", self._model.get_output_embeddings().weight.double())
        return self._normed(outputs, "norm.weight") @ head.T

    @torch.no_grad()
    def most_probable(
        self, tokens: list[int], guesses: Sequence[int], bias: Mapping[int, float], count: int
    ) -> list[int]:
        logits = self.logits(tokens, guesses)[-1]
        for token, value in bias.items():
            logits[self._ids == token] += value
        return [int(self._ids[place]) for place in logits.topk(count).indices]

    def states(self, tokens: Sequence[int]) -> Tensor:
        """What is read of the model, float64 [n, ..]."""
        if not self._form.wide:
            return self._model.model(torch.tensor([[*tokens]])).last_hidden_state[0].double()
        seen = self._model(torch.tensor([[*tokens]]), output_hidden_states=True).hidden_states
        return torch.cat([seen[layer][0] for layer in self._taps], -1).double()

    def _read(self, tokens: Sequence[int]) -> Tensor:
        states, form = self.states(tokens), self._form
        if not form.wide:
            return states
        if form.config.get("fc_norm"):
            parts = states.split(HIDDEN, -1)
            states = torch.cat([self._normed(part, f"fc_norm.{n}.weight") for n, part in enumerate(parts)], -1)
        return self._normed(states, "input_norm.weight") @ self._held["fc.weight"].T

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        own = self._held.get("embed_tokens.weight", self._model.get_input_embeddings().weight.double())
        return own[torch.tensor([*tokens])]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self._held[name], EPS) if name in self._held else x

    def _layer(self, states: Tensor, embedded: Tensor) -> Tensor:
        form, held = self._form, self._held
        if form.wide:
            normed = self._normed(states, f"{LAYER}hidden_norm.weight")
            x = normed if form.config.get("norm_before_residual") else states
            read = torch.cat([self._normed(embedded, f"{LAYER}input_layernorm.weight"), normed], -1)
        else:
            both = torch.cat([self._normed(embedded, "embedding_layernorm.weight"), states], -1)
            x = both @ held["fc.weight"].T + held.get("fc.bias", 0.0)
            read = self._normed(x, f"{LAYER}input_layernorm.weight")
        x = x + self._attention(read)
        read = self._normed(x, f"{LAYER}post_attention_layernorm.weight")
        gate, up, down = (held[f"{LAYER}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        return x + (silu(read @ gate) * (read @ up)) @ down

    def _attention(self, read: Tensor) -> Tensor:
        count, size, held = len(read), self._form.head_dim, self._held
        q, k, v = ((read @ held[f"{LAYER}self_attn.{part}_proj.weight"].T
                    + held.get(f"{LAYER}self_attn.{part}_proj.bias", 0.0)).view(count, -1, size) for part in "qkv")
        q, k = (self._normed(one, f"{LAYER}self_attn.{part}_norm.weight") for part, one in (("q", q), ("k", k)))
        angles = torch.arange(count)[:, None] / THETA ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        cos, sin = (torch.cat([of, of], -1)[:, None] for of in (angles.cos(), angles.sin()))
        q, k = (one * cos + torch.cat([-one[..., size // 2 :], one[..., : size // 2]], -1) * sin for one in (q, k))
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        weights = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        return mixed @ held[f"{LAYER}self_attn.o_proj.weight"].T


def of_family(name: str, family: str = "llama") -> DrafterReference:
    """What a drafter of `FORMS` guesses beside a tiny model."""
    return DrafterReference(FORMS[name], reference(family))
