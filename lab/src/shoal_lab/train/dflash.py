"""Trains a drafter of DFlash: layers that fill a block of masks in one pass over the model's states (arXiv 2602.06036).

Blocks begin at anchors, tokens of an answer drawn anew in every step; each sees the states before its anchor, and all
of itself. A later place counts less, since its guess is kept only if those before it are. Anchors and weights are the
paper's (4.2, equation 4), as SpecForge (sgl-project, `specforge/core/dflash.py`) has them. Unlike there, answers are
short and all their tokens matter: a block may reach beyond the end, where nothing is asked, and a guess is pulled
towards the model's own distribution, which the answers' states tell, instead of the token alone. What is written is a
folder in z-lab's layout, which other servers read, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from shoal.speculative.drafters.dflash_checkpoint import MOST, spread
from shoal.speculative.layer_head import LayerShape
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.eagle import default_shape
from shoal_lab.train.layers import CheckpointModule
from shoal_lab.train.part import Base, Guessed, TextBatch, next_draws, right_places

JOIN, JOINED_NORM, NORM = "fc.weight", "hidden_norm.weight", "norm.weight"
_APART = 6
"""Tokens of an answer for each anchor: the paper's 512 anchors in 3,072 tokens."""
_SURE = 0.5
"""Size of first outputs relative to states: smaller ones give less certain guesses."""


@dataclass(frozen=True)
class BlockShape:
    """Shape of a drafter.

    Attributes:
        layers: how many it has.
        block: places of a block: the anchor's and those of masks.
    """

    layers: int = 2
    block: int = 8

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}; it must be at least 1")
        if not 2 <= self.block <= MOST + 1:
            raise ValueError(f"block is {self.block}; it must be 2 to {MOST + 1} places, the last token's and masks")

    @property
    def fade(self) -> float:
        """Places over which a guess's weight falls by e: the paper's 4, 5 and 7 for blocks of 8, 10 and 16."""
        return min(self.block / 2, 7.0)


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """The model's layers whose inputs a drafter of `count` layers reads, by z-lab's rule.

    Raises:
        ValueError: the model has too few layers for as many different ones.
    """
    found = [layer + 1 for layer in spread(num_layers, count)]
    if sorted({*found}) != found or not 0 <= found[0] <= found[-1] < num_layers:
        raise ValueError(f"the model has {num_layers} layers, too few for a drafter of {count} by z-lab's rule; name "
                         "layers to read by --taps")
    return tuple(found)


@dataclass(frozen=True)
class Blocks:
    """Blocks of texts side by side.

    Attributes:
        anchors: int64 [B, A], the places of their first tokens.
        asked: bool [B, A, block - 1], whether there is a token to guess at each mask.
    """

    anchors: Tensor
    asked: Tensor


