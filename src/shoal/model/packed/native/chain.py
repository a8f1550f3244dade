"""Draft chains: a model that continues its own guesses in one call, fed with vectors in place of embeddings."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.packed.native.batch import address
from shoal.model.packed.native.library import ChainStruct
from shoal.model.packed.native.weights import PackedWeight

Path = tuple[list[int], list[float]]
"""Successive guesses, and the log-likelihood of the path up to each."""
_COLDEST = 1e-30
"""A lower temperature would draw the same, but overflow."""


@dataclass(frozen=True, slots=True)
class ChainWish:
    """The guesses that are wanted after a token.

    Attributes:
        length: most guesses, at least 1.
        temperature: temperature of draws; 0 takes the argmax, the first of equals.
        uniforms: numbers in [0, 1), one per guess; each selects a token by the cumulative distribution.
    """

    length: int
    temperature: float = 0.0
    uniforms: Sequence[float] = ()

    def padded(self, length: int) -> list[float]:
        """`uniforms` padded to `length`; ValueError if draws lack numbers."""
        if self.temperature > 0 and len(self.uniforms) != self.length:
            raise ValueError(f"{len(self.uniforms)} numbers are given for {self.length} draws")
        return [*self.uniforms, *[0.0] * (length - len(self.uniforms))]


class NativeChain:
    """Makes the input vector of a token: `of_state` times the state before it, plus the token's own share.

    A state is normalised as the input of the output matrix, and then by its size alone.

    Args:
        of_state: [hidden, hidden].
        shares: float32 [vocab, hidden], the shares of the tokens that can be guessed.
        norm: float32 [hidden], weight of the RMSNorm of states that another model gives.
        eps: epsilon of that norm.

    Raises:
        ValueError: sizes or types do not fit together.
    """

    def __init__(self, of_state: PackedWeight, shares: Tensor, norm: Tensor, eps: float) -> None:
        self.hidden, self.vocab = of_state.columns, len(shares)
        if of_state.rows != self.hidden or of_state.paired:
            raise ValueError(f"of_state is [{of_state.rows}, {self.hidden}], paired={of_state.paired}; it must be "
                             "square, and not paired")
        address("shares", shares, (self.vocab, self.hidden))
        address("norm", norm, (self.hidden,))
        self._of_state, self._shares, self._norm, self._eps = of_state, shares, norm, eps
        self._ones = torch.ones(self.hidden)

    def ask(
        self, states: Sequence[Tensor], known: Sequence[Tensor], wishes: Sequence[ChainWish], least: float
    ) -> ChainAsked:
        """The arguments of one call; see `NativeModel.guess`."""
        most, size = max(wish.length for wish in wishes), len(wishes)
        lengths = array("i", [wish.length for wish in wishes])
        colder = array("f", [1 / max(wish.temperature, _COLDEST) if wish.temperature > 0 else 0.0 for wish in wishes])
        uniforms = array("d", [number for wish in wishes for number in wish.padded(most)])
        found = array("i", bytes(4 * size * (most + 1)))  # the guesses, then their numbers
        logs = array("f", bytes(4 * size * most))
        lines = array("Q", self._lines("states", states) + self._lines("known", known))
        struct = ChainStruct(of_state=self._of_state.struct(), length=most, eps=self._eps, least=least)
        struct.ones, struct.shares, struct.norm = (one.data_ptr() for one in (self._ones, self._shares, self._norm))
        struct.states = lines.buffer_info()[0]
        struct.known = struct.states + 4 * len(lines)
        struct.lengths, struct.logs = lengths.buffer_info()[0], logs.buffer_info()[0]
        struct.colder, struct.uniforms = colder.buffer_info()[0], uniforms.buffer_info()[0]
        struct.guesses = found.buffer_info()[0]
        struct.counts = struct.guesses + 4 * size * most
        struct.memory = (self, states, known, lines, lengths, colder, uniforms, found, logs)
        return ChainAsked(struct, found, logs, most)

    def _lines(self, name: str, tensors: Sequence[Tensor]) -> list[int]:
        """The addresses of the rows of several tensors [n, hidden]."""
        lines: list[int] = []
        for tensor in tensors:
            first = address(name, tensor, (len(tensor), self.hidden))
            lines.extend(range(first, first + 4 * tensor.numel(), 4 * self.hidden))
        return lines


class ChainAsked:
    """One call, `struct` in the library's form, and its guesses once it has run."""

    def __init__(self, struct: ChainStruct, found: array[int], logs: array[float], most: int) -> None:
        self.struct, self._found, self._logs, self._most = struct, found, logs, most

    def paths(self) -> list[Path]:
        """The guesses, chain by chain."""
        most, found = self._most, self._found
        counts = found[len(self._logs) :]
        ends = [(first * most, first * most + count) for first, count in enumerate(counts)]
        return [(found[first:end].tolist(), self._logs[first:end].tolist()) for first, end in ends]
