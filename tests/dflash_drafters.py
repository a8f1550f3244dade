"""Random drafters of DFlash in the layouts in which others write them, and what they guess by the paper's formulas.

The formulas are those of arXiv 2602.06036, section 3, and of z-lab's published model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from backends import reference
from eagle_drafters import EPS, FFN, KV_HEADS, THETA, kept_folder
from eagle_part import IDS
from families import HEADS, HIDDEN, VOCAB

BLOCK, LAYERS, HEAD_DIM, MASK = 5, 2, 8, 96
TAPS = (1, 3, 4)
WINDOW = 6


@dataclass(frozen=True)
class BlockForm:
    """One layout, and a drafter in it.

    Attributes:
        config: what the layout's config has beside the layers' sizes; `inner` puts the sizes below that name.
        sizes: further entries beside the sizes.
        more: further tensors by their sizes.
        kept: the tokens that are guessed, where they are some alone.
        windows: per layer, whether it attends to a window.
        ahead: whether places see those after them in such layers.
        from_last: whether the last token's place guesses.
        vocabulary: tokens of the model.
        layers: of the drafter.
        taps: the model's layers whose inputs it reads.
    """

    config: Mapping[str, Any]
    inner: str | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kept: tuple[int, ...] = ()
    windows: tuple[bool, ...] = (False,) * LAYERS
    ahead: bool = True
    from_last: bool = False
    vocabulary: int = VOCAB
    taps: tuple[int, ...] = TAPS
    mask: int = MASK

    @property
    def guesses(self) -> int:
        return BLOCK - (not self.from_last)


_LEFT = [layer - 1 for layer in TAPS]
_SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": BLOCK,
    "mask_token_id": MASK, "aux_hidden_state_layer_ids": [*TAPS], "speculators_config": {"algorithm": "dflash"},
}
_OWN = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (len(IDS), HIDDEN)}
_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}

BLOCK_FORMS: dict[str, BlockForm] = {
    "dflash": BlockForm({"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "num_target_layers": 6,
                         "dflash_config": {"target_layer_ids": _LEFT, "mask_token_id": MASK}}),
    "dflash with windows": BlockForm(
        {"dflash_config": {"target_layer_ids": _LEFT, "mask_token_id": MASK, "block_size": BLOCK}}, sizes=_SLIDING,
        windows=(True, False)),
    "dflash by z-lab's rule": BlockForm(
        {"block_size": BLOCK, "dflash_config": {"mask_token_id": MASK}}, taps=(2, 4)),
    "dflash, speculators": BlockForm(
        {**_SPECULATORS, "draft_vocab_size": len(IDS)}, inner="transformer_layer_config", more=_OWN, kept=IDS),
    "dflash from the last token, speculators": BlockForm(
        {**_SPECULATORS, "sample_from_anchor": True}, inner="transformer_layer_config", sizes=_SLIDING,
        windows=(True, False), ahead=False, from_last=True,
        more={"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}),
}


def drawn(form: BlockForm, seed: int = 1) -> dict[str, Tensor]:
    """A drafter's tensors, float32."""
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(form.taps) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    kv = KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        sizes |= {
            f"{attention}q_proj.weight": (HEADS * HEAD_DIM, HIDDEN), f"{attention}k_proj.weight": (kv, HIDDEN),
            f"{attention}v_proj.weight": (kv, HIDDEN), f"{attention}o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{attention}q_norm.weight": (HEAD_DIM,), f"{attention}k_norm.weight": (HEAD_DIM,),
            f"{mlp}gate_proj.weight": (FFN, HIDDEN), f"{mlp}up_proj.weight": (FFN, HIDDEN),
            f"{mlp}down_proj.weight": (HIDDEN, FFN), f"layers.{layer}.input_layernorm.weight": (HIDDEN,),
            f"layers.{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    generator = torch.Generator().manual_seed(seed)
    return {name: float("norm" in name) + 0.3 * torch.randn(size, generator=generator)
            for name, size in (sizes | dict(form.more)).items()}


def config_of(form: BlockForm) -> dict[str, Any]:
    """What its `config.json` holds."""
    layer = {"model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS,
             "rope_theta": THETA, "vocab_size": form.vocabulary, "hidden_act": "silu", "attention_bias": False,
             **form.sizes}
    return {**form.config, form.inner: layer} if form.inner else {**layer, **form.config}


def write(folder: Path, form: BlockForm, seed: int = 1) -> Path:
    """Write a drafter as others do."""
    tensors = drawn(form, seed)
    if form.kept:
        ids = torch.tensor(form.kept)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(form.vocabulary), ids)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(form)), "utf-8")
    return folder


