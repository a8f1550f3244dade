"""Trains the layer of `shoal.speculative.eagle`.

It is trained on the inputs of decoding: after the first guess it reads its own outputs (training-time test of EAGLE-3,
arXiv 2503.01840). At every depth its distribution is pulled towards the model's own, and its outputs towards the
model's states (arXiv 2401.15077), which tell more per token, because answers are few here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, smooth_l1_loss
from typing_extensions import override

from shoal.speculative.draft_head_file import TOKENS, DraftHead
from shoal.speculative.layer_head import FUSE, NORMS, LayerShape
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.layers import LayersModule
from shoal_lab.train.part import Base, Guessed, PartModule, TextBatch, digest

_SURE, _LINEAR = 0.5, 0.7
"""Size of random and of linear first outputs relative to states. Smaller outputs give less certain guesses."""
_FADE = 0.8
"""Weight of a depth's loss relative to the previous depth's."""
_LIKE = 3.0
"""Weight of the distance between outputs and states, relative to the cross-entropy."""
SHARDS = 12
"""Most shards that are used: a matrix needs no more."""
RIDGE = 1e-3
"""Ridge, relative to the mean square of the inputs, so that few answers do not give large weights."""


def default_shape(hidden: int) -> LayerShape:
    """A layer for a model with states of that size, shaped like small Llamas."""
    head_dim, even = math.gcd(hidden, 64), min(hidden, 64)
    return LayerShape(hidden, hidden * 8 // 3 // even * even, hidden // head_dim, head_dim)


class LayerModule(LayersModule, PartModule):
    """Trains a layer that guesses from the model's states, and from its own outputs after the first guess.

    Args:
        base, shape, sizes, ids, seed: see `LayersModule`.
        rollout: depths to train.
    """

    kind: ClassVar[str] = "eagle"

    def __init__(
        self, base: Base, shape: LayerShape, sizes: Mapping[str, tuple[int, ...]], ids: Sequence[int], rollout: int,
        seed: int,
    ) -> None:
        super().__init__(base, shape, sizes, ids, seed)
        self._rollout = rollout

    @abstractmethod
    def outputs(self, batch: TextBatch) -> list[Tensor]:
        """The outputs in place of the state behind token t + 1, [B, T - 1, D], at each depth."""

    def apart(self, outputs: Tensor, states: Tensor, scale: Tensor) -> Tensor:
        """What the loss of outputs [n, D] in place of states [n, D] has besides; `scale` is the size of states."""
        return torch.zeros(())

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # The output at place t guesses token t + 2.
        total, found = torch.zeros(()), []
        first = batch.guessed_from(0, 2)[:, :-1]
        scale = batch.states[:, 1:][first].square().mean().sqrt()
        for depth, outputs in enumerate(self.outputs(batch)):
            asked = batch.guessed_from(depth, 2)[:, :-1]
            wanted = batch.states[:, 1:][asked]
            loss, guesses = self.head.distilled(outputs[asked], wanted)
            total = total + _FADE**depth * (loss + self.apart(outputs[asked], wanted, scale))
            right = torch.zeros_like(asked)
            right[asked] = guesses == batch.tokens[:, 1:].roll(-1, 1)[asked]
            found.append(Guessed(_earlier(right, depth), _earlier(asked, depth)))
        return total, found

    @override
    def exported(self) -> dict[str, Tensor]:
        return super().exported() | {TOKENS: self.head.ids.int()}

    def _attention(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Over the states that the model has confirmed, and the layer's own outputs after those.

        At depth j, place t sees places up to t - j as depth 0 had them, and t - j + i as depth i had it.
        """
        q, k, v = (self._heads(x, name).transpose(1, 2) for name in "qkv")
        q, k = (self._turned(one, torch.arange(x.shape[1])) for one in (q, k))
        keys.append(k)
        values.append(v)
        depth, length = len(keys) - 1, q.shape[2]
        far = torch.ones(length, length, dtype=torch.bool).triu(1 - depth)
        scores = [(q @ keys[0].transpose(2, 3)).masked_fill(far, -torch.inf)]
        own = [(_later(keys[i], depth - i), _later(values[i], depth - i)) for i in range(1, depth + 1)]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in own]
        shares = (torch.cat(scores, -1) * self._shape.head_dim**-0.5).softmax(-1)
        out = shares[..., :length] @ values[0]
        for place, (_, value) in enumerate(own, start=length):
            out = out + shares[..., place : place + 1] * value
        return linear(out.transpose(1, 2).flatten(2), self["layers.0.self_attn.o_proj.weight"])


