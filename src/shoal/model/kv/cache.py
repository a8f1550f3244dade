"""A KV cache with a length of its own for every layer and sequence, and copies of what a sequence has stored.

Lengths count positions. A sequence that joins takes a free place; when one leaves, only the last sequence is moved
into its place. Places and slots grow geometrically. The cache knows nothing of tokens, plans or models;
`shoal.model.kv.layer` has one layer of it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from weakref import WeakSet

from torch import Tensor

from shoal.model.kv.form import GROWTH, Store
from shoal.model.kv.layer import ENDLESS, KVLayer, oldest_seen
from shoal.model.kv.lent import LentSlots
from shoal.model.kv.memory import clear, together
from shoal.model.kv.passing import PassingLayer
from shoal.model.layers.cross_attention import Encoded
from shoal.model.layers.pictures import Pictures
from shoal.model.lora.adapter import FittedAdapter
from shoal.model.state.layer import State, StateLayer, state_bytes


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of a cache.

    Attributes:
        allocated: bytes that the storage takes; see `shoal.model.kv.memory`.
        used: bytes of the stored positions, summed over layers and sequences.
        saved: bytes that dropped and released layers do not store, compared with every layer storing every position.
    """

    allocated: int
    used: int
    saved: int

    def __add__(self, other: KVBytes) -> KVBytes:
        return KVBytes(self.allocated + other.allocated, self.used + other.used, self.saved + other.saved)


