"""DEL: the exit layer and the draft length adapt to the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Proposer
from shoal.depth.plan import DepthPlan
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, LayerList, Number, Share
from shoal.speculative.draft import Draft, check_least, check_length, check_share
from shoal.speculative.per_sequence import PerSequence
from shoal.speculative.self_speculation import OwnLayersDrafter
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.cache import KVCache
    from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk


@dataclass(frozen=True)
class DEL(DraftingMethod):
    """The first layers draft; their number, and the number of tokens, is chosen for every block.

    Verification computes the states at every exit anyway. Final norm and LM head turn them into shadow tokens, the
    predictions of each exit. Compared with the target's tokens, they give every exit's acceptance rate and the
    confidence at which its drafts should stop. The block with most expected tokens per layer is drafted; a length of 0
    is a plain step. Shadow tokens cost a row of the LM head each. So not all exits are judged after every block as in
    the paper, but some in turn, and with them the one in use; an exit that was never judged does not draft. Models
    trained with an exit loss gain; on others early exits seldom agree with the full model.

    Attributes:
        exits: exit layers to choose from, each a number of layers in 1..L; None for 1..L-1, as in the paper.
        longest: most tokens to guess at a time.
        memory: factor by which old evidence fades per block, in [0, 1].
        window: last tokens of the prompt that are run again for first estimates (the paper takes 32); 0 starts with one
            guess from the first exit.
        head: cost of the LM head in layers; None for the model's own, 0 for the paper's formula.
        probe: while plain steps are best, one in this many is examined, so that drafting can begin again.
        judged: exits that are judged after a block.
    """

    name: ClassVar[str] = "del"
    paper: ClassVar[str] = "arXiv 2504.05598"

    exits: LayerList | None = None
    longest: Guesses = 18
    memory: Share = 0.95
    window: Guesses = 8
    head: Number | None = None
    probe: Guesses = 8
    judged: Guesses = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and not self.head >= 0:
            raise ValueError(f"head is {self.head}; it must be 0 layers or more, or None for the model's own")
        check_length(self.longest)
        check_share("memory", self.memory)
        check_least("window", self.window, 0)
        check_least("probe", self.probe, 1)
        check_least("judged", self.judged, 1)
        if self.exits is not None and (not self.exits or min(self.exits) < 1):
            raise ValueError(f"exits are {list(self.exits)}; at least one is needed, each at least 1 layer")

    @override
    def notice(self, info: ModelInfo) -> str | None:
        # Named exits are assumed to be trained.
        return self.unmeasured(info) if self.exits is None else None

    def recipe(self, info: ModelInfo) -> Recipe:
        """Drafts from a choice of prefixes.

        Raises:
            ValueError: the model has fewer layers than an exit.
        """
        num_layers = info.num_layers
        exits = self.exits or range(1, max(2, num_layers))
        if max(exits) > num_layers:
            raise ValueError(f"exits are {sorted(exits)}, but the model has {num_layers} layers; use 1..{num_layers}")
        head = info.head_layers if self.head is None else self.head
        return self.verified(DynamicExit(self, tuple(sorted(set(exits))), head), info)


@dataclass(frozen=True)
class DynamicExit(Proposer):
    """The first layers draft; how many, and how far, depends on the exits' predictions of verified tokens.

    Attributes:
        method: limits, and how to learn.
        exits: exit layers to choose from, as ascending numbers of layers.
        head: cost of the LM head in layers.
    """

    method: DEL
    exits: tuple[int, ...]
    head: float = 0.0

    def begin(self, runner: ModelRunner, cache: KVCache) -> DynamicDrafter:
        """A drafter on the target's own runner and cache."""
        return DynamicDrafter(self, runner, cache)


