"""Sequences that share forwards: propose -> run -> accept -> commit -> emit. They come and go between steps.

A step is one forward in which some sequences verify their guesses and others read pieces of their prompts. Sequences
are independent of each other: they may have different prompts, plans, rules and lengths. What is here sees protocols
only; it knows no architecture and no paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shoal.decode.branches.run import SearchRun, score_forced
from shoal.decode.components import Components
from shoal.decode.ledger import Clock
from shoal.decode.prefixes import Prefixes
from shoal.decode.recipe import Loop
from shoal.decode.rules.accept import Outcome
from shoal.decode.running_sequence import RunningSequence
from shoal.decode.sequence import SequenceState
from shoal.decode.target import SequenceTarget
from shoal.decode.tree import TokenTree
from shoal.decode.worker import StepReport
from shoal.model.kv.cache import KVCache
from shoal.model.layers.pictures import Pictures
from shoal.model.runner import ModelRunner, SequenceChunk, split_wanted
from shoal.types import Step

_LEAST_SHARE = 4
"""Prompts share a forward if decoding leaves them at least 1/n of it, this being n; else they get their own."""

_MOST_SECONDS, _MOST_STEPS = 0.05, 8
"""Most seconds and most steps of a call that runs several: sequences join and leave between calls."""

_DOZE = 0.002
"""Longest wait, in seconds, of a step that has nothing to run because its searches wait for others."""


class Batch:
    """Sequences that run on one cache. A sequence that has emitted nothing reads its prompt; the others decode.

    A search may let branches rest, which do neither, and force tokens upon others, which these then read.

    Args:
        runner: the model.
        cache: the KV of the sequences, in the order of `seqs`; may hold the beginning of a sequence's prompt already.
            None for a cache of the batch's own, which lasts as long as it has sequences.
        seqs: the sequences to begin with, each with a token that is not in the cache; ended ones are left out.
        prefixes: keeps what sequences have stored for later sequences, which look it up there.
        release: whether a dropped layer's KV is freed at once; a sequence that is resumed later must keep it.

    Attributes:
        seqs: running sequences, in the order of their `seq_id`; the branches of a searched sequence stand in its place.
        clock: seconds spent.
        components: the workers of the sequences' recipes. They hear of a step before it is settled; what settling takes
            is told with the step after it.
    """

    def __init__(
        self, runner: ModelRunner, cache: KVCache | None = None, seqs: Sequence[RunningSequence] = (), *,
        prefixes: Prefixes | None = None, release: bool = True,
    ) -> None:
        self.runner, self.searches = runner, list[SearchRun]()
        self.seqs = [self._begun(seq) for seq in seqs if seq.finish_reason is None]
        self.cache = runner.new_cache(0) if cache is None else cache
        self.clock = Clock()
        self._owns_cache, self._release = cache is None, release
        self._prefixes = prefixes or Prefixes(0)
        self.components = Components(runner, self.cache)
        self._came = list(self.seqs)
        self._most_steps, self._settling = 1, 0.0
        for seq in self.seqs:
            self._set_store(seq)
        if len(self.seqs) < self.cache.seqs:
            self._renumber()

    @property
    def reading(self) -> list[RunningSequence]:
        """Sequences that have not yet read all of their prompt or of their forced tokens, in order of arrival."""
        return [seq for seq in self._came if self._reads(seq)]

    def join(self, seqs: Sequence[RunningSequence], slots: Sequence[Sequence[int]] | None = None) -> None:
        """Add sequences that have run nothing yet; add none if that fails.

        Args:
            slots: for each sequence, how many slots its layers may come to store, if known.
        """
        before = list(self.seqs), list(self._came), list(self.searches)
        try:
            self._join(seqs, slots)
        except BaseException:
            self.seqs, self._came, self.searches = before
            self._renumber()
            raise

    def _join(self, seqs: Sequence[RunningSequence], slots: Sequence[Sequence[int]] | None) -> None:
        first = self.cache.seqs
        self.cache.extend(len(seqs))
        for seq_id, seq in enumerate(seqs, start=first):
            seq.seq_id = seq_id
            self._set_store(seq, None if slots is None else slots[seq_id - first])
            self._take_over(seq)
            self._take([self._begun(seq)])

    def _take_over(self, seq: RunningSequence) -> None:
        """Take over what is kept of the beginning of a prompt, where it is more than was read of it."""
        if not seq.recipe.alters_kv:
            taken, seq.known = self._prefixes.fill(self.cache, seq.seq_id, seq.tokens, seq.salt)
            seq.cached = taken or seq.cached

    def _next_mark(self, seq: RunningSequence, first: int) -> int:
        """The next length of its prompt after `first` tokens of which a state is kept; 0 for none.

        It is where the prompt parts from what is known, or one of its marks.
        """
        if not self.cache.recurrent or seq.emitted:
            return 0
        return min((mark for mark in (seq.known, *seq.marks) if mark > first), default=0)

    def _set_store(self, seq: RunningSequence, slots: Sequence[int] | None = None) -> None:
        """Store the KV in the form that the recipe names, and let the sequence's adapter and source make it.

        KV in another form, or of another adapter or source, is dropped and computed again.
        """
        seq_id, store = seq.seq_id, seq.recipe.store
        self.cache.adapt(seq_id, seq.adapter)
        self.cache.attach(seq_id, seq.source)
        if seq.recipe.alters_kv or self.cache.has_store(seq_id):
            self.cache.truncate(seq_id, 0)
            self.cache.set_store(seq_id, store, slots)

    def fork(self, seq: RunningSequence, children: Sequence[RunningSequence]) -> None:
        """Add sequences that continue from the state of `seq`."""
        for child, seq_id in zip(children, self.cache.fork(seq.seq_id, len(children)), strict=True):
            child.seq_id = seq_id
        self.components.fork(seq, children)
        self._take(children)

    def _take(self, seqs: Sequence[RunningSequence]) -> None:
        self.seqs += seqs
        self._came += seqs

    def _begun(self, seq: RunningSequence) -> RunningSequence:
        """The sequence that decodes for `seq`: itself, or the first branch of its search."""
        if seq.recipe.search is None:
            return seq
        search = SearchRun(self, seq, seq.recipe.search)
        self.searches.append(search)
        return next(iter(search.branches.values()))

    def due(self, seq: SequenceState) -> int:
        """How many of the sequence's tokens are to be fed; a resting sequence holds its last one back."""
        return len(seq.tokens) - (seq.room == 0) - self.cache.positions[seq.seq_id]

    def _reads(self, seq: RunningSequence) -> bool:
        """Whether the sequence must be fed more than its last token and the tokens that its constraint forced."""
        if len(seq.tokens) == self.cache.positions[seq.seq_id] + 1 and seq.emitted:  # the usual case
            return False
        return self.due(seq) > (1 + seq.forced if seq.emitted > 0 and seq.room > 0 else 0)

    def leave(self, seqs: Sequence[SequenceState]) -> None:
        """Cancel sequences before their end and free what they stored."""
        for seq in seqs:
            seq.stop.finish_reason = seq.stop.finish_reason or "cancelled"
        for search in self.searches[:]:
            if search.root.finish_reason is not None:
                search.stop()
        self.retire()

    def step(self, budget: int, seqs: Sequence[SequenceState] | None = None, most: int | None = None) -> list[Step]:
        """Run one forward: the guesses of every decoding sequence, and pieces of prompts in what is left of `budget`.

        Earlier prompts come first and do not share with later ones; short prompts that fit together are read together.
        A sequence emits its first token when its prompt ends.

        Args:
            budget: most tokens of the forward, over all sequences; only guesses may exceed it. If guesses leave prompts
                too little, the prompts get a forward of their own.
            seqs: which, in the order of their `seq_id`; None for all. A searched sequence stands for its branches.
            most: most prompt tokens of a sequence; None for as many as fit.

        Raises:
            BaseException: from a component of a recipe, such as a search or a processor; call `rollback` then.
        """
        start = time.perf_counter()
        steps, running = self._search(seqs)
        reading, decoding = self._apart(running)
        if decoding and not reading and all([seq.plain and not seq.forced for seq in decoding]):
            steps += self._plain_steps(decoding)
            self.clock.decode_seconds += time.perf_counter() - start
            return steps
        if not (reading or decoding):
            for search in self.searches[: not steps]:
                search.doze(_DOZE)
            return steps
        trees = [tree if tree.is_chain else tree.within(self.runner.most_nodes) for tree in self.propose(decoding)]
        drafting = time.perf_counter() - start
        if not reading and (most := self._resting(decoding, trees)):
            steps += self._plain_steps(decoding, most, drafting)
            self.clock.draft_seconds += drafting
            self.clock.decode_seconds += time.perf_counter() - start
            return steps
        shares = [_guesses(seq, tree, self.due(seq) - 1) for seq, tree in zip(decoding, trees, strict=True)]
        if reading:
            left = budget - sum(len(share.chunk.tokens) for share in shares)
            if left * _LEAST_SHARE >= budget:
                shares = sorted([*shares, *self._pieces(reading, left, most)], key=lambda share: share.seq.seq_id)
                reading = []
        if shares:
            steps += self._forward(shares, drafting)
        if reading and (pieces := self._pieces(reading, budget, most)):  # made now: those that ended moved the others
            steps += self._forward(pieces)
        self.clock.draft_seconds += drafting
        self.clock.count(time.perf_counter() - start, decoding=bool(decoding))
        return steps

    def _resting(self, seqs: Sequence[RunningSequence], trees: Sequence[TokenTree]) -> int:
        """How many plain steps may follow, as nothing is guessed and no drafter need see them; 0 if one must."""
        if not all([len(tree) == 1 and seq.quiet and not seq.forced for seq, tree in zip(seqs, trees, strict=True)]):
            return 0
        return self.components.rest(seqs)

    def _plain_steps(
        self, seqs: Sequence[RunningSequence], most: int = _MOST_STEPS, drafting: float = 0.0
    ) -> list[Step]:
        """The usual step: every sequence takes the argmax token after its last one. The same as `_forward`, shorter.

        Where steps are fast, several follow one another in one call: between two calls the model streams through the
        processor's caches, so that Python's part takes longer than it would by itself. What ends a text ends the call.
        """
        start, steps = time.perf_counter(), list[Step]()
        chunks = [SequenceChunk(seq.seq_id, (seq.tokens[-1],), (seq.emitted,), seq.plan) for seq in seqs]
        most = min(most, self._most_steps, *[seq.stop.room if seq.stop.by_ids else 1 for seq in seqs])
        ends = frozenset[int]().union(*[seq.stop.ends for seq in seqs]) if most > 1 else ()
        found = self.runner.argmax_steps(chunks, self.cache, most, [*ends])
        ended, path = time.perf_counter(), range(len(found))
        seconds = (ended - start + self._settling) / len(found)
        if not all([seq.plain for seq in seqs]):
            roots = [TokenTree.root(seq.tokens[-1]) for seq in seqs]
            kept = [Outcome((0,), token) for token in found[0]]
            self.components.observe(seqs, StepReport(seqs, roots, kept, drafting, seconds, steps=len(found)))
        for seq, *tokens in zip(seqs, *found, strict=True):
            for place in path:
                seq.ledger.count(seq.plan.depth(seq.emitted + place))
            steps += seq.emit(tokens)
            self.commit(seq, path)
        self.retire()
        now = time.perf_counter()
        self._settling, fitting = now - ended, int(_MOST_SECONDS * len(found) / (now - start))
        self._most_steps = max(1, min(_MOST_STEPS, fitting))
        return steps

    def _apart(self, seqs: Sequence[RunningSequence]) -> tuple[list[RunningSequence], list[RunningSequence]]:
        """Sequences that read and those that decode, none that rest. Raises the error of one whose KV failed."""
        reading, decoding = list[RunningSequence](), list[RunningSequence]()
        for seq in seqs:
            if seq.error is not None:
                raise seq.error
            if self._reads(seq):
                reading.append(seq)
            elif seq.room:
                decoding.append(seq)
        return reading, decoding

    def _search(self, seqs: Sequence[SequenceState] | None) -> tuple[list[Step], list[RunningSequence]]:
        """Advance all searches, or those of `seqs`; return what they emit and the sequences that may run now."""
        chosen = None if seqs is None else set(seqs)
        if not self.searches:
            return [], self.seqs if chosen is None else [seq for seq in self.seqs if seq in chosen]
        steps = [step for search in self.searches[:] if chosen is None or search.among(chosen)
                 for step in search.go_on()]
        return steps, [seq for seq in self.seqs if chosen is None or seq in chosen or seq.root in chosen]

    def rollback(self) -> None:
        """Drop the unfinished state that a failed forward has left.

        Sequences that it had reached have advanced; the others can run again. A sequence whose KV was left half
        rewritten fails in its next step too.
        """
        for seq in self.seqs:
            self.cache.rollback(seq.seq_id)

    def close(self) -> None:
        """End all sequences where they are. The cache then holds committed tokens, and the first branch of a search."""
        self.rollback()
        for search in self.searches[:]:
            search.stop(left=1)
        for seq in self.seqs:
            seq.note_bytes(self.cache.seq_bytes(seq.seq_id))

    def _pieces(self, seqs: Sequence[RunningSequence], budget: int, most: int | None) -> list[_Share]:
        """How much of its prompt each sequence reads, in the order of their `seq_id`."""
        pieces: list[_Share] = []
        for seq in self.reading:
            if seq in seqs and budget > 0:
                if not seq.emitted and seq.recipe.loop is None and not (
                        seq.recipe.has_workers and seq.ledger.prefill_tokens):  # workers have seen what was read
                    self._take_over(seq)  # one that came with it may have read more by now
                first = self.cache.positions[seq.seq_id]
                due = self.due(seq)
                if not due:  # all that is wanted for now was taken over
                    continue
                size = self.piece(due, min(due, budget, most or budget, self.components.ahead(seq, first) or budget))
                mark = self._next_mark(seq, first)
                if mark:
                    size = min(size, mark - first)
                pieces.append(_piece(seq, first, size))
                budget -= len(pieces[-1].chunk.tokens)
        return sorted(pieces, key=lambda share: share.seq.seq_id)

    def piece(self, due: int, size: int) -> int:
        """How many of its unread tokens a sequence reads in a forward that has room for `size` of them."""
        return size

    def _forward(self, shares: Sequence[_Share], draft_seconds: float = 0.0) -> list[Step]:
        """Run the shares of some sequences, accept where a token follows, and commit."""
        start = time.perf_counter()
        chunks = [share.chunk for share in shares]
        seqs = [share.seq for share in shares]
        working = any(seq.recipe.has_workers for seq in seqs)
        watched = self.components.watch(seqs, chunks) if working else ()
        fed: Sequence[SequenceChunk] = chunks
        if working:
            fed = self.components.with_hooks(seqs, self.components.fitted(seqs, chunks))
            fed = self.components.with_experts(seqs, fed)
        run: Any = self.runner.argmax if all([share.argmax for share in shares]) else self.runner.forward
        logits = split_wanted(run(fed, self.cache, *watched), chunks)
        ended: list[tuple[_Share, SequenceTarget]] = []
        layers = self.runner.num_layers if watched else self.runner.prompt_layers
        for share, values in zip(shares, logits, strict=True):
            share.count(layers)
            share.seq.forced = 0
            if share.forced:
                score_forced(share.seq, self.cache.positions[share.seq.seq_id], values)
            if share.tree is None:
                self.commit(share.seq, range(len(share.chunk.tokens)))
                if self.cache.positions[share.seq.seq_id] in (share.seq.known, *share.seq.marks):
                    self.cache.mark(share.seq.seq_id)
            else:
                ended.append((share, SequenceTarget(share.seq, share.tree, values)))
        outcomes = self.judge_all([(share.seq, target, len(share.chunk.tokens)) for share, target in ended])
        if working:
            mixed = len({share.guesses for share in shares}) > 1
            seconds = time.perf_counter() - start + self._settling
            self._tell(ended, outcomes, draft_seconds, None if mixed else seconds)
        start = time.perf_counter()
        steps = self.settle(ended, outcomes)
        if all([share.guesses for share in shares]):
            self._settling = time.perf_counter() - start
        return steps

    def propose(self, seqs: Sequence[RunningSequence]) -> list[TokenTree]:
        """What each decoding sequence is fed: its last token and the guesses that follow it."""
        return self.components.propose(seqs)

    def judge_all(self, seqs: Sequence[tuple[RunningSequence, SequenceTarget, int]]) -> list[Outcome]:
        """The outcome of each tree whose sequence emits now, and how many uncommitted tokens the sequence holds."""
        return [self.judge(seq, target) for seq, target, _ in seqs]

    def judge(self, seq: RunningSequence, target: SequenceTarget) -> Outcome:
        """The outcome of a sequence's tree, which is its last token alone when it has just read its prompt."""
        return seq.rule.walk(target.tree, target)

    def _tell(
        self, ended: Sequence[tuple[_Share, SequenceTarget]], outcomes: Sequence[Outcome], drafting: float,
        target: float | None,
    ) -> None:
        """Report to the workers which prompts ended and which sequences decoded."""
        told = [(share.guesses, share.seq, found.tree, outcome)
                for (share, found), outcome in zip(ended, outcomes, strict=True)]
        for guesses in (False, True):
            some = [item[1:] for item in told if item[0] == guesses]
            if some:
                seqs, trees, kept = zip(*some, strict=True)
                report = StepReport(seqs, trees, kept, drafting if guesses else 0.0, target, not guesses)
                self.components.observe(seqs, report)

    def settle(self, ended: Sequence[tuple[_Share, SequenceTarget]], outcomes: Sequence[Outcome]) -> list[Step]:
        """Commit and emit what was accepted; a loop that emits otherwise overrides this."""
        steps: list[Step] = []
        for (share, target), outcome in zip(ended, outcomes, strict=True):
            emitted = _emit(share.seq, target, outcome)
            first, kept = share.before, outcome.path[: len(emitted)]
            self.commit(share.seq, [*range(first), *(first + node for node in kept)] if first else kept)
            if share.seq.allowed is not None:
                emitted += share.seq.force()
            if share.seq.root is None:
                steps += emitted
            else:
                share.seq.ledger.searched += len(emitted)
        self.retire()
        return steps

    def commit(self, seq: RunningSequence, path: Sequence[int]) -> None:
        """Commit the nodes of `path`, and let the sequence's `keep` rewrite its KV where that is due."""
        before = self.cache.positions[seq.seq_id]
        self.cache.commit(seq.seq_id, path)
        if not seq.recipe.alters_kv:
            return
        self.cache.mark_shallow(seq.seq_id, before)
        try:
            self.components.rewrite(seq, before)
        except BaseException as error:
            seq.error = error
            raise
        select, now = seq.recipe.select, self.cache.positions[seq.seq_id]
        if select is not None and select.corrects is not None and seq.finish_reason is None:
            first = max(seq.prompt_length, seq.again, select.most_read)  # up to so many slots, queries read all
            if now - first >= select.corrects:
                seq.again = now
                self.cache.cut(seq.seq_id, first)

    def retire(self) -> None:
        """Free layers that sequences will not run again, keep prefixes for later prompts, remove finished sequences."""
        done: list[RunningSequence] = []
        for seq in self.seqs:
            fed, leaves = self.cache.positions[seq.seq_id] - seq.prompt_length, seq.leaves
            given_up = seq.root is not None and seq.finish_reason == "cancelled"
            if fed == 0 and seq.emitted:
                self.cache.mark(seq.seq_id)  # the next turn of a chat begins with this prompt
            if (leaves and not given_up) or (fed == 0 and seq.emitted):  # beyond its prompt a plan may give layers up
                self._prefixes.keep(self.cache, seq.seq_id, seq.tokens, seq.salt)
            if leaves:
                seq.note_bytes(self.cache.seq_bytes(seq.seq_id))
                if seq.plan.copies and not self._release:
                    self.cache.copy_up(seq.seq_id)
                done.append(seq)
            elif self._release and not seq.drafts:
                self.cache.release(seq.seq_id, seq.plan.dropped(max(0, fed + 1)))
        if done:
            self._came = [seq for seq in self._came if seq not in done]
            self.seqs = [seq for seq in self.seqs if seq not in done]
            self.components.end(done)
            self.components.forget_all_but(self.seqs)
            if self.seqs or self._owns_cache:
                self._renumber()

    def _renumber(self) -> None:
        """Drop from the cache everything that no longer runs."""
        seqs = {seq.seq_id: seq for seq in self.seqs}
        self.seqs = [seqs[former] for former in self.cache.select(seqs.keys())]
        for seq_id, seq in enumerate(self.seqs):
            seq.seq_id = seq_id


