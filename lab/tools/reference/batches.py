"""Batches of examples of similar length, in a fixed order that depends on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PAD = 2
STEP = 16
BLOCK = 64
QUESTION_WEIGHT = 0.15


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [rows, length + 1], weights of the loss at each target [rows, length], kinds of the rows [rows]."""

    ids: Tensor
    weights: Tensor
    kinds: Tensor
    tokens: int


class Corpus:
    """The file that `build.py` writes."""

    def __init__(self, file: Path) -> None:
        table = torch.load(file, weights_only=True)
        self.tokens, self.lengths, self.starts, self.kinds = (
            table[key] for key in ("tokens", "lengths", "starts", "kinds")
        )
        self.offsets = torch.cat((torch.zeros(1, dtype=torch.long), self.lengths.cumsum(0)))

    def plan(self, size: int, seed: int) -> Iterator[list[int]]:
        """Example indices of each batch of about `size` tokens, epoch after epoch."""
        epoch = 0
        per_block = max(1, int(BLOCK * size / float(self.lengths.float().mean())))
        lengths = self.lengths.tolist()
        while True:
            source = random.Random(f"{seed}/{epoch}")
            order = list(range(len(lengths)))
            source.shuffle(order)
            for first in range(0, len(order), per_block):
                rows = sorted(order[first : first + per_block], key=lengths.__getitem__)
                groups = list(_cut(rows, lengths, size))
                source.shuffle(groups)
                yield from groups
            epoch += 1

    def batch(self, indices: list[int]) -> Batch:
        """The padded batch of these examples."""
        width = _width(max(int(self.lengths[index]) for index in indices))
        ids = torch.full((len(indices), width + 1), PAD)
        weights = torch.zeros(len(indices), width)
        for row, index in enumerate(indices):
            first, size, start = int(self.offsets[index]), int(self.lengths[index]), int(self.starts[index])
            ids[row, :size] = self.tokens[first : first + size].long()
            weights[row, : size - 1] = 1.0
            weights[row, : start - 1] = QUESTION_WEIGHT
        return Batch(ids, weights, self.kinds[indices], int(self.lengths[indices].sum()))


def _width(length: int) -> int:
    return -(-(length - 1) // STEP) * STEP


def _cut(rows: list[int], lengths: list[int], size: int) -> Iterator[list[int]]:
    """Cut rows, sorted by length, into groups whose padded area is at most `size`."""
    group: list[int] = []
    for row in rows:
        if group and (len(group) + 1) * _width(lengths[row]) > size:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
