"""What a model guesses with when it goes on by itself: vectors in place of embeddings."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.model.packed.native.structs import ChainStruct
from shoal.model.packed.native.weights import PackedWeight

Path = tuple[list[int], list[float]]
"""Guesses one after the other, and the log-likelihood of the path up to each."""


class NativeChain:
    """A token's vector is `of_state` times the state before it, and the token's own share.

    A state is normalised as the output matrix reads it, and then by its size alone.

    Args:
        of_state: [hidden, hidden].
        shares: float32 [vocab, hidden], of the tokens that can be guessed.
        norm: float32 [hidden], of the RMS norm of states that another model gives.
        eps: of that norm.

    Raises:
        ValueError: sizes or types do not fit together.
    """

    def __init__(self, of_state: PackedWeight, shares: Tensor, norm: Tensor, eps: float) -> None:
        self.hidden, self.vocab = of_state.cols, len(shares)
        if of_state.rows != self.hidden or of_state.paired:
            raise ValueError(f"of_state is [{of_state.rows}, {self.hidden}], paired={of_state.paired}; it must be "
                             "square, and not paired")
        check_plain("shares", shares, (self.vocab, self.hidden))
        check_plain("norm", norm, (self.hidden,))
        self._of_state, self._shares, self._norm, self._eps = of_state, shares, norm, eps
        self._ones = torch.ones(self.hidden)

    def ask(
        self, states: Sequence[Tensor], known: Sequence[Tensor], lengths: Sequence[int], least: float
    ) -> ChainAsked:
        """What one call takes; see `NativeModel.guess`."""
        most, size = max(lengths), len(lengths)
        words = array("i", lengths)
        found = array("i", bytes(4 * size * (most + 1)))  # the guesses, then their numbers
        logs = array("f", bytes(4 * size * most))
        lines = array("Q", self._lines("states", states) + self._lines("known", known))
        struct = ChainStruct(of_state=self._of_state.struct(), length=most, eps=self._eps, least=least)
        struct.ones, struct.shares, struct.norm = (one.data_ptr() for one in (self._ones, self._shares, self._norm))
        struct.states = lines.buffer_info()[0]
        struct.known = struct.states + 4 * len(lines)
        struct.lengths, struct.logs = words.buffer_info()[0], logs.buffer_info()[0]
        struct.guesses = found.buffer_info()[0]
        struct.counts = struct.guesses + 4 * size * most
        struct.memory = (self, states, known, lines, words, found, logs)
        return ChainAsked(struct, found, logs, most)

    def _lines(self, name: str, tensors: Sequence[Tensor]) -> list[int]:
        """The addresses of the rows of some tensors [n, hidden], one after the other."""
        lines: list[int] = []
        for tensor in tensors:
            check_plain(name, tensor, (len(tensor), self.hidden))
            first = tensor.data_ptr()
            lines.extend(range(first, first + 4 * tensor.numel(), 4 * self.hidden))
        return lines


class ChainAsked:
    """One call's guesses.

    Attributes:
        struct: what the library takes.
    """

    def __init__(self, struct: ChainStruct, found: array[int], logs: array[float], most: int) -> None:
        self.struct, self._found, self._logs, self._most = struct, found, logs, most

    def paths(self) -> list[Path]:
        """What was guessed, chain by chain."""
        most, found = self._most, self._found
        counts = found[len(self._logs) :]
        ends = [(first * most, first * most + count) for first, count in enumerate(counts)]
        return [(found[first:end].tolist(), self._logs[first:end].tolist()) for first, end in ends]


def check_plain(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError for what the library would read amiss."""
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.is_cuda:
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name} is {found}; a contiguous torch.float32 {list(shape)} on the CPU is needed")
