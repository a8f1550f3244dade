"""Medusa's heads that others have trained (arXiv 2401.10774, section 2.2): what their files say, and how they guess.

A head is residual blocks x + silu(W x + b) and rows of logits, which are its own, one set for all heads, or the
model's. In FasterDecoding's layout tensors are named by the place of a block in its head, in vLLM's by what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from torch.nn.functional import silu
from typing_extensions import override

from shoal.model.runner import ModelRunner
from shoal.speculative.drafter_files import DrafterFiles
from shoal.speculative.drafters.state_heads import StateHeads, check_sizes, head_of
from shoal.speculative.layer_head import packed

_MOST = 60
"""Most heads."""


class MedusaCheckpoint:
    """Heads as their files have them.

    Attributes:
        by_place: whether they are in FasterDecoding's layout.

    Raises:
        Unsupported: tensors are missing, or the config names no usable number of heads or blocks.
    """

    def __init__(self, files: DrafterFiles) -> None:
        self.files, self.by_place = files, files.has("0.0.linear.weight")
        if not self.by_place:
            files.check_held(["blocks.0.layers.0.weight"])
        files.check_held([self._block(head, layer) for head in range(self.count) for layer in range(self.layers)])
        if self.count > _MOST:
            raise files.refusal(f"it has {self.count} heads; at most {_MOST} are read")
        rows = [self._rows(head) for head in range(self.count)]
        if any(map(files.has, rows)):
            files.check_held(rows)
        if files.config.get("logit_scale", 1.0) != 1.0:
            raise files.refusal(f"its config scales logits by {files.config['logit_scale']}; only 1 is read")

    @cached_property
    def count(self) -> int:
        """Heads: as many as there are tensors of, since configs on the Hub are known to name fewer."""
        told = self.files.number("medusa_num_heads" if self.by_place else "num_heads", 1)
        found = told
        while self.files.has(self._block(found, 0)):
            found += 1
        return found

    @cached_property
    def layers(self) -> int:
        """Blocks of a head."""
        return self.files.number("medusa_num_layers" if self.by_place else "num_hidden_layers", 1)

    @cached_property
    def hidden(self) -> int:
        """D of the model's states."""
        return self.files.size(self._block(0, 0))[0]

    def _block(self, head: int, layer: int) -> str:
        return f"{head}.{layer}.linear.weight" if self.by_place else f"blocks.{head}.layers.{layer}.weight"

    def _rows(self, head: int) -> str:
        if self.by_place:
            return f"{head}.{self.layers}.weight"
        if self.files.has("lm_head.weight"):
            return "lm_head.weight"
        return f"lm_heads.{0 if self.files.config.get('original_lm_head') else head}.weight"

    def block(self, head: int, layer: int) -> tuple[Tensor, Tensor | None]:
        """The matrix [D, D] of a block and its bias [D] or None, float32."""
        name = self._block(head, layer)
        bias = name.removesuffix("weight") + "bias"
        return self.files.take(name, self.hidden, self.hidden).float(), (
            self.files.take(bias, self.hidden).float() if self.files.has(bias) else None)

    @cached_property
    def names(self) -> Sequence[int] | None:
        """The tokens that are guessed, if a list of them is there."""
        if not self.files.has("token_map"):
            return None
        return list(self.files.take("token_map", *self.files.size("token_map")).long().tolist())

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the model, where rows of all of them are there."""
        name = self._rows(0)
        found = self.files.size(name)[0] if self.files.has(name) else None
        return None if self.names is not None and found == len(self.names) else found

    def rows(self, head: int) -> Tensor | None:
        """A head's own rows of logits [V, D], of the listed tokens where there is a list; None for the model's."""
        name = self._rows(head)
        if not self.files.has(name):
            return None
        found = self.files.take(name, self.files.size(name)[0], self.hidden)
        return found if self.names is None or len(found) == len(self.names) else found[list(self.names)]


class ResidualHeads(StateHeads):
    """Heads of Medusa beside their target.

    Raises:
        Unsupported: their tensors do not fit together, or they are for another model.
    """

    def __init__(self, target: ModelRunner, drafter: MedusaCheckpoint) -> None:
        files = drafter.files
        check_sizes(files, target, drafter.hidden, drafter.vocabulary)
        names = drafter.names or range(target.vocab_size)
        if not 0 <= min(names) <= max(names) < target.vocab_size or len({*names}) < len(names):
            raise files.refusal(f"its 'token_map' must name different tokens of 0 to {target.vocab_size - 1}")
        super().__init__(target, drafter.count, names)
        rows = [drafter.rows(head) for head in range(drafter.count)]
        blocks = [[drafter.block(head, layer) for layer in range(drafter.layers)] for head in range(drafter.count)]
        self._blocks = [[(packed(target, weight), None if bias is None else bias.to(target.device))
                         for weight, bias in head] for head in blocks]
        models = head_of(target) if drafter.names is None else packed(target, target.head_rows(names))
        self._rows = [models if own is None else packed(target, own) for own in rows]
        files.check_taken()

    @override
    def step(self, head: int, carried: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        x = carried
        for product, bias in self._blocks[head]:
            moved = product(x).float()
            x = x + silu(moved if bias is None else moved + bias)
        return self._rows[head](x), carried


def read(folder: str) -> MedusaCheckpoint:
    """The heads in a folder; raises what `MedusaCheckpoint` and `DrafterFiles` do."""
    return MedusaCheckpoint(DrafterFiles(folder))