@dataclass
class Exit:
    """Statistics of one exit layer; old evidence fades by `memory` per look.

    Attributes:
        matches, looks: how often it predicted the target's token, and for how many tokens that is known. They start
            as one of two, a Beta(1, 1) prior.
        sure, unsure: its confidence where it was right and where it was wrong: (sum, count).
    """

    memory: float = 0.95
    matches: float = 1.0
    looks: float = 2.0
    sure: tuple[float, float] = (0.0, 0.0)
    unsure: tuple[float, float] = (0.0, 0.0)

    def learn(self, hits: Sequence[bool], confidences: Sequence[float]) -> None:
        """Learn from a verified block: for each of its tokens, whether the exit was right, and its confidence."""
        self.matches = self.memory * self.matches + sum(hits)
        self.looks = self.memory * self.looks + len(hits)
        right = [value for hit, value in zip(hits, confidences, strict=True) if hit]
        wrong = [value for hit, value in zip(hits, confidences, strict=True) if not hit]
        self.sure, self.unsure = self._faded(self.sure, right), self._faded(self.unsure, wrong)

    def _faded(self, old: tuple[float, float], new: Sequence[float]) -> tuple[float, float]:
        return self.memory * old[0] + sum(new), self.memory * old[1] + len(new)

    @property
    def rate(self) -> float:
        """Estimated share of its guesses that the target accepts."""
        return self.matches / self.looks

    @property
    def threshold(self) -> float:
        """Confidence halfway between right and wrong ones, below which a draft stops; 0 while either is unknown."""
        if not self.sure[1] or not self.unsure[1]:
            return 0.0
        return (self.sure[0] / self.sure[1] + self.unsure[0] / self.unsure[1]) / 2


def tokens_per_layer(rate: float, length: int, exit_layer: int, num_layers: int, head: float = 0.0) -> float:
    """Expected tokens of a block over the layers that it takes.

    A block of `length` guesses takes `length` forwards of `exit_layer` layers and one of all layers; if reading weights
    is the bottleneck, this holds whether or not verification starts from the exit's hidden states. With `head`, the
    cost of the LM head in layers, every forward counts that too; without, this is the paper's TPL.
    """
    tokens = sum(rate**j for j in range(length + 1))
    return tokens / (num_layers + head + length * (exit_layer + head))


def best_block(rates: Mapping[int, float], longest: int, num_layers: int, head: float = 0.0) -> tuple[int, int]:
    """The exit layer and the draft length with most tokens per layer; length 0 if a plain step is best.

    Args:
        rates: acceptance by exit layer (the number of layers that run).
        longest: most guesses.
        num_layers: L.
        head: as for `tokens_per_layer`.
    """
    choices = [(exit_layer, length) for length in range(longest + 1) for exit_layer in sorted(rates)]
    return max(choices, key=lambda one: tokens_per_layer(rates[one[0]], one[1], one[0], num_layers, head))


def spread(exits: Sequence[int]) -> list[int]:
    """The exits in an order whose beginnings lie evenly among them: places by their bits, the lowest bit first."""
    bits = max(1, (len(exits) - 1).bit_length())
    return sorted(exits, key=lambda one: f"{exits.index(one):0{bits}b}"[::-1])


@dataclass
class _State:
    """A sequence's exits, those that were judged so far, and its current choice."""

    exits: dict[int, Exit]
    judged: set[int] = field(default_factory=set)
    exit_layer: int = 0
    length: int = 0
    idle: int = 0


@dataclass(frozen=True)
class _Capture:
    """A sequence whose states were captured: its place among them, what was fed, and its number of tokens then."""

    seq: SequenceState
    place: int
    chunk: SequenceChunk
    tokens: int

    def path(self) -> tuple[list[int], list[int]]:
        """The accepted nodes, and the target's token after each of them."""
        after, parents = self.seq.tokens[self.tokens :], self.chunk.parents
        chain = TokenTree.chain(self.chunk.tokens)
        tree = chain if parents is None else TokenTree(chain.tokens, tuple(parents))
        nodes = [0]
        for token in after[:-1]:
            child = tree.child(nodes[-1], token)
            if child is None:
                break
            nodes.append(child)
        return nodes, after[: len(nodes)]