class EagleModule(LayerModule):
    """Trains the layer of Shoal's own form, which reads the model's last states.

    Args:
        base, shape, ids, rollout, seed: see `LayerModule`.
    """

    def __init__(
        self, base: Base, shape: LayerShape, ids: Sequence[int], rollout: int = 3, seed: int = 0
    ) -> None:
        hidden = shape.hidden
        sizes = shape.sizes() | {FUSE: (hidden, 2 * hidden)} | dict.fromkeys(NORMS, (hidden,))
        super().__init__(base, shape, sizes, ids, rollout, seed)
        with torch.no_grad():
            self[FUSE][:, :hidden].add_(torch.eye(hidden))
            self["norm.weight"].mul_(_SURE)

    @override
    @classmethod
    def fresh(cls, base: Base, corpus: Corpus, ids: Sequence[int], depths: int | None, seed: int) -> EagleModule:
        # Starts as the best linear guess, to which attention and MLP add nothing yet.
        shape = default_shape(corpus.answers(0, validation=False)[0].states.shape[1])
        module = cls(base, shape, ids, depths or 3, seed=seed)
        matrix, sizes = linear_start(base, corpus, shape.eps)
        with torch.no_grad():
            module[FUSE].copy_(matrix)
            module["norm.weight"].copy_(_LINEAR * sizes)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                module[f"layers.0.{name}.weight"].zero_()
        return module

    @classmethod
    def going_on(cls, base: Base, part: DraftHead, depths: int | None, seed: int) -> EagleModule:
        """The layer of a part that was trained before, with the tokens that it guesses; as for `fresh`.

        Raises:
            ValueError: its tensors do not fit together, or are not of the shape that is trained here.
        """
        module = cls(base, default_shape(part.size("hidden")), part.tensors[TOKENS].tolist(), depths or 3, seed)
        with torch.no_grad():
            for name in module._names:
                module[name].copy_(part.take(name, *module[name].shape))
        part.check_taken()
        module.begun = digest(module.exported())
        return module

    @override
    def apart(self, outputs: Tensor, states: Tensor, scale: Tensor) -> Tensor:
        return _LIKE * smooth_l1_loss(outputs / scale, states / scale)

    @override
    def outputs(self, batch: TextBatch) -> list[Tensor]:
        embedded = self._normed(self._base.embed(batch.tokens[:, 1:]), NORMS[1])
        states, found = batch.states[:, :-1], []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(self._rollout):
            x = linear(torch.cat([self._normed(states, NORMS[0]), embedded], -1), self[FUSE])
            x = x + self._attention(self._normed(x, "layers.0.input_layernorm.weight"), keys, values)
            x = x + self._mlp(self._normed(x, "layers.0.post_attention_layernorm.weight"))
            found.append(self._normed(x, "norm.weight"))
            states = pad(found[-1], (0, 0, 1, 0))[:, :-1]
        return found


def _later(x: Tensor, by: int) -> Tensor:
    """Shift [B, heads, T, d] right by `by` places."""
    return x if not by else pad(x, (0, 0, by, 0))[:, :, :-by]


def _earlier(x: Tensor, by: int) -> Tensor:
    """Shift bool [B, T] left by `by` places, so that a chain's guesses stand at the place of its last token."""
    return x if not by else pad(x[:, by:], (0, by))


@torch.no_grad()
def linear_start(base: Base, corpus: Corpus, eps: float) -> tuple[Tensor, Tensor]:
    """The best linear guess of a state from the previous state and the token between them: where training starts.

    Least squares over some answers take seconds, and guess as well as a layer after some fifty steps of training.

    Args:
        base: the model.
        corpus: its answers.
        eps: epsilon of the norms of the inputs.

    Returns:
        A matrix [D, 2 D] that maps normalised state and normalised embedding, concatenated, to the next state, with
        outputs of mean square 1; and the root mean squares of the states [D], float32.
    """
    squares = products = sizes = torch.zeros(())
    count = 0
    for shard in range(min(SHARDS, len(corpus.shards))):
        for one in corpus.answers(shard, validation=False):
            first = max(0, one.prompt - 1)
            states = one.states[first:].float()
            pair = states[:-1], base.embed(one.tokens[first + 1 :])
            known = torch.cat([rms_norm(x, x.shape[-1:], eps=eps) for x in pair], -1)
            squares = squares + known.T @ known
            products = products + known.T @ states[1:]
            sizes = sizes + states[1:].square().sum(0)
            count += len(known)
    ridge = RIDGE * count * torch.eye(len(squares))
    matrix: Tensor = torch.linalg.solve(squares + ridge, products).T
    roots = (sizes / count).sqrt().clamp(min=1e-6)
    return matrix / roots[:, None], roots
