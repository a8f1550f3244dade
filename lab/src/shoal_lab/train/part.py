"""Modules under training: parameters, a loss with what was guessed right, and tensors to export."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from shoal.model.runner import ModelRunner
from shoal_lab.train.corpus import AnsweredText, Corpus
from shoal_lab.train.distributions import cross_entropy


class Base:
    """The frozen model's embedding and LM head, on the CPU, where modules are trained.

    Args:
        runner: the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return self._runner.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._runner.num_layers

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D], float32, of int64 ids [...]."""
        flat = ids.flatten().to(self._runner.device)
        found = self._runner.embed(flat, torch.zeros_like(flat)).float().cpu()
        return found.view(*ids.shape, found.shape[-1])

    def rows(self, ids: Sequence[int]) -> Tensor:
        """The LM head's rows for some tokens, float32 [n, D]."""
        return self._runner.head_rows(list(ids)).float().cpu()


@dataclass(frozen=True)
class TextBatch:
    """Answers side by side, short ones padded with zeros at the end.

    Attributes:
        tokens: int64 [B, T].
        states: float32 [B, T, D]; `states[:, t]` predicts token t + 1.
        prompts, lengths: int64 [B], tokens of the prompts and of the whole texts.
        tapped: float32 [B, T, k D], what enters k layers, or None.
        sources: float32 [B, S, hidden], states of the encoder padded like texts, or None.
        heard: bool [B, S], which of them are states.
    """

    tokens: Tensor
    states: Tensor
    prompts: Tensor
    lengths: Tensor
    tapped: Tensor | None = None
    sources: Tensor | None = None
    heard: Tensor | None = None

    @classmethod
    def of(cls, answers: Sequence[AnsweredText]) -> TextBatch:
        """A batch of answers."""
        tapped = [one.tapped.float() for one in answers if one.tapped is not None]
        sources = [one.source for one in answers if one.source is not None]
        heard = [torch.ones(len(one), dtype=torch.bool) for one in sources]
        return cls(
            pad_sequence([one.tokens for one in answers], batch_first=True),
            pad_sequence([one.states.float() for one in answers], batch_first=True),
            torch.tensor([one.prompt for one in answers]), torch.tensor([len(one.tokens) for one in answers]),
            *(pad_sequence(some, batch_first=True) if some else None for some in (tapped, sources, heard)),
        )

    def guessed_from(self, depth: int, ahead: int) -> Tensor:
        """Bool [B, T]: places t from which a token of the answer, `ahead` places later, is guessed at that depth.

        The last token, `ahead` - `depth` - 1 places after t, belongs to the answer too.
        """
        place = torch.arange(self.tokens.shape[1])
        first = self.prompts[:, None] + depth + 1 - ahead
        return (place >= first) & (place + ahead < self.lengths[:, None])


@dataclass(frozen=True)
class Guessed:
    """Guesses at one depth.

    Attributes:
        right: bool [B, T], by the place of the last token: whether the guess at this depth was the token that came.
        asked: bool [B, T], whether there was such a token.
    """

    right: Tensor
    asked: Tensor


class TrainedModule(nn.Module, ABC):
    """A module that the loop trains.

    Attributes:
        kind: its name in `shoal train`.
        guesses: whether it guesses ahead, so that hits by depth say something about its speed.
        epsilon: AdamW's epsilon: far larger gradients give steps of equal size, far smaller ones proportional steps.
        begun: `digest` of the weights that it goes on from; None if its first ones follow from seed and answers.
    """

    kind: ClassVar[str]
    guesses: ClassVar[bool] = True
    epsilon: ClassVar[float] = 1e-8
    begun: str | None = None

    @abstractmethod
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        """The loss, a scalar, and the guesses at depth 0, 1, ..."""

    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Fields of the card about held-out answers, besides acceptance."""
        return {}

    @abstractmethod
    def shape(self) -> dict[str, int]:
        """Numbers that describe how the tensors fit together."""


class ShippedModule(TrainedModule):
    """A component under training; its kind is the name of the method that uses it."""

    @abstractmethod
    def exported(self) -> dict[str, Tensor]:
        """The tensors to export, by name."""


class PartModule(ShippedModule):
    """A component that guesses tokens from the model's states alone."""

    @classmethod
    @abstractmethod
    def fresh(cls, base: Base, corpus: Corpus, ids: Sequence[int], depths: int | None, seed: int) -> PartModule:
        """The component before training.

        Args:
            base: the model.
            corpus: the training corpus.
            ids: the tokens that it guesses.
            depths: guesses in a row; None for the default.
            seed: of the first weights.
        """


class CutHead(nn.Module):
    """The frozen rows of the LM head for some tokens; the model's own states give the targets over the same tokens.

    Args:
        base: the model.
        ids: the tokens.

    Attributes:
        ids: int64 [n].
    """

    ids: Tensor
    rows: Tensor

    def __init__(self, base: Base, ids: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("ids", torch.tensor(ids), persistent=False)
        self.register_buffer("rows", base.rows(ids), persistent=False)

    def distilled(self, guesses: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy with the model's distributions over these tokens, and the argmax tokens guessed.

        Args:
            guesses: [n, D], the component's outputs in place of states.
            states: [n, D], the model's own.

        Returns:
            A scalar, and int64 [n].
        """
        loss, chosen = cross_entropy(guesses, states, self.rows)
        return loss, self.ids[chosen]

    @torch.no_grad()
    def best(self, guesses: Tensor, count: int) -> Tensor:
        """The `count` most probable tokens [n, count] by the component's outputs in place of states [n, D]."""
        logits = linear(guesses, self.rows)
        return self.ids[logits.topk(min(count, logits.shape[-1])).indices]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of float tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def next_draws(seed: int, steps: Tensor) -> torch.Generator:
    """What a step draws with; counts it in `steps`, a buffer of the module, so that a resumed run draws the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + int(steps))
    steps += 1
    return generator


@torch.no_grad()
def right_places(module: TrainedModule, held_out: Sequence[TextBatch]) -> list[float]:
    """Share of guesses at each depth that are the text's token, whatever came before."""
    found = [module.loss(batch)[1] for batch in held_out]
    right, asked = (torch.tensor([[int(getattr(one, name).sum()) for one in depths] for depths in found]).sum(0)
                    for name in ("right", "asked"))
    return [round(share, 4) for share in (right / asked.clamp(min=1)).tolist()]


def acceptance(depths: Sequence[Guessed]) -> tuple[Tensor, Tensor]:
    """How many chains were right up to each depth, and how many there were: both int64 [depths].

    A chain counts at a depth if there was a token to guess.
    """
    kept, right, asked = None, [], []
    for depth in depths:
        kept = depth.right if kept is None else kept & depth.right
        right.append((kept & depth.asked).sum())
        asked.append(depth.asked.sum())
    return torch.stack(right), torch.stack(asked)
