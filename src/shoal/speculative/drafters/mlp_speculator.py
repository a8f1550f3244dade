"""MLP speculators that others have trained (arXiv 2404.19124): what their files say, and how they guess.

Head j joins what the head before made of the model's state with the embedding of the guess before its own, each in a
space of the drafter's own: gelu(norm(P s + (b / a) E x)), with a = 2^(-1 / (2 n)) of n heads and b = sqrt((1 - a^2) d /
2) of d numbers, so that the state keeps half of the weight up to the last head. The norm is by the root of the mean
square, with a weight and a bias. In the layout of IBM's accelerators, which vLLM reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm
from typing_extensions import override

from shoal.model.runner import ModelRunner
from shoal.speculative.drafter_files import DrafterFiles
from shoal.speculative.drafters.state_heads import StateHeads, check_sizes
from shoal.speculative.layer_head import packed

_EPS = 1e-6
_MOST = 60
"""Most heads."""


class MlpCheckpoint:
    """An MLP speculator as its files have it.

    Raises:
        Unsupported: tensors are missing, or a size in the config is no usable number.
    """

    def __init__(self, files: DrafterFiles) -> None:
        self.files = files
        if self.count > _MOST:
            raise files.refusal(f"it has {self.count} heads; at most {_MOST} are read")
        files.check_held([name for head in range(self.count) for name in map(
            self.name, ("emb.weight", "proj.weight", "head.weight", "ln.weight", "ln.bias"), [head] * 5)])

    @cached_property
    def count(self) -> int:
        """Heads."""
        return self.files.number("n_predict")

    @cached_property
    def hidden(self) -> int:
        """D of the model's states."""
        return self.files.number("emb_dim")

    @cached_property
    def inner(self) -> int:
        """Numbers of what the heads make of a state."""
        return self.files.number("inner_dim") if self.files.config.get("inner_dim") else self.hidden

    @cached_property
    def vocabulary(self) -> int:
        """Tokens of the model."""
        return self.files.number("vocab_size")

    @property
    def scaled(self) -> bool:
        """Whether the model's state is normed first."""
        return bool(self.files.config.get("scale_input"))

    def name(self, what: str, head: int) -> str:
        """The tensor of a head; where heads share it, the one that is in the files.

        All share embeddings, rows and norms then, and all but the first the projection.
        """
        part, _, kind = what.partition(".")
        if self.files.config.get("tie_weights"):
            head = min(head, 1) if part == "proj" else 0
        return f"{part}.{head}.{kind}"

    def take(self, what: str, head: int, *size: int) -> Tensor:
        """That tensor in its own dtype."""
        return self.files.take(self.name(what, head), *size)

    def leave_copies(self) -> None:
        """Take what is there twice, where heads share it."""
        if self.files.config.get("tie_weights"):
            for name in self.files.below(""):
                if name.split(".")[0] in ("emb", "proj", "head", "ln"):
                    self.files.take(name, *self.files.size(name))


class MlpHeads(StateHeads):
    """An MLP speculator beside its target.

    Raises:
        Unsupported: its tensors do not fit together, or it is for another model.
    """

    def __init__(self, target: ModelRunner, drafter: MlpCheckpoint) -> None:
        files, inner, vocabulary = drafter.files, drafter.inner, drafter.vocabulary
        check_sizes(files, target, drafter.hidden, vocabulary)
        super().__init__(target, drafter.count, range(vocabulary))
        share = 0.5 ** (0.5 / drafter.count)
        self._weight, self._scaled = math.sqrt((1 - share**2) * inner / 2) / share, drafter.scaled
        made: dict[str, Any] = {}

        def once(what: str, head: int, *size: int, product: bool = False) -> Any:
            name = drafter.name(what, head)
            if name not in made:
                found = drafter.take(what, head, *size)
                made[name] = packed(target, found) if product else found.to(target.device)
            return made[name]

        columns = [drafter.hidden, *[inner] * (drafter.count - 1)]
        self._tables = [once("emb.weight", head, vocabulary, inner) for head in range(drafter.count)]
        self._projections = [once("proj.weight", head, inner, columns[head], product=True)
                             for head in range(drafter.count)]
        self._norms = [[once(f"ln.{part}", head, inner).float() for part in ("weight", "bias")]
                       for head in range(drafter.count)]
        self._rows = [once("head.weight", head, vocabulary, inner, product=True) for head in range(drafter.count)]
        drafter.leave_copies()
        files.check_taken()

    @override
    def begin(self, states: Tensor) -> Tensor:
        read = super().begin(states)
        return rms_norm(read, read.shape[-1:], eps=_EPS) / math.sqrt(2) if self._scaled else read

    @override
    def step(self, head: int, carried: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        embedded = self._tables[head][torch.tensor(tokens, device=self.ids.device)].float()
        weight, bias = self._norms[head]
        joined = self._projections[head](carried).float() + self._weight * embedded
        made = gelu(rms_norm(joined, weight.shape, weight, _EPS) + bias)
        return self._rows[head](made), made


def read(folder: str) -> MlpCheckpoint:
    """The speculator in a folder; raises what `MlpCheckpoint` and `DrafterFiles` do."""
    return MlpCheckpoint(DrafterFiles(folder))
