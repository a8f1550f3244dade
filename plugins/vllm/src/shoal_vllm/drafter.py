"""Shoal's `auto` as a class that vLLM takes for a drafter: it guesses from the text, where measured times say it pays.

vLLM verifies the guesses, by its own rejection sampling. It asks after every step and says what each row emitted, but
not which request a row is. So rows are told by their tokens; a mistake could cost time, never a token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from shoal.decode.rules.accept import Outcome
from shoal.decode.tree import TokenTree
from shoal.decode.worker import StepReport
from shoal.errors import Unsupported
from shoal.methods.auto import Cautious
from shoal.speculative.cost.policy import CostModel
from shoal_vllm.plugin import check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from shoal.decode.sequence import SequenceState

_COMPARED = 64
"""Last tokens by which a row is told."""
_WIDEST = 512
"""Most tokens of a forward as `auto` is told; it has a lower bound of its own."""


@dataclass(eq=False)
class Row:
    """What `auto` reads of a sequence, under the names that Shoal's loop has for it.

    Attributes:
        tokens: prompt and answer so far; `read` of them were there when the row was first seen.
        finish_reason: None until the row has gone.
    """

    tokens: list[int]
    read: int
    finish_reason: str | None = None
    salt: str = ""

    @property
    def quotable(self) -> list[int]:
        """The tokens that guesses may be taken from: all."""
        return self.tokens

    @property
    def emitted(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.read

    def is_before(self, tokens: NDArray[np.int32], new: int) -> bool:
        """Whether a row with these tokens, `new` of which are new, goes on from here."""
        length = len(self.tokens)
        first = max(0, length - _COMPARED)
        return length + new == len(tokens) and self.tokens[first:] == tokens[first:length].tolist()


class Auto:
    """A drafter for `--speculative-config '{"model": "shoal_vllm.drafter.Auto", "num_speculative_tokens": 15}'`.

    Guesses come from a row's own text alone: vLLM says nothing of tenants, so no answer is kept for another request.

    Args:
        config: of the engine.

    Raises:
        Unsupported: another version of vLLM than the tested ones, or its second model runner.
    """

    def __init__(self, config: VllmConfig) -> None:
        check_version()
        if config.use_v2_model_runner:
            raise Unsupported("shoal_vllm.drafter.Auto on vLLM's second model runner", "that takes no drafter classes",
                              "Set VLLM_USE_V2_MODEL_RUNNER=0")
        assert config.speculative_config is not None
        self._most = int(config.speculative_config.num_speculative_tokens)
        self._longest = int(config.model_config.max_model_len)
        self._drafter = Cautious(CostModel(), self._most).begin(SimpleNamespace(prefill_chunk=_WIDEST), None)
        self._rows: list[Row | None] = []
        self._trees: list[TokenTree] = []
        self._began = self._ended = 0.0

    def load_model(self, model: Any) -> None:
        """Nothing to load: vLLM asks every drafter."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], tokens: NDArray[np.int32], **_: Any
    ) -> list[list[int]]:
        """Guesses for each row; an empty list where none pays.

        Args:
            sampled: what each row emitted in the step; nothing where it still reads its prompt.
            lengths: [rows or more], tokens of each row, those that were just emitted included.
            tokens: [rows or more, longest], its tokens.
        """
        now = time.perf_counter()
        before, self._rows = self._rows, [
            self._row(i, tokens[i, : lengths[i]], len(new)) if new else None for i, new in enumerate(sampled)
        ]
        self._observe(before, sampled, now)
        for row in set(before) - set(self._rows):
            if row is not None:
                row.finish_reason = "gone"
        found: list[list[int]] = [[] for _ in sampled]
        at = [i for i, row in enumerate(self._rows) if row is not None]
        if at:
            rows = cast("list[SequenceState]", [self._rows[i] for i in at])
            limits = [max(0, min(self._most, self._longest - int(lengths[i]) - 1)) for i in at]
            self._trees = self._drafter.propose(rows, limits)
            for i, tree in zip(at, self._trees, strict=True):
                found[i] = list(tree.tokens[1:])
        self._began, self._ended = now, time.perf_counter()
        return found

    def _row(self, i: int, tokens: NDArray[np.int32], new: int) -> Row:
        """The row that goes on here, most likely at the same place; a new one if none does."""
        near = [self._rows[i]] if i < len(self._rows) else []
        for row in (*near, *self._rows):
            if row is not None and row.is_before(tokens, new):
                row.tokens.extend(tokens[len(row.tokens) :].tolist())
                return row
        return Row(tokens.tolist(), len(tokens) - new)

    def _observe(self, before: Sequence[Row | None], sampled: Sequence[Sequence[int]], now: float) -> None:
        """Learn from a step of the same rows as the step before, in which no prompt was read."""
        if not before or None in before or len(before) != len(self._rows) or set(before) != set(self._rows):
            return
        trees = dict(zip(before, self._trees, strict=True))
        rows = cast("list[SequenceState]", self._rows)
        outcomes = [Outcome(tuple(range(len(new))), new[-1]) for new in sampled]
        self._drafter.observe(StepReport(rows, [trees[row] for row in self._rows], outcomes,
                                         self._ended - self._began, now - self._ended))