@functools.cache
def block_drafter(name: str) -> str:
    """The folder of a drafter in a form of `BLOCK_FORMS`, the same in every process, since tests show it."""
    return kept_folder(f"dflash-{list(BLOCK_FORMS).index(name)}", lambda fresh: write(fresh, BLOCK_FORMS[name]))


class BlockReference:
    """A drafter in plain torch and float64, without any cache.

    Args:
        form: of the drafter.
        model: whose states it reads.
    """

    def __init__(self, form: BlockForm, model: PreTrainedModel, seed: int = 1) -> None:
        self._form, self._model = form, model
        self._held = {name: tensor.double() for name, tensor in drawn(form, seed).items()}
        self.ids = torch.tensor(form.kept or range(form.vocabulary))

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> Tensor:
        """What is read of the model, float64 [n, taps x D]."""
        seen = self._model(torch.tensor([[*tokens]]), output_hidden_states=True).hidden_states
        return torch.cat([seen[layer][0] for layer in self._form.taps], -1).double()

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [guesses, ids] after a text, of whose last token no state is read."""
        return self.filled(self.states(tokens[:-1]), tokens[-1])

    @torch.no_grad()
    def filled(self, states: Tensor, last: int) -> Tensor:
        """The same, of given states [n, taps x D] and the token after them."""
        form, held = self._form, self._held
        context = self._normed(states @ held["fc.weight"].T, "hidden_norm.weight")
        table = held.get("embed_tokens.weight", self._model.get_input_embeddings().weight.double())
        x = table[torch.tensor([last, *[form.mask] * (BLOCK - 1)])]
        for layer in range(LAYERS):
            name = f"layers.{layer}."
            x = x + self._attention(context, self._normed(x, f"{name}input_layernorm.weight"), layer)
            read = self._normed(x, f"{name}post_attention_layernorm.weight")
            gate, up, down = (held[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
            x = x + (silu(read @ gate) * (read @ up)) @ down
        head = held.get("lm_head.weight", self._model.get_output_embeddings().weight.double())
        return (self._normed(x, "norm.weight") @ head.T)[BLOCK - form.guesses :]

    def guesses(self, tokens: Sequence[int], bias: Mapping[int, float]) -> list[int]:
        """The likeliest token at each place of the block, after some tokens' logits were raised."""
        logits = self.logits(tokens)
        for token, value in bias.items():
            logits[:, self.ids == token] += value
        return [int(self.ids[place]) for place in logits.argmax(-1)]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self._held[name], EPS)

    def _attention(self, context: Tensor, read: Tensor, layer: int) -> Tensor:
        held, name, size = self._held, f"layers.{layer}.self_attn.", HEAD_DIM
        both, first = torch.cat([context, read]), len(context)
        q, k, v = (of @ held[f"{name}{part}_proj.weight"].T for part, of in (("q", read), ("k", both), ("v", both)))
        q, k, v = (one.view(len(one), -1, size) for one in (q, k, v))
        q, k = self._normed(q, f"{name}q_norm.weight"), self._normed(k, f"{name}k_norm.weight")
        places = torch.arange(len(both), dtype=torch.float64)
        angles = places[:, None] / THETA ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        cos, sin = (torch.cat([of, of], -1)[:, None] for of in (angles.cos(), angles.sin()))
        turned = [one * cos[at:] + torch.cat([-one[..., size // 2 :], one[..., : size // 2]], -1) * sin[at:]
                  for one, at in ((q, first), (k, 0))]
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (turned[1], v))
        scores = torch.einsum("qhd,khd->hqk", turned[0], k) / size**0.5
        weights = scores.masked_fill(~self._seen(first, len(both), layer), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(read), -1) @ held[f"{name}o_proj.weight"].T

    def _seen(self, first: int, count: int, layer: int) -> Tensor:
        """Which slots the places of the block see [places, slots]: all, or those of a window."""
        keys, queries = torch.arange(count), torch.arange(first, count)[:, None]
        if not self._form.windows[layer]:
            return torch.ones(count - first, count, dtype=torch.bool)
        return (keys > queries - WINDOW) & ((keys <= queries) | self._form.ahead)


def of_block(name: str, family: str = "llama") -> BlockReference:
    """What a drafter of `BLOCK_FORMS` guesses beside a tiny model."""
    return BlockReference(BLOCK_FORMS[name], reference(family))