class KVCache:
    """The KV of a batch of sequences.

    Attributes:
        layers: one `KVLayer` per decoder layer; a `StateLayer` for a recurrent one.
        positions: committed positions of each sequence, whichever layers ran them.
        most_seqs: most sequences to make room for ahead; if free places take no memory, all are allocated at once.
        lends: whether the executor reads slots where they are kept for several sequences, see `LentSlots`.
        shifts: of each sequence, by how much its next token is turned less than its position says, since what it stores
            was turned back by that.
        adapters: of each sequence, what runs beside the model on all of its tokens, or None.
        encoded: of each sequence, what an encoder made of its source, or None.
        adapted: whether some sequence has one.

    Args:
        windows: sliding window of each layer, or None.
        reserve: positions per layer for which memory is allocated at once; it grows on demand.
        recurrent: numbers of the layers that keep a state.
        passing: numbers of the layers that keep nothing.
    """

    def __init__(
        self, windows: Sequence[int | None], seqs: int, reserve: Sequence[int] | None = None,
        recurrent: Container[int] = (), passing: Container[int] = (),
    ) -> None:
        sizes = enumerate(zip(windows, reserve or [0] * len(windows), strict=True))
        self.layers: list[KVLayer] = [
            (StateLayer if number in recurrent else PassingLayer if number in passing else KVLayer)(seqs, *size)
            for number, size in sizes]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.positions = [0] * seqs
        self.most_seqs, self.lends = ENDLESS, False
        self._marks: list[int | None] = [None] * seqs
        self.shifts = [0] * seqs
        self.adapters: list[FittedAdapter | None] = [None] * seqs
        self.encoded: list[Encoded | Pictures | None] = [None] * seqs
        self.adapted = False

    @property
    def seqs(self) -> int:
        """Number of sequences."""
        return len(self.positions)

    @property
    def max_seqs(self) -> int:
        """Number of sequences that the storage has room for."""
        return self.layers[0].max_seqs

    def set_store(self, seq: int, store: Store | None, reserve: Sequence[int] | None = None) -> None:
        """Set the form in which an empty sequence is stored.

        Args:
            store: the forms by layer; None for the form of the cache.
            reserve: slots per layer for which room in that form is allocated at once.
        """
        for number, layer in enumerate(self.layers):
            layer.set_form(seq, None if store is None else store.form(number), reserve[number] if reserve else 0)

    def adapt(self, seq: int, adapter: FittedAdapter | None) -> None:
        """Set a sequence's adapter; what another one has stored of it is forgotten."""
        if self.adapters[seq] is not adapter:
            self.truncate(seq, 0)
            self.adapters[seq] = adapter
            self._note_adapters()

    def attach(self, seq: int, encoded: Encoded | Pictures | None) -> None:
        """Set what a sequence reads of a source; what was stored beside another one that it attends to is forgotten."""
        former = self.encoded[seq]
        if former is not encoded and (isinstance(former, Encoded) or isinstance(encoded, Encoded)):
            self.truncate(seq, 0)
        self.encoded[seq] = encoded

    def _note_adapters(self) -> None:
        self.adapted = any(adapter is not None for adapter in self.adapters)

    def has_store(self, seq: int) -> bool:
        """Whether some layer stores the sequence in a form of its own."""
        return any(layer.encoded[seq] or layer.settled[seq] for layer in self.layers)

    def mark_shallow(self, seq: int, position: int) -> None:
        """Note that `position` of `seq` did not run every sublayer on all of the KV, as the model itself would."""
        mark = self._marks[seq]
        self._marks[seq] = position if mark is None else min(mark, position)

    def first_shallow(self, seq: int) -> int:
        """The first committed position that was marked shallow; the sequence's length if there is none."""
        mark = self._marks[seq]
        return self.positions[seq] if mark is None else min(mark, self.positions[seq])

    def commit(self, seq: int, path: Sequence[int]) -> None:
        """Commit the nodes of `path` in every layer that ran them."""
        count, straight = len(path), not path or path[-1] == len(path) - 1
        for state in self.recurrent:
            state.accept(seq, path)
        for layer in self.layers:
            if straight and layer.scratch[seq] == count:  # the usual case, in which a step has no time for a call
                layer.lengths[seq] += count
                layer.scratch[seq] = 0
            elif straight:
                layer.keep(seq, count)
            else:
                layer.commit(seq, path)
        self.positions[seq] += count
        self._forget_marks(seq)

    def mark(self, seq: int) -> None:
        """Let decoding go back to the sequence's present length, which recurrent layers need a snapshot for."""
        for state in self.recurrent:
            state.mark(seq)

    def rollback(self, seq: int) -> None:
        """Forget the sequence's scratch entries."""
        for state in self.recurrent:
            state.accept(seq, ())
        for layer in self.layers:
            if layer.scratch[seq]:
                layer.keep(seq, 0)
        self._forget_marks(seq)

    def _forget_marks(self, seq: int) -> None:
        """Drop the mark of a position that was not kept."""
        mark = self._marks[seq]
        if mark is not None and mark >= self.positions[seq]:
            self._marks[seq] = None

    def truncate(self, seq: int, length: int) -> int:
        """Forget every position from `length` on, and every shallow one.

        Returns:
            The number of positions left: `length`, fewer if a layer was shallow, or 0 if a layer has released what it
            would need, its window has moved past it, or it has no state of that length. The rest must be run again at
            full depth.
        """
        most = min(length, self.first_shallow(seq))
        lengths = {most, *(at for state in self.recurrent for at in state.snapshots[seq] if at < most)}
        fit = (at for at in lengths if all(layer.restorable(seq, at) for layer in self.layers))
        keep = max(fit, default=0)
        for layer in self.layers:
            layer.truncate(seq, keep)
        self.positions[seq], self._marks[seq] = keep, None
        self.shifts[seq] = self.shifts[seq] if keep else 0
        return keep

    def cut(self, seq: int, length: int) -> None:
        """Forget the positions from `length` on, which are to be run again; every layer must have stored all others."""
        for layer in self.layers:
            layer.truncate(seq, length)
        self.positions[seq] = length
        self._forget_marks(seq)

    def copy_up(self, seq: int) -> None:
        """Copy to each layer what it lacks of a sequence from the layer below, as if it had run all positions.

        So a position's copy is of the nearest layer below that ran it. Layer 0 must have run all of them.
        """
        for below, layer in zip(self.layers, self.layers[1:], strict=False):
            missing = self.positions[seq] - layer.lengths[seq]
            if missing > 0 and below.keys is not None:
                keys, values = below.parts(seq, below.stored(seq), below.keys.dtype)
                layer.append(keys[None, :, -missing:], values[None, :, -missing:], [seq], [missing])
                layer.keep(seq, missing)
        self._marks[seq] = None

    def select(self, seqs: Collection[int]) -> list[int]:
        """Keep `seqs`, those beyond the new end in the places of dropped ones; returns each one's former number.

        With the last sequence the storage is freed.
        """
        beyond = sorted(seq for seq in seqs if seq >= len(seqs))
        order = [seq if seq in seqs else beyond.pop() for seq in range(len(seqs))]
        for layer in self.layers:
            layer.select(order)
        self.positions = [self.positions[seq] for seq in order]
        self._marks = [self._marks[seq] for seq in order]
        self.shifts = [self.shifts[seq] for seq in order]
        self.adapters = [self.adapters[seq] for seq in order]
        self.encoded = [self.encoded[seq] for seq in order]
        self._note_adapters()
        return order

    def extend(self, seqs: int) -> None:
        """Add empty sequences after the others."""
        max_seqs, needed = self.max_seqs, self.seqs + seqs
        if needed > max_seqs:
            free = any(layer.paged for layer in self.layers) and self.most_seqs < ENDLESS
            max_seqs = max(needed, self.most_seqs if free else min(int(max_seqs * GROWTH), self.most_seqs))
        for layer in self.layers:
            layer.extend(seqs, max_seqs)
        self.positions.extend([0] * seqs)
        self._marks.extend([None] * seqs)
        self.shifts.extend([0] * seqs)
        self.adapters.extend([None] * seqs)
        self.encoded.extend([None] * seqs)

    def fork(self, seq: int, count: int) -> range:
        """Add sequences that are exact copies of what `seq` has committed; returns their numbers."""
        copies = range(self.seqs, self.seqs + count)
        self.extend(count)
        for new in copies:
            self.positions[new], self._marks[new] = self.positions[seq], self._marks[seq]
            self.adapters[new], self.encoded[new] = self.adapters[seq], self.encoded[seq]
            self.shifts[new] = self.shifts[seq]
            for layer in self.layers:
                layer.fork(seq, new)
        return copies

    def release(self, seq: int, layers: Sequence[int]) -> None:
        """Free what `layers` store of a sequence that will not run them again."""
        for layer in layers:
            self.layers[layer].release(seq)

    def seq_bytes(self, seq: int) -> KVBytes:
        """Bytes allocated for, used and saved by one sequence."""
        allocated = used = saved = 0
        for layer in self.layers:
            position = self.positions[seq]
            wanted = position if layer.window is None else min(position, layer.window - 1)
            kept = layer.kept_bytes(seq)
            allocated += layer.seq_bytes(seq)
            used += kept
            saved += max(0, wanted * layer.bytes_per_position - kept)
        return KVBytes(allocated, used, saved)

    def bytes(self) -> KVBytes:
        """Bytes of all sequences."""
        seqs = [self.seq_bytes(seq) for seq in range(self.seqs)]
        return KVBytes(sum(one.allocated for one in self.layers), sum(r.used for r in seqs), sum(r.saved for r in seqs))