def begin(
    loop: Loop | None, runner: ModelRunner, cache: KVCache | None = None, seqs: Sequence[RunningSequence] = (), *,
    prefixes: Prefixes | None = None, release: bool = True,
) -> Batch:
    """A batch for sequences of that loop; None is the plain loop. The arguments are those of `Batch`."""
    make: Callable[..., Batch] = Batch if loop is None else loop.batch()
    return make(runner, cache, seqs, prefixes=prefixes, release=release)


def run(batch: Batch, budget: int, most: int = 2048) -> Generator[list[Step], None, None]:
    """Yield what every step emits until all sequences have ended, with `budget` tokens of a forward, `most` of each.

    All prompts are read first, so that sequences decode side by side: sequences at the same step run the same layers.
    If the caller leaves early, the cache holds committed tokens only.
    """
    try:
        while batch.seqs:
            yield batch.step(budget, batch.reading or None, most)
    finally:
        batch.close()


@dataclass(slots=True)
class _Share:
    """A sequence's share of a forward.

    Attributes:
        tree: the tokens that are judged; None for a piece that does not end its prompt.
        before: prompt tokens or forced tokens ahead of the tree.
    """

    seq: RunningSequence
    chunk: SequenceChunk
    tree: TokenTree | None
    before: int = 0

    @property
    def guesses(self) -> bool:
        """Whether the sequence decodes."""
        return self.seq.emitted > 0

    @property
    def forced(self) -> bool:
        """Whether some of the tokens were forced upon the sequence by a search."""
        return (self.tree is None or self.chunk.wanted > len(self.tree)) and self.guesses

    @property
    def argmax(self) -> bool:
        """Whether only the argmax tokens of its logits are needed."""
        return self.seq.takes_argmax and not self.forced

    def count(self, layers: float) -> None:
        """Note the work in the sequence's ledger.

        Args:
            layers: how many of them, from the first on, ran on tokens whose logits nobody wanted.
        """
        ledger, plan, size = self.seq.ledger, self.chunk.plan, len(self.chunk.tokens)
        unread = self.chunk.with_ids - self.chunk.wanted if layers < plan.num_layers else 0
        if not self.guesses:
            ledger.target_forwards += 1
            ledger.prefill_forwards += 1
            ledger.prefill_tokens += size
            ledger.prefill_layer_tokens += size * plan.num_layers - unread * (plan.num_layers - layers)
            return
        if self.tree is not None and len(self.tree) > 1:
            ledger.drafted += len(self.tree) - 1
            ledger.drafted_at.update(range(1, self.tree.depths[-1] + 1))
        steps = self.chunk.steps
        ledger.count(*(plan.depth_in(layers, step) for step in steps[:unread]), *plan.depths(steps[unread:]))