class DynamicDrafter(OwnLayersDrafter):
    """Drafts with a chosen exit. Every sequence has its own estimates."""

    def __init__(self, proposer: DynamicExit, runner: ModelRunner, cache: KVCache) -> None:
        from shoal_lab.drafts.agreement import repeatable, said, said_again

        super().__init__(runner, cache)
        self._repeatable, self._said_again, self._said = repeatable, said_again, said
        method, exits = self._method, self._exits = proposer.method, proposer.exits
        self._head = proposer.head
        self._states = PerSequence(lambda _: _State({exit_layer: Exit(method.memory) for exit_layer in exits}))
        self._captures: list[_Capture] = []
        self._hidden: dict[int, Tensor] = {}
        self._waiting, self._asked = spread(exits), tuple[int, ...]()

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """Learn from the previous block, then draft."""
        self._learn()
        for seq in seqs:
            if not self._states[seq].judged and self._method.window:
                self._look_back(seq)
        return super().propose(seqs, limits)

    def draft(self, seq: SequenceState, limit: int) -> Draft:
        """Draft as long and as deep as the estimates say; one guess from the first exit while there are none."""
        state = self._states[seq]
        if not state.judged:
            exit_layer, state.length = self._exits[0], 1
        else:
            rates = {exit_layer: state.exits[exit_layer].rate for exit_layer in state.judged}
            exit_layer, state.length = best_block(rates, self._method.longest, self.runner.num_layers, self._head)
        state.exit_layer = exit_layer
        state.idle = 0 if state.length else state.idle + 1
        above = range(exit_layer, self.runner.num_layers)
        plan = DepthPlan.skipping(self.runner.num_layers, above, above)
        return Draft(seq, plan, min(state.length, limit), state.exits[exit_layer].threshold)

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """Capture the states at every exit of drafting sequences, and sometimes of others."""
        if not seqs[0].emitted:  # a prompt's end is examined before the first draft
            return None
        self._hidden = {}
        self._captures = [
            _Capture(seq, place, chunk, len(seq.tokens))
            for place, (seq, chunk) in enumerate(zip(seqs, chunks, strict=True))
            if not seq.forced and self._states[seq].idle % self._method.probe == 0
        ]
        self._ask({self._states[one.seq].exit_layer for one in self._captures} - {0})
        return self._keep if self._captures else None

    def _ask(self, used: set[int]) -> None:
        """Judge the exits in use, and others in turn."""
        count = max(0, self._method.judged - len(used))
        chosen = [one for one in self._waiting if one not in used][:count]
        self._waiting = [one for one in self._waiting if one not in chosen] + chosen
        self._asked = tuple(sorted({*used, *chosen}))

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if layer in self._asked:
            self._hidden[layer] = hidden

    def _learn(self) -> None:
        """Learn from the states of the last forward, now that the accepted nodes are known."""
        alive = [one for one in self._captures if one.seq.finish_reason is None and len(one.seq.tokens) > one.tokens]
        self._captures = []
        if not alive:
            return
        paths = [one.path() for one in alive]
        places = [(one.place, nodes) for one, (nodes, _) in zip(alive, paths, strict=True)]
        states = [hidden[place, nodes] for place, nodes in places for hidden in self._hidden.values()]
        tokens, sure = self._said(self.runner, states)
        for one, (nodes, targets) in zip(alive, paths, strict=True):
            self._judge(one.seq, targets, tokens, sure)
            del tokens[: len(nodes) * len(self._hidden)], sure[: len(nodes) * len(self._hidden)]

    def _judge(self, seq: SequenceState, targets: Sequence[int], tokens: Sequence[int], sure: Sequence[float]) -> None:
        """Compare the predictions of each exit, exit after exit, with the target's tokens."""
        state, count = self._states[seq], len(targets)
        seq.ledger.heads_read += 1
        state.judged.update(self._hidden)
        for index, exit_layer in enumerate(self._hidden):
            span = slice(index * count, (index + 1) * count)
            hits = [said == meant for said, meant in zip(tokens[span], targets, strict=True)]
            state.exits[exit_layer].learn(hits, sure[span])

    def _look_back(self, seq: SequenceState) -> None:
        """Run the last tokens again for the exits' predictions of them."""
        count = min(self._method.window, self._repeatable(self.cache, seq.seq_id))
        if count < 1:
            return
        self._hidden = {}
        self._ask(set())
        targets = self._said_again(self.runner, self.cache, seq, count, self._keep)
        plan = seq.plan
        seq.ledger.draft_forwards += 1
        seq.ledger.draft_layer_tokens += count * plan.num_layers
        seq.ledger.read(plan.num_layers)
        states = [hidden[0, :count] for hidden in self._hidden.values()]
        self._judge(seq, targets, *self._said(self.runner, states))
