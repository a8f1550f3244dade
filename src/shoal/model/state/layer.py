"""The states of one recurrent layer, and its keys and values if it has attention as well.

A state cannot be cut back as keys and values can. So a forward leaves the committed state alone. It starts from it and
keeps, for each *run* of nodes that follow one another, the state after the last one and a way to the states before. A
commit takes the state after the accepted path; a rollback forgets. States are never changed, so sequences share them,
and a snapshot of an earlier length costs its memory and no time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from shoal.model.kv.layer import KVLayer


class State(ABC):
    """What a layer remembers of one sequence. Never changed; only the executor that made it knows what is in it."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its tensors."""


def state_bytes(states: Mapping[int, State]) -> int:
    """Bytes of states by length."""
    return sum(state.nbytes for state in states.values())


MOST_SNAPSHOTS = 8
"""Of one sequence; older ones go."""


@dataclass(frozen=True, slots=True)
class Run:
    """Nodes that follow one another, as a forward has computed them.

    Attributes:
        first, last: the nodes are first..last-1.
        end: the state after node last-1.
        after: computes the state after the first n nodes once more, 0 < n < last - first.
    """

    first: int
    last: int
    end: State
    after: Callable[[int], State]


class StateLayer(KVLayer):
    """One recurrent layer.

    Attributes:
        states: committed state of each sequence; None before its first token, and once it was released.
        snapshots: per sequence, the state by length, for lengths to which decoding can go back.
    """

    __slots__ = ("_runs", "snapshots", "states")

    def __init__(self, seqs: int, window: int | None = None, reserve: int = 0) -> None:
        super().__init__(seqs, window, reserve)
        self.states: list[State | None] = [None] * seqs
        self.snapshots: list[dict[int, State]] = [{} for _ in range(seqs)]
        self._runs: list[list[Run]] = [[] for _ in range(seqs)]

    def after(self, seq: int, node: int) -> State | None:
        """The state after a scratch node; the committed one for node -1."""
        if node < 0:
            return self.states[seq]
        run = next((run for run in reversed(self._runs[seq]) if run.first <= node < run.last), None)
        if run is None:
            raise RuntimeError(f"the state after node {node} of sequence {seq} is not known: the layer has not run it")
        return run.end if node == run.last - 1 else run.after(node + 1 - run.first)

    def hold(self, seq: int, run: Run) -> None:
        """Keep what a forward computed for nodes that follow those in scratch."""
        self._runs[seq].append(run)
        self.scratch[seq] = run.last

    def accept(self, seq: int, path: Sequence[int]) -> None:
        """Take the state after the nodes of `path` that the layer has run; called before lengths and slots change."""
        ran = [node for node in path if node < self.scratch[seq]]
        if ran:
            self.states[seq] = self.after(seq, ran[-1])
        self._runs[seq].clear()

    def mark(self, seq: int) -> None:
        """Keep a snapshot of the committed state."""
        state, own = self.states[seq], self.snapshots[seq]
        if state is not None:
            own[self.lengths[seq]] = state
            if len(own) > MOST_SNAPSHOTS:
                del own[min(own)]

    def known(self, seq: int) -> dict[int, State]:
        """The states of the sequence by length: its snapshots and the committed one."""
        state = self.states[seq]
        return self.snapshots[seq] | ({} if state is None else {self.lengths[seq]: state})

    @override
    def restorable(self, seq: int, length: int) -> bool:
        return super().restorable(seq, length) and (length == 0 or length in self.known(seq))

    @override
    def truncate(self, seq: int, length: int) -> None:
        known = self.known(seq)
        super().truncate(seq, length)
        self.states[seq] = known.get(length)
        self.snapshots[seq] = {at: state for at, state in self.snapshots[seq].items() if at <= length}
        self._runs[seq].clear()

    @override
    def select(self, order: Sequence[int]) -> None:
        super().select(order)
        self.states = [self.states[seq] for seq in order]
        self.snapshots = [self.snapshots[seq] for seq in order]
        self._runs = [self._runs[seq] for seq in order]

    @override
    def extend(self, seqs: int, max_seqs: int) -> None:
        super().extend(seqs, max_seqs)
        self.states.extend([None] * seqs)
        self.snapshots.extend({} for _ in range(seqs))
        self._runs.extend([] for _ in range(seqs))

    @override
    def fork(self, seq: int, to: int) -> None:
        super().fork(seq, to)
        self.states[to], self.snapshots[to] = self.states[seq], dict(self.snapshots[seq])

    @override
    def release(self, seq: int) -> None:
        super().release(seq)
        self.states[seq] = None
        self.snapshots[seq] = {}
        self._runs[seq].clear()

    @override
    def seq_bytes(self, seq: int) -> int:
        return super().seq_bytes(seq) + state_bytes(self.known(seq))

    @override
    def kept_bytes(self, seq: int) -> int:
        return super().kept_bytes(seq) + state_bytes(self.known(seq))

    @property
    @override
    def allocated(self) -> int:
        seqs = range(0 if self.paged else len(self.states))
        return super().allocated + sum(state_bytes(self.known(seq)) for seq in seqs)