@dataclass(frozen=True)
class LayerCopy:
    """What one layer stores of some consecutive positions of a sequence.

    Attributes:
        keys, values: [heads, positions, head_dim], from position `start` on; None for a layer without attention.
        start: not before the first of these positions.
        window: sliding window in positions, or None.
        states: of a recurrent layer, by length; None for another layer.
    """

    keys: Tensor | None
    values: Tensor | None
    start: int
    window: int | None
    states: Mapping[int, State] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return state_bytes(self.states or {}) + sum(one.nbytes for one in self.stores)

    @property
    def stores(self) -> list[Tensor]:
        """Keys and values, if it has any."""
        return [one for one in (self.keys, self.values) if one is not None]

    def moved(self, stores: Sequence[Tensor]) -> LayerCopy:
        """A copy of keys and values in `stores`; states never change, so they are shared."""
        for to, one in zip(stores, self.stores, strict=True):
            to.copy_(one)
        return replace(self, keys=stores[0], values=stores[1]) if stores else self

    def cut(self, first: int, last: int) -> LayerCopy:
        """What is stored of positions first..last-1, as views, and the states after each of them."""
        start = min(max(first, self.start), last)
        low, high = max(0, start - self.start), max(0, last - self.start)
        keys, values = (None if one is None else one[:, low:high] for one in (self.keys, self.values))
        states = None if self.states is None else self.states_in(first, last)
        return replace(self, keys=keys, values=values, start=start, states=states)

    def states_in(self, first: int, last: int) -> dict[int, State]:
        """The states after positions first..last-1."""
        return {at: state for at, state in (self.states or {}).items() if first < at <= last}


