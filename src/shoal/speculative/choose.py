"""From a drafter's logits to guesses: the sequence's own sampling options applied to somebody else's opinion.

Greedy sequences get the drafter's best tokens. Sampled sequences get draws without replacement from the drafter's
distribution, each with that distribution for the rules that ask. Logits processors are not applied: they judge the
target alone, may be slow, and a good guess is enough. A constraint's mask is applied where it leaves a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.decode import sampling
from shoal.decode.sequence import SequenceState
from shoal.depth.plan import DepthPlan
from shoal.model.runner import SequenceChunk
from shoal.speculative.growth import Growth, Leaf, TreeShape


@dataclass(frozen=True, slots=True)
class Place:
    """Where guesses are wanted: after `path`, which follow the sequence's tokens.

    Attributes:
        path: guesses on the path from the sequence's last token to here.
        at: tells places of one depth apart.
    """

    seq: SequenceState
    path: tuple[int, ...]
    at: int

    @property
    def depth(self) -> int:
        """Distance from the sequence's last token."""
        return len(self.path)

    def uniform(self, rank: int) -> float:
        """The number for the sibling of that rank; it belongs to the emitted index that the guess is for."""
        return self.seq.draft_uniform(self.depth, rank, self.at)


@dataclass(frozen=True, slots=True)
class Guesses:
    """Siblings in the order in which they were drawn.

    Attributes:
        tokens: ids, each once.
        probs: probabilities [V] that they were drawn from; None where nothing was drawn.
        logs: log-probability of each under the drafter, in nats.
    """

    tokens: tuple[int, ...]
    probs: Tensor | None
    logs: tuple[float, ...]


NOTHING = Guesses((), None, ())
"""Of a drafter that knows none of the tokens that may come: another guess would have no mask behind it."""


def choose(places: Sequence[Place], logits: Tensor, count: int) -> list[Guesses]:
    """Up to `count` guesses at each place, by raw logits [places, V]; fewer where fewer tokens are possible."""
    found = [NOTHING] * len(places)
    for members in _alike(places):
        chosen = [places[i] for i in members]
        scores = _scores(chosen, logits if len(members) == len(places) else logits[members])
        if any(place.seq.allowed is not None for place in chosen):
            able = (scores > -torch.inf).any(-1)
            members, scores = [i for i, some in zip(members, able.tolist(), strict=True) if some], scores[able]
        if members:
            pick = _best if chosen[0].seq.sampling.greedy else _drawn
            for i, guesses in zip(members, pick([places[i] for i in members], scores, count), strict=True):
                found[i] = guesses
    return found


def _alike(places: Sequence[Place]) -> list[list[int]]:
    """Places by the sampling options of their sequences."""
    groups: dict[int, list[int]] = {}
    for i, place in enumerate(places):
        groups.setdefault(id(place.seq.sampling), []).append(i)
    return list(groups.values())


def _scores(places: Sequence[Place], logits: Tensor) -> Tensor:
    """Scores [places, V] after bias, penalties and mask along each place's own path."""
    options = places[0].seq.sampling
    if not sampling.needs_history(options) and all(place.seq.allowed is None for place in places):
        return sampling.biased(logits, options)
    pairs = zip(places, logits, strict=True)
    return torch.stack([place.seq.scores(values, place.path, processed=False) for place, values in pairs])


def _best(places: Sequence[Place], scores: Tensor, count: int) -> list[Guesses]:
    logs = scores.float().log_softmax(-1)
    best = logs.topk(min(count, logs.shape[-1]))
    table = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [_without_impossible(tokens, values) for tokens, values in table]


def _without_impossible(tokens: list[int], logs: list[float]) -> Guesses:
    real = [i for i, log in enumerate(logs) if log > -torch.inf]
    return Guesses(tuple(tokens[i] for i in real), None, tuple(logs[i] for i in real))


