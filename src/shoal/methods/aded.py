"""ADED: guesses from a tri-gram table that adapts to what the model says."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Proposer
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, Number, Tries
from shoal.speculative.corpus import stamp_of, tokens_of
from shoal.speculative.draft import check_least
from shoal.speculative.earlier import Tenants
from shoal.speculative.growth import Growth
from shoal.speculative.per_sequence import TextDrafter
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState

Search = Literal["best_first", "mcts"]
Pair = tuple[int, int]
Distribution = Callable[[Pair], Sequence[tuple[int, float]]]
"""Tokens that may follow a pair, and their probabilities, the likeliest first."""
Counts = Mapping[Pair, Mapping[int, float]]
"""Weights of the tokens that follow two others."""
Weights = dict[Pair, dict[int, float]]
"""The same, of what texts teach."""

FOLLOWERS = 12
"""Tokens remembered per pair, as in the paper."""
_PAIRS = 1 << 16
"""Most pairs that the texts of a tenant teach, some 400 bytes each."""
CAP = 3.0
"""Largest weight, as in the authors' code: old habits stay forgettable."""
_C1, _C2 = 32.0, 8.0  # exploration constants of the paper's search


@dataclass(frozen=True)
class ADED(DraftingMethod):
    """A table of tri-grams guesses a tree of likely continuations, and learns from every token that is emitted.

    The paper builds its table from a large corpus. Here a corpus is optional: prompts and answers fill the table, too,
    from request to request; those of one `cache_salt` teach no other's. By default the tree holds the likeliest paths.
    "mcts" searches for sequences as the paper does, at more cost, and merges the most visited ones into a tree.

    Attributes:
        corpus: a UTF-8 text file whose tri-grams the table begins with, or a static n-gram file as llama.cpp's
            `llama-lookup-create` writes it (.bin); None begins with an empty table.
        search: "best_first" or "mcts".
        nodes: most guesses in a tree.
        depth: most guesses one after another.
        step: weight of an occurrence in the sequence's own text; a pair's followers in the corpus weigh 1 together.
        iterations: of "mcts".
    """

    name: ClassVar[str] = "aded"
    paper: ClassVar[str] = "arXiv 2407.12021"
    reads: ClassVar[tuple[str, ...]] = ("corpus",)

    corpus: str | None = None
    search: Search = "best_first"
    nodes: Guesses = 16
    depth: Guesses = 8
    step: Number = 0.2
    iterations: Tries = 150

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("nodes", "depth", "iterations"):
            check_least(option, getattr(self, option), 1)
        if not 0 < self.step <= CAP:
            raise ValueError(f"step is {self.step}; it must be in (0, {CAP:g}]")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Trees from the table, confirmed by the target."""
        base = {} if self.corpus is None else trigrams_of(self.corpus, info.tokenizer)
        tables: Tenants[Weights] = info.memory.setdefault(
            (self.name, self.corpus, self.step), Tenants(lambda _: {}))
        return self.verified(AdaptiveNGrams(self, base, tables), info)


@dataclass(frozen=True)
class AdaptiveNGrams(Proposer):
    """Guesses trees from tri-grams of a corpus, the prompt and the answer.

    Attributes:
        method: how large the trees are, and how they are found.
        tables: what the requests of each `cache_salt` have taught so far.
    """

    method: ADED
    base: Counts = field(default_factory=dict, repr=False)
    tables: Tenants[Weights] = field(default_factory=lambda: Tenants(lambda _: {}), repr=False)

    def begin(self, runner: Any, cache: Any) -> TextDrafter[Trigrams]:
        """A drafter whose sequences have read nothing yet."""
        def table(seq: SequenceState) -> Trigrams:
            return Trigrams(self.base, self.method.step, self.tables.of(seq.salt))

        return TextDrafter(table, self._tree)

    def _tree(self, seq: SequenceState, table: Trigrams, limit: int) -> TokenTree:
        """The last token alone where the last two tokens are new."""
        method, depth = self.method, min(limit, self.method.depth)
        table.read(seq.tokens)
        if depth < 1 or len(seq.tokens) < 2:
            return TokenTree.chain(seq.tokens[-1:])
        pair = (seq.tokens[-2], seq.tokens[-1])
        if method.search == "best_first":
            return best_first(table.probs, pair, method.nodes, depth)
        key = f"{seq.seed} {seq.number} {seq.emitted}"
        return monte_carlo(table.probs, pair, method.nodes, depth, method.iterations, key)


class Trigrams:
    """What follows two tokens, and how likely.

    Args:
        base: weights to begin with, shared and never changed.
        step: weight that one more occurrence adds.
        own: weights of pairs that texts had, the latest pair last; texts of one tenant share them.
    """

    def __init__(self, base: Counts, step: float, own: Weights | None = None) -> None:
        self._base, self._step = base, step
        self._own: Weights = {} if own is None else own
        self._read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Add the tri-grams of a growing text, each once."""
        for end in range(max(self._read, 2), len(tokens)):
            self._add((tokens[end - 2], tokens[end - 1]), tokens[end])
        self._read = max(self._read, len(tokens))

    def _add(self, pair: Pair, token: int) -> None:
        weights = self._own.pop(pair, None) or dict(self._base.get(pair, {}))
        self._own[pair] = weights
        if len(self._own) > _PAIRS:
            del self._own[next(iter(self._own))]
        weights[token] = min(CAP, weights.pop(token, 0.0) + self._step)  # the newest stands last
        if len(weights) > FOLLOWERS:
            del weights[min(weights, key=weights.__getitem__)]

    def probs(self, pair: Pair) -> list[tuple[int, float]]:
        """Tokens and probabilities, the likeliest first, among equals the one seen last; [] for an unknown pair."""
        weights = self._own.get(pair) or self._base.get(pair) or {}
        total = sum(weights.values())
        ranked = sorted(reversed(list(weights.items())), key=lambda item: -item[1])
        return [(token, weight / total) for token, weight in ranked]