@dataclass(frozen=True)
class SequenceCopy:
    """Positions first..last-1 of a sequence, all of which ran every layer. A piece of one stores its last ones.

    Attributes:
        readers: who reads it in place.
    """

    layers: tuple[LayerCopy, ...]
    first: int
    last: int
    readers: WeakSet[LentSlots] = field(default_factory=WeakSet, compare=False, repr=False)

    @cached_property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.bytes for layer in self.layers)

    def copied(self) -> SequenceCopy:
        """A copy in memory of its own."""
        pairs = zip(self.layers, self._room(), strict=True)
        return replace(self, layers=tuple(layer.moved(room) for layer, room in pairs))

    def _room(self) -> list[list[Tensor]]:
        """Memory for the keys and values of each layer."""
        room = iter(together([one for layer in self.layers for one in layer.stores]))
        return [list(islice(room, len(layer.stores))) for layer in self.layers]

    def parted(self, at: int) -> list[SequenceCopy]:
        """The positions before `at` and the others, in memory of their own.

        Unless somebody reads it in place, the whole loses its memory meanwhile, layer by layer.
        """
        parts = [self.cut(self.first, at), self.cut(at, self.last)]
        rooms, layers = [part._room() for part in parts], [list[LayerCopy](), list[LayerCopy]()]
        for number, layer in enumerate(self.layers):
            for part, room, moved in zip(parts, rooms, layers, strict=True):
                moved.append(part.layers[number].moved(room[number]))
            for one in () if self.readers else layer.stores:
                clear(one)
        return [replace(part, layers=tuple(moved)) for part, moved in zip(parts, layers, strict=True)]

    def cut(self, first: int, last: int) -> SequenceCopy:
        """Positions first..last-1, as views."""
        return SequenceCopy(tuple(layer.cut(first, last) for layer in self.layers), first, last)


def usable(pieces: Sequence[SequenceCopy], most: int) -> int:
    """The longest length up to `most` from which decoding could continue after consecutive pieces; 0 if there is none.

    A sliding window keeps only the last positions, and recurrent layers keep states of some lengths.
    """
    lengths = {most, *(at for piece in pieces for layer in piece.layers for at in layer.states or () if at < most)}
    return max((at for at in lengths if at and restorable(pieces, at)), default=0)


def restorable(pieces: Sequence[SequenceCopy], length: int) -> bool:
    """Whether decoding could continue from `length` positions of consecutive pieces."""
    within = [piece for piece in pieces if piece.first < length]
    return bool(within) and length <= within[-1].last and all(
        _stored(line, within, length) for line in zip(*(piece.layers for piece in within), strict=True))