class BlockModule(CheckpointModule):
    """Trains the layers.

    Args:
        base, seed: see `LayersModule`.
        layer: shape of a layer.
        shape: of the drafter.
        taps: the model's layers whose inputs it reads.
        mask: the mask token.
    """

    kind: ClassVar[str] = "dflash"
    steps: Tensor

    def __init__(
        self, base: Base, layer: LayerShape, shape: BlockShape, taps: Sequence[int], mask: int, seed: int = 0
    ) -> None:
        super().__init__(base, layer, _sizes(layer, shape.layers, len(taps)), range(base.vocab_size), seed)
        self.taps, self.mask, self._blocks, self._seed = (*taps,), mask, shape, seed
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @classmethod
    def fresh(cls, base: Base, corpus: Corpus, shape: BlockShape, mask: int, seed: int) -> BlockModule:
        """The drafter before training, whose outputs are smaller than states; see `__init__`."""
        states = torch.cat([one.states[one.prompt :].float() for one in corpus.answers(0, validation=False)])
        module = cls(base, default_shape(states.shape[1]), shape, corpus.taps, mask, seed)
        with torch.no_grad():
            module[NORM].copy_(_SURE * states.square().mean(0).sqrt())
        return module

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # Without gradients, anchors are every `_APART`-th token, so that validations agree.
        blocks = self.blocks(batch, next_draws(self._seed, self.steps) if torch.is_grad_enabled() else None)
        outputs, found = self.outputs(batch, blocks.anchors), []
        total, whole = 0.0 * outputs.sum(), 0.0
        for place in range(self._blocks.block - 1):
            asked = blocks.asked[..., place]
            right = torch.zeros_like(asked)
            if asked.any():
                rows, ends = asked.nonzero()[:, 0], blocks.anchors[asked] + place
                loss, tokens = self.head.distilled(outputs[:, :, place][asked], batch.states[rows, ends])
                weight = int(asked.sum()) * math.exp(-place / self._blocks.fade)
                total, whole = total + weight * loss, whole + weight
                right[asked] = tokens == batch.tokens[rows, ends + 1]
            found.append(Guessed(right, asked))
        return total / max(whole, 1.0), found

    def blocks(self, batch: TextBatch, draws: torch.Generator | None) -> Blocks:
        """Blocks at one token of an answer in `_APART`, drawn, or from the first one on; none at its last token."""
        chosen = [self._anchors(*ends, draws) for ends in zip(batch.prompts.tolist(), batch.lengths.tolist(),
                                                              strict=True)]
        anchors, own = (pad_sequence(some, batch_first=True) for some in (chosen, [one > 0 for one in chosen]))
        guessed = anchors[..., None] + torch.arange(1, self._blocks.block)
        return Blocks(anchors, own[..., None] & (guessed < batch.lengths[:, None, None]))

    def _anchors(self, prompt: int, length: int, draws: torch.Generator | None) -> Tensor:
        count = max(0, length - 1 - prompt)
        if draws is None:
            return torch.arange(prompt, prompt + count, _APART)
        return prompt + torch.randperm(count, generator=draws)[: -(-count // _APART)].sort().values

    def outputs(self, batch: TextBatch, anchors: Tensor) -> Tensor:
        """The head's inputs at the masks of blocks at int64 anchors [B, A]: [B, A, block - 1, D]."""
        assert batch.tapped is not None
        context = self._normed(linear(batch.tapped, self[JOIN]), JOINED_NORM)
        masks = torch.full((*anchors.shape, self._blocks.block - 1), self.mask)
        x = self._base.embed(torch.cat([batch.tokens.gather(1, anchors)[..., None], masks], -1))
        for layer in range(self._blocks.layers):
            x = x + self._attention(layer, self._normed(x, f"layers.{layer}.input_layernorm.weight"), context, anchors)
            x = x + self._mlp(self._normed(x, f"layers.{layer}.post_attention_layernorm.weight"), layer)
        return self._normed(x[:, :, 1:], NORM)

    def _attention(self, layer: int, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """Of blocks [B, A, block, D] over the states before their anchors, of [B, T, D], and over themselves."""
        length, size = context.shape[1], self._shape.head_dim
        known, own = torch.arange(length), anchors[..., None] + torch.arange(x.shape[2])
        q, k = (self._placed(x, name, layer, own) for name in "qk")
        seen, values = self._placed(context, "k", layer, known), self._heads(context, "v", layer)
        far = known >= anchors[..., None]
        scores = torch.cat([
            torch.einsum("bashd,bthd->bahst", q, seen).masked_fill(far[:, :, None, None], -torch.inf),
            torch.einsum("bashd,bauhd->bahsu", q, k)], -1)
        of_context, of_block = (scores.float() * size**-0.5).softmax(-1).tensor_split([length], -1)
        out = torch.einsum("bahst,bthd->bashd", of_context, values)
        out = out + torch.einsum("bahsu,bauhd->bashd", of_block, self._heads(x, "v", layer))
        return linear(out.flatten(3), self[f"layers.{layer}.self_attn.o_proj.weight"])

    def _placed(self, x: Tensor, name: str, layer: int, places: Tensor) -> Tensor:
        """Queries or keys [.., heads, head_dim], normed, at places [..]."""
        normed = self._normed(self._heads(x, name, layer), f"layers.{layer}.self_attn.{name}_norm.weight")
        return self._turned(normed, places[..., None])

    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Share of masks at which the argmax token is the text's, by mask, whatever came before: `places`."""
        return {"places": right_places(self, held_out)}

    @override
    def shape(self) -> dict[str, int]:
        read = {f"tap{number}": tap for number, tap in enumerate(self.taps)}
        return super().shape() | read | {"layers": self._blocks.layers, "block": self._blocks.block, "mask": self.mask}

    @override
    def config(self) -> dict[str, Any]:
        count = self._blocks.layers
        return super().config() | {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": count,
            "layer_types": ["full_attention"] * count, "attention_bias": False, "attention_dropout": 0.0,
            "block_size": self._blocks.block, "num_target_layers": self._base.num_layers,
            "dflash_config": {"target_layer_ids": [tap - 1 for tap in self.taps], "mask_token_id": self.mask},
        }


def _sizes(shape: LayerShape, layers: int, taps: int) -> dict[str, tuple[int, ...]]:
    """Sizes of the tensors, by name."""
    found: dict[str, tuple[int, ...]] = {JOIN: (shape.hidden, taps * shape.hidden), JOINED_NORM: (shape.hidden,)}
    one = shape.sizes() | dict.fromkeys((f"layers.0.self_attn.{name}_norm.weight" for name in "qk"), (shape.head_dim,))
    for layer in range(layers):
        found |= {name.replace("layers.0.", f"layers.{layer}."): size for name, size in one.items()}
    return found