def trigrams_of(path: str, tokenizer: Any) -> Counts:
    """The tri-gram table of a file; kept, so that a request does not read the file again."""
    return _trigrams(path, stamp_of(path), tokenizer)


@lru_cache(maxsize=4)
def _trigrams(path: str, stamp: int, tokenizer: Any) -> Counts:
    if path.endswith(".bin"):
        return _static(path, None if tokenizer is None else len(tokenizer))
    return count(tokens_of(path, tokenizer, "corpus"))


def _static(path: str, vocab: int | None) -> Counts:
    """The pairs of an n-gram file of llama.cpp, whose format is that of its ngram-cache.cpp.

    Of each n-gram four int32 tokens, -1 where it is shorter, the int32 number of its followers, and of each its token
    and how often it came, int32 both. Of a static file all n-grams are pairs; others are passed over.

    Raises:
        ValueError: it is cut off, counts nothing, or has tokens that the tokenizer has not.
    """
    try:
        held = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"corpus is {path!r}, which cannot be read: {error}") from error
    raw = struct.unpack(f"<{len(held) // 4}i", held[: len(held) // 4 * 4])
    found, at = dict[Pair, dict[int, int]](), 0
    while at < len(raw):
        first, second, third, *_, followers = raw[at : at + 5] if at + 5 <= len(raw) else (0, 0, 0, 0, 0)
        at, body = at + 5, raw[at + 5 : at + 5 + 2 * max(followers, 0)]
        if followers < 1 or len(body) < 2 * followers or min(body[1::2]) < 1:
            raise ValueError(f"corpus is {path!r}, no n-gram file of llama.cpp: a record that ends at int32 {at} is "
                             "damaged; write it with llama-lookup-create, or give a text file")
        if vocab is not None and not -1 <= max(first, second, third, *body[::2]) < vocab:
            raise ValueError(f"corpus is {path!r}, whose tokens go beyond the tokenizer's {vocab}; "
                             "it was made with another model")
        if second >= 0 and third < 0:
            found[first, second] = dict(zip(body[::2], body[1::2], strict=True))
        at += 2 * followers
    return {pair: _shares(Counter(successors)) for pair, successors in found.items()}


def count(tokens: Sequence[int]) -> Counts:
    """The table of a corpus: for each pair its most frequent followers, with their shares."""
    counts = defaultdict[Pair, Counter[int]](Counter)
    for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
        counts[first, second][third] += 1
    return {pair: _shares(successors) for pair, successors in counts.items()}


def _shares(successors: Counter[int]) -> dict[int, float]:
    return {token: number / successors.total() for token, number in successors.most_common(FOLLOWERS)}


@dataclass(slots=True)
class Node:
    """A continuation.

    Attributes:
        pair: its last two tokens.
        path: its guesses.
        share: probability of its last token given the ones before; of the whole path in `best_first`.
        visits, reward: of the Monte-Carlo search.
        children: of the Monte-Carlo search, in the order of the distribution.
    """

    pair: Pair
    path: tuple[int, ...] = ()
    share: float = 1.0
    visits: int = 0
    reward: float = 0.0
    expanded: bool = False
    children: list[Node] = field(default_factory=list)

    def then(self, token: int, share: float) -> Node:
        """The continuation with one more token."""
        return Node((self.pair[1], token), (*self.path, token), share)


def best_first(probs: Distribution, pair: Pair, nodes: int, depth: int) -> TokenTree:
    """The `nodes` likeliest continuations of up to `depth` tokens; their beginnings are always among them."""

    def below(node: Node) -> Iterable[Node]:
        successors = probs(node.pair) if len(node.path) < depth else ()
        return (node.then(token, node.share * share) for token, share in successors)

    found = _ranked(Node(pair), below, lambda node: node.share)
    return merged(pair[1], (node.path for node in found), nodes)


def monte_carlo(probs: Distribution, pair: Pair, nodes: int, depth: int, iterations: int, key: str) -> TokenTree:
    """The most visited sequences of a Monte-Carlo tree search as one tree, with random numbers by `key`.

    Each iteration descends by PUCT to a node that is not yet expanded, expands it, rolls out by draws from the
    distribution and rewards the path with 1 plus the probabilities along it. As in the authors' code, a sequence goes
    on with its likeliest token. They take 24 sequences; here as many as give `nodes` guesses.
    """
    root = search(probs, pair, max(1, depth - 1), iterations, random.Random(key))
    found = _ranked(root, lambda node: [child for child in node.children if child.visits], lambda node: node.visits)
    return merged(pair[1], (_gone_on(probs, node, depth) for node in found), nodes)


def _gone_on(probs: Distribution, node: Node, depth: int) -> tuple[int, ...]:
    """A sequence of at most `depth` tokens, and the likeliest one after it if there is room."""
    likeliest = probs(node.pair)[:1] if len(node.path) < depth else ()
    return (*node.path, *(token for token, _ in likeliest))


def _ranked(root: Node, below: Callable[[Node], Iterable[Node]], value: Callable[[Node], float]) -> Iterator[Node]:
    """Continuations, the one of highest value first; a child never has more than its parent."""
    waiting, numbers, node = list[tuple[float, int, Node]](), itertools.count(), root
    while True:
        for child in below(node):
            heapq.heappush(waiting, (-value(child), next(numbers), child))
        if not waiting:
            return
        node = heapq.heappop(waiting)[-1]
        yield node


def merged(root: int, sequences: Iterable[tuple[int, ...]], nodes: int) -> TokenTree:
    """Sequences after `root` as one tree of at most `nodes` guesses: equal beginnings stand once, the first go first.

    The authors' code numbers tokens by depth alone, so that beginnings which differ may be taken for one.
    """
    below: dict[tuple[int, ...], list[tuple[int, ...]]] = {(): []}
    for beginning in (one[:end] for one in sequences for end in range(1, len(one) + 1)):
        if len(below) > nodes:
            break
        if beginning not in below:
            below[beginning] = []
            below[beginning[:-1]].append(beginning)
    grown, queue = Growth(root), deque[tuple[int, tuple[int, ...]]]([(0, ())])
    while queue:
        index, path = queue.popleft()
        queue.extend((grown.add(child[-1], index), child) for child in below[path])
    return grown.tree()


def search(probs: Distribution, pair: Pair, depth: int, iterations: int, numbers: random.Random) -> Node:
    """The searched tree; every iteration visits the root once."""
    root = Node(pair)
    for _ in range(iterations):
        path = [root]
        while path[-1].children:
            path.append(_chosen(path[-1]))
        leaf = path[-1]
        if len(leaf.path) < depth and not leaf.expanded:
            leaf.expanded = True
            leaf.children = [leaf.then(token, share) for token, share in probs(leaf.pair)]
        reward = 1 + sum(node.share for node in path[1:]) + _rollout(probs, leaf, depth, numbers)
        for node in path:
            node.visits += 1
            node.reward += reward
    return root


def _chosen(node: Node) -> Node:
    """The child of highest PUCT score."""
    explore = (_C1 + math.log((node.visits + _C2 + 1) / _C2)) * math.sqrt(node.visits)

    def score(child: Node) -> float:
        mean = child.reward / child.visits if child.visits else 0.0
        return mean + explore * child.share / (1 + child.visits)

    return max(node.children, key=score)


def _rollout(probs: Distribution, leaf: Node, depth: int, numbers: random.Random) -> float:
    """The probabilities along a path that is drawn from the distribution, summed."""
    pair, total = leaf.pair, 0.0
    for _ in range(len(leaf.path), depth):
        successors = probs(pair)
        if not successors:
            break
        token, share = numbers.choices(successors, [share for _, share in successors])[0]
        pair, total = (pair[1], token), total + share
    return total