def _stored(line: Sequence[LayerCopy], pieces: Sequence[SequenceCopy], length: int) -> bool:
    """Whether the pieces of one layer hold all that the next query would see."""
    if line[-1].states is not None and length not in line[-1].states:
        return False
    return line[-1].keys is None or _run_start(line, pieces, length) <= oldest_seen(line[-1].window, length)


def _run_start(line: Sequence[LayerCopy], pieces: Sequence[SequenceCopy], length: int) -> int:
    """The first of the positions that a layer stores without a gap up to `length`."""
    start = length
    for layer, piece in zip(reversed(line), reversed(pieces), strict=True):
        start = min(start, layer.start)
        if start > piece.first:
            break
    return start


def look(cache: KVCache, seq: int, first: int = 0) -> SequenceCopy | None:
    """The positions from `first` on that ran every layer, as views of the cache where it stores them itself.

    None if a layer dropped what the next token would see.
    """
    length = cache.first_shallow(seq)
    if length == 0 or not all(layer.restorable(seq, length) for layer in cache.layers):
        return None
    first = min(first, length)
    return SequenceCopy(tuple(_look(layer, seq, first, length) for layer in cache.layers), first, length)


def _look(layer: KVLayer, seq: int, first: int, length: int) -> LayerCopy:
    before, states = layer.starts[seq], None
    start = max(first, before)
    if isinstance(layer, StateLayer):
        states = {at: state for at, state in layer.known(seq).items() if at <= length}
    span, lent = slice(start - before, length - before), layer.lent[seq]
    if lent is not None and span.start < lent.slots:
        stores = layer.parts(seq, span.stop, lent.pieces[0][0].dtype)
    elif layer.keys is None or layer.values is None:
        return LayerCopy(None, None, start, layer.window, states)
    else:
        stores = layer.keys[seq], layer.values[seq]
    keys, values = (store[:, span] for store in stores)
    return LayerCopy(keys, values, start, layer.window, states)


def copy_in(cache: KVCache, seq: int, pieces: Sequence[SequenceCopy], length: int) -> None:
    """Fill an empty sequence with the first `length` positions of consecutive pieces, where `usable` finds them.

    What it can read in place is not copied.
    """
    within = [piece for piece in pieces if piece.first < length]
    for layer, line in zip(cache.layers, zip(*(piece.layers for piece in within), strict=True), strict=True):
        if isinstance(layer, StateLayer):
            states = {at: state for copied in line for at, state in copied.states_in(0, length).items()}
            layer.states[seq] = states[length]
        if line[-1].keys is not None:
            start = _run_start(line, within, length)
            if cache.lends and layer.window is None:
                readers = [piece.readers for piece in within]
                layer.lend(seq, LentSlots([_stored_whole(copied) for copied in line], length, readers))
            else:
                _fill(layer, seq, [copied.cut(start, length) for copied in line], start, length - start)
        layer.lengths[seq] = length
    cache.positions[seq] = length


def _stored_whole(copied: LayerCopy) -> tuple[Tensor, Tensor]:
    assert copied.keys is not None and copied.values is not None
    return copied.keys, copied.values


def _fill(layer: KVLayer, seq: int, line: Sequence[LayerCopy], start: int, count: int) -> None:
    """Write the keys and values of consecutive copies, `count` positions in all, to a sequence from `start` on."""
    first = line[0]
    assert first.keys is not None and first.values is not None
    if layer.keys is None:
        layer.allocate(first.keys, (len(first.keys), first.keys.shape[2], first.values.shape[2]), count)
    layer.lengths[seq] = layer.starts[seq] = start
    layer.make_room([seq], [count])
    assert layer.keys is not None and layer.values is not None
    for copied in line:
        assert copied.keys is not None and copied.values is not None
        at = copied.start - start
        layer.keys[seq, :, at : at + copied.keys.shape[1]] = copied.keys
        layer.values[seq, :, at : at + copied.values.shape[1]] = copied.values