def _drawn(places: Sequence[Place], scores: Tensor, count: int) -> list[Guesses]:
    probs = sampling.probs_of(scores, places[0].seq.sampling)
    tokens, rest = [], probs
    possible: list[int] = [count] * len(places) if count == 1 else (probs > 0).sum(-1).clamp(max=count).tolist()
    for rank in range(max(possible)):
        drawn = sampling.draws(rest, [place.uniform(rank) for place in places])
        tokens.append(drawn)
        if rank + 1 < max(possible):
            index = torch.tensor(drawn, device=probs.device)[:, None]
            left = rest.scatter(-1, index, 0.0)
            # A place with no token left draws on from what it has; those draws are cut off below.
            rest = torch.where((left > 0).any(-1, keepdim=True), left, rest)
    by_place = torch.tensor(tokens, device=probs.device).T
    logs = probs.gather(-1, by_place).log().tolist()
    return [Guesses(tuple(drawn[i] for drawn in tokens[:size]), probs[i], tuple(logs[i][:size]))
            for i, size in enumerate(possible)]


class SequenceTree(Growth):
    """A sequence's tree, which grows by a level at a time.

    Attributes:
        seq, seq_id: the sequence, and its place in the drafter's cache.
        levels: most levels; `level`: the levels that it has.
        first: the first node of the last level.
        leaves: nodes of the last level from which more may grow.
        logs: per node the log-likelihood of the path to it.
    """

    def __init__(self, seq: SequenceState, seq_id: int, levels: int) -> None:
        super().__init__(seq.tokens[-1])
        self.seq, self.seq_id, self.levels = seq, seq_id, levels
        self.level = self.first = 0
        self.leaves, self.logs = [Leaf(0)], [0.0]

    @property
    def goes_on(self) -> bool:
        """Whether another level is wanted and there is a leaf to grow from."""
        return self.level < self.levels and bool(self.leaves)

    def chunk(self, plan: DepthPlan) -> SequenceChunk:
        """The last level's nodes; with the earlier ones they are a forest below the committed tokens."""
        tokens = self.tokens[self.first :]
        parents = [parent - 1 for parent in self.parents[1:]]
        depths = [len(path) - 1 for path in self.paths[1:]]
        return SequenceChunk(self.seq_id, tokens, [0] * len(tokens), plan, parents, depths, wanted=len(tokens),
                             fed=self.first - 1)

    def settle(self, shape: TreeShape, guesses: Sequence[Guesses], least: float) -> None:
        """Add the children that the shape keeps; those of a path at least so likely are the next leaves."""

        def noise(leaf: int, rank: int) -> float | None:
            if self.seq.sampling.greedy:
                return None
            return self.seq.uniform(self.level, f"draft value {leaf}.{rank}")

        kept = shape.keep(self.leaves, [guess.logs for guess in guesses], noise)
        self.first, leaves = len(self.tokens), []
        for leaf, guess, children in zip(self.leaves, guesses, kept, strict=True):
            for token, (log, value) in zip(guess.tokens, children, strict=False):
                leaves.append(Leaf(self.add(token, leaf.node, guess.probs), log, value))
                self.logs.append(log)
        self.leaves, self.level = [leaf for leaf in leaves if leaf.log >= least], self.level + 1


def least_log(stop: float) -> float:
    """Log-likelihood below which a path is not continued, by the likelihood `stop`, of which 0 stops nothing."""
    return math.log(stop) if stop > 0 else -math.inf


def extend(
    trees: Sequence[SequenceTree], logits: Tensor, shape: TreeShape, least: float = -math.inf,
    pick: Callable[[Sequence[Place], Tensor, int], list[Guesses]] = choose,
) -> None:
    """Give trees of one level the next one.

    Args:
        trees: at least one.
        logits: after the leaves of all trees.
        shape: says how many children a leaf gets, and which of them stay.
        least: log-likelihood below which a path is not continued.
        pick: draws guesses as `choose` does.
    """
    places = [Place(tree.seq, tree.paths[leaf.node], at) for tree in trees for at, leaf in enumerate(tree.leaves)]
    guesses = iter(pick(places, logits, shape.width(trees[0].level)))
    for tree in trees:
        tree.settle(shape, [next(guesses) for _ in tree.leaves], least)