def _guesses(seq: RunningSequence, tree: TokenTree, before: int) -> _Share:
    """A sequence's last token with its guesses; a chain where tokens before it came without a forward."""
    tokens, emitted = (*seq.tokens[-1 - before : -1], *tree.tokens), seq.emitted
    steps = [emitted + depth for depth in (*range(-before, 0), *tree.depths)]
    parents, depths = (None, None) if tree.is_chain else (tree.parents, tree.depths)
    vectors = tree.vectors
    if vectors is not None:
        parents, depths = tree.fed
        tokens = (*tokens, *tokens[-1:] * len(vectors))
        steps = list(accumulate((emitted + depth for depth in depths), max))  # they may not fall
    chunk = SequenceChunk(seq.seq_id, tokens, steps, seq.plan, parents, depths, wanted=len(tree),
                          vectors=vectors)
    return _Share(seq, chunk, tree, before)


def _piece(seq: RunningSequence, first: int, size: int) -> _Share:
    """At most `size` tokens of a sequence's prompt or of its forced tokens, from position `first` on."""
    size, mutual = seq.source.piece(first, size) if isinstance(seq.source, Pictures) else (size, False)
    tokens, ends = seq.tokens[first : first + size], first + size == len(seq.tokens)
    tree = TokenTree.chain(tokens[-1:]) if ends else None
    steps = [max(0, place + 1 - seq.prompt_length) for place in range(first, first + size)]
    wanted = size if seq.emitted and first >= seq.again else int(ends)
    chunk = SequenceChunk(seq.seq_id, tokens, steps, seq.plan, wanted=wanted, mutual=mutual)
    return _Share(seq, chunk, tree, size - 1)


def _emit(seq: RunningSequence, target: SequenceTarget, outcome: Outcome) -> list[Step]:
    """Advance the sequence by an outcome; return its steps, cut where the sequence ends."""
    tokens = [target.tree.tokens[node] for node in outcome.path[1:]] + [outcome.token]
    if seq.record is not None:
        for node in outcome.path:
            seq.record(target.logits(node), target.scores(node))
    guessed = len(outcome.path) - 1
    steps = seq.emit(tokens, guessed, lambda offset, token: target.logprob(outcome.path[offset], token))
    if guessed:
        kept = min(len(steps), guessed)
        seq.ledger.accepted += kept
        seq.ledger.accepted_at.update(range(1, kept + 1))
    return steps
