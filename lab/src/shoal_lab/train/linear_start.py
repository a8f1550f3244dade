"""The best linear guess of a state from the previous state and the token between them: where a layer's training starts.

Least squares over some answers take seconds, and guess as well as a layer after some fifty steps of training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal_lab.train.corpus import Corpus
from shoal_lab.train.part import Base

_SHARDS = 12
"""Most shards that are used: a matrix needs no more."""
_RIDGE = 1e-3
"""Ridge, relative to the mean square of the inputs, so that few answers do not give large weights."""


@torch.no_grad()
def linear_start(base: Base, corpus: Corpus, eps: float) -> tuple[Tensor, Tensor]:
    """The matrix that predicts the next state best.

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
    for shard in range(min(_SHARDS, len(corpus.shards))):
        for one in corpus.answers(shard, validation=False):
            first = max(0, one.prompt - 1)
            states = one.states[first:].float()
            pair = states[:-1], base.embed(one.tokens[first + 1 :])
            known = torch.cat([rms_norm(x, x.shape[-1:], eps=eps) for x in pair], -1)
            squares = squares + known.T @ known
            products = products + known.T @ states[1:]
            sizes = sizes + states[1:].square().sum(0)
            count += len(known)
    ridge = _RIDGE * count * torch.eye(len(squares))
    matrix: Tensor = torch.linalg.solve(squares + ridge, products).T
    roots = (sizes / count).sqrt().clamp(min=1e-6)
    return matrix / roots[:, None], roots
