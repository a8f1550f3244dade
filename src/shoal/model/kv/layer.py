"""Keys and values of one layer, with a length of its own for every sequence.

In each sequence, *committed* entries are followed by *scratch* entries, which a draft may still take back. Depth plans
are nested, so the positions that a layer has processed are a prefix of the sequence, and a length describes them.

Storage is one tensor pair [max_seqs, heads, capacity, head_dim]. Sequence i has place i; places after the last sequence
are free. Sequences lie side by side, since attention over all of them reads them together. If `shoal.model.kv.memory`
can do so, free places and the unwritten part of a place take no memory. A layer with a sliding window drops positions
that the window has passed, but never a scratch entry, so a rollback is always possible. In a layer without one the
slots of a sequence may be rewritten: fewer or other slots, with a bias on their scores. Then a sequence has fewer
*slots* than *positions*, and `starts` counts the difference. A sequence may also store slots outside its place, in
another form: all of them, or only the first ones, which have *settled*; the others stay in the place. The first ones
may also be *lent* to it, in memory that other sequences read too.

Values of no dimensions lie in the keys: what attention reads of a slot is then one vector, key and value at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.model.kv.form import GROWTH, EncodedSequence, KVForm, KVSizes, move
from shoal.model.kv.lent import LentSlots
from shoal.model.kv.memory import clear, is_paged, zeros

WINDOW_SLACK = 256
GIVEN_BACK = 1024
"""A sequence gives memory back when it has dropped at least this many slots."""
ENDLESS = 1 << 62
_AHEAD = 256
"""Slots for which there is room at once, as far as sequences may need them: moving them takes longer than steps do."""


def contiguous(seqs: Sequence[int]) -> slice | None:
    """`seqs` as a slice if they are consecutive, else None."""
    first, last = seqs[0], seqs[-1]
    return slice(first, last + 1) if tuple(seqs) == tuple(range(first, last + 1)) else None


def oldest_seen(window: int | None, length: int) -> int:
    """The first position that a query at position `length` sees."""
    return 0 if window is None else max(0, length - window + 1)


class KVLayer:
    """Keys and values of one layer.

    Attributes:
        window: number of positions that a query sees, including its own; None for all.
        lengths: committed positions per sequence.
        starts: positions per sequence that are no longer stored. Unless slots were rewritten, slot c of sequence i
            holds position `starts[i] + c`.
        scratch: entries per sequence that await commit or rollback.
        reached: most slots that the sequence's place has held since memory was last given back.
        rewritten: length of the sequence when its slots were last rewritten; decoding cannot go back before it.
        encoded: per sequence, its slots in a form of its own; None if they are in its place.
        settled: per sequence, its first slots after they have settled; None if no form waits for that.
        bias: per sequence, float32 [heads, slots or more] that is added to scores; None for nothing.
        extra: whether some sequence has any of the three above.
        lent: per sequence, its first slots if they lie in memory of others; never of one that has any of those three.
        released: sequences whose entries were freed; their lengths still tell which positions were processed.
        bytes_per_position: bytes of one sequence's keys and values at one position; 0 before the first write.
        max_seqs: number of sequences that the storage has room for.
        limit: most spare slots to allocate.
        capacity: number of slots of the storage.
        version: counts how often tensors were replaced.
    """

    __slots__ = (
        "__weakref__", "bias", "bytes_per_position", "capacity", "encoded", "extra", "keys", "lengths", "lent", "limit",
        "max_seqs", "reached", "released", "reserve", "rewritten", "scratch", "settled", "starts", "values", "version",
        "window",
    )  # a step looks at all layers, and slots lie closer together

    def __init__(self, seqs: int, window: int | None = None, reserve: int = 0) -> None:
        self.window = window
        self.reserve = reserve if window is None else min(reserve, window + WINDOW_SLACK)
        self.lengths, self.starts, self.scratch = [0] * seqs, [0] * seqs, [0] * seqs
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.released = [False] * seqs
        self.rewritten, self.reached = [0] * seqs, [0] * seqs
        self.encoded: list[EncodedSequence | None] = [None] * seqs
        self.settled: list[EncodedSequence | None] = [None] * seqs
        self.bias: list[Tensor | None] = [None] * seqs
        self.lent: list[LentSlots | None] = [None] * seqs
        self.extra = False
        self.max_seqs, self.limit = seqs, ENDLESS
        self.bytes_per_position = self.capacity = self.version = 0

    def append(self, keys: Tensor, values: Tensor, seqs: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Write scratch entries and return what the attention of these sequences reads.

        Args:
            keys, values: [len(seqs), heads, nodes, head_dim].
            seqs: ascending sequence numbers.
            counts: number of real nodes of each sequence; the others are padding and are not stored.

        Returns:
            Keys and values [len(seqs), heads, slots, head_dim]; slots after a sequence's end hold finite junk.
        """
        if any(self.released[seq] for seq in seqs):
            raise RuntimeError(f"a layer whose KV was released in one of the sequences {tuple(seqs)} "
                               "was asked to run again")
        if self.keys is None or self.extra or any(self.lent):
            self.prepare(keys.new_empty(0), (keys.shape[1], keys.shape[3], values.shape[3]), seqs, counts)
            if any(self.encoded[seq] or self.first_stored(seq) for seq in seqs):
                return self._append_apart(keys, values, seqs, counts)
        else:
            self.make_room(seqs, counts)
        assert self.keys is not None and self.values is not None
        slots, span = self._needed(seqs, counts), contiguous(seqs)
        self._write(keys, values, seqs, span, counts)
        for seq, count in zip(seqs, counts, strict=True):
            self.scratch[seq] += count
        index = torch.tensor(seqs, device=keys.device) if span is None else span
        return _both(self.keys[index, :, :slots], self.values[index, :, :slots])

    def _append_apart(
        self, keys: Tensor, values: Tensor, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """`append` for sequences with storage outside their places: copies what they read into one tensor."""
        ends = [end + count for end, count in zip(self._ends(seqs), counts, strict=True)]
        size = max(ends)
        all_keys, all_values = (new.new_zeros(len(seqs), new.shape[1], size, new.shape[3]) for new in (keys, values))
        for index, (seq, end, count) in enumerate(zip(seqs, ends, counts, strict=True)):
            self._put(seq, end - count, keys[index, :, :count], values[index, :, :count])
            self.scratch[seq] += count
            all_keys[index, :, :end], all_values[index, :, :end] = self.parts(seq, end, keys.dtype)
        return _both(all_keys, all_values)

    def count(self, seqs: Sequence[int], counts: Sequence[int]) -> None:
        """Note scratch entries of a layer without attention, which stores nothing of them."""
        for seq, count in zip(seqs, counts, strict=True):
            self.scratch[seq] += count

    def _put(self, seq: int, at: int, keys: Tensor, values: Tensor) -> None:
        """Write [heads, n, head_dim] to the sequence's slots from `at` on; there must be room."""
        own = self.encoded[seq]
        if own is not None:
            own.write(at, keys, values)
            return
        assert self.keys is not None and self.values is not None
        span = slice(at, at + keys.shape[1])
        self.keys[seq, :, span], self.values[seq, :, span] = keys, values

    def read(self, seq: int, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, slots, head_dim] of the sequence's first slots; may be views of the storage."""
        return _both(*self.parts(seq, slots, dtype))

    def parts(self, seq: int, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same as it is stored: values of no dimensions stay such."""
        own = self.encoded[seq]
        if own is not None:
            return own.read(slots, dtype)
        first, older = min(self.first_stored(seq), slots), self.lent[seq] or self.settled[seq]
        if older is not None and first == slots:
            return older.read(slots, dtype)
        assert self.keys is not None and self.values is not None
        keys, values = (store[seq, :, first:slots].to(dtype) for store in (self.keys, self.values))
        if not first or older is None:
            return keys, values
        older_keys, older_values = older.read(first, dtype)
        return torch.cat([older_keys, keys], 1), torch.cat([older_values, values], 1)

    def first_stored(self, seq: int) -> int:
        """The sequence's first slot that has not settled and is not lent."""
        older, lent = self.settled[seq], self.lent[seq]
        if lent is not None:
            return lent.slots
        return 0 if older is None else older.settled

    def lend(self, seq: int, lent: LentSlots | None) -> None:
        """Let a sequence read its first slots from memory of others; None ends that."""
        if lent is not self.lent[seq]:
            self.lent[seq] = lent
            self.version += 1

    def settle(self, seq: int, slots: int) -> None:
        """Move the sequence's first `slots` from its place to their late form; the place gives their memory back.

        Raises:
            ValueError: fewer slots are committed, there are scratch entries, or the layer has a window.
        """
        older, first = self.settled[seq], self.first_stored(seq)
        if older is None or slots <= first:
            return
        self._check_committed(seq, slots)
        assert self.keys is not None and self.values is not None
        stores = self.keys[seq], self.values[seq]
        if not older.capacity:
            older.allocate(self.keys, (len(stores[0]), stores[0].shape[2], stores[1].shape[2]), slots)
        older.make_room(slots)
        older.write(first, *(store[:, first:slots] for store in stores))
        older.settled = slots
        for head in (head for store in stores for head in store):
            clear(head[:slots])  # from 0 on, since page boundaries are not slot boundaries
        self.rewritten[seq] = self.lengths[seq]
        self.version += 1

    def prepare(self, like: Tensor, sizes: KVSizes, seqs: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for `counts` more entries in `seqs`, allocating storage if there is none.

        Args:
            like: a tensor with the dtype and device of the model's keys.
            sizes: heads, and head_dim of keys and of values.
        """
        if self.keys is None and not all(self.encoded[seq] for seq in seqs):
            self.allocate(like, sizes, max(counts))
        for seq, count in zip(seqs, counts, strict=True):
            own = self.encoded[seq]
            if own is not None and not own.capacity:
                own.allocate(like, sizes, max(count, self.reserve))
                self.version += 1
                self.bytes_per_position = sizes[0] * (sizes[1] + sizes[2]) * like.element_size()
        self.make_room(seqs, counts)

    def _write(
        self, keys: Tensor, values: Tensor, seqs: Sequence[int], span: slice | None, counts: Sequence[int]
    ) -> None:
        assert self.keys is not None and self.values is not None
        nodes, ends = keys.shape[2], self._ends(seqs)
        if span is not None and len(set(ends)) == 1 and min(counts) == nodes:
            self.keys[span, :, ends[0] : ends[0] + nodes] = keys
            self.values[span, :, ends[0] : ends[0] + nodes] = values
            return
        for index, (seq, end, count) in enumerate(zip(seqs, ends, counts, strict=True)):
            self._put(seq, end, keys[index, :, :count], values[index, :, :count])

    def _ends(self, seqs: Sequence[int]) -> list[int]:
        return [self.lengths[seq] - self.starts[seq] + self.scratch[seq] for seq in seqs]

    def allocate(self, like: Tensor, sizes: KVSizes, count: int) -> None:
        """Allocate storage for at least `count` entries like `like`, with zeros, since masked slots must be finite."""
        heads, *dims = sizes
        room = max(count, self.reserve, self._ahead(count))
        self.replace(*(zeros(like, self.max_seqs, heads, room, dim) for dim in dims))
        self.bytes_per_position = heads * sum(dims) * like.element_size()

    def replace(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Replace the storage; None frees it."""
        self.keys, self.values = keys, values
        self.capacity = 0 if keys is None else keys.shape[2]
        self.reached = [0] * len(self.lengths)
        self.version += 1

    def resize(self, max_seqs: int, capacity: int) -> None:
        """Move the sequences to storage of that size; if there is no storage yet, it will have that size."""
        if self.keys is not None and self.values is not None and tuple(self.keys.shape[::2]) != (max_seqs, capacity):
            held = self.held(), [self.first_stored(seq) for seq in range(len(self.lengths))]
            self.replace(*(_moved(store, *held, max_seqs, capacity) for store in (self.keys, self.values)))
        self.max_seqs = max_seqs

    def held(self) -> list[int]:
        """Number of slots in use per place; 0 for a sequence that stores all slots outside its place."""
        return [0 if own else self.stored(seq) + self.scratch[seq] for seq, own in enumerate(self.encoded)]

    def make_room(self, seqs: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for `counts` more entries in `seqs`. Call it before making a mask: it may move a window's start."""
        if self.extra:
            new = list(zip(seqs, counts, strict=True))
            for seq, count in new:
                self._make_own_room(seq, count)
            plain = [(seq, count) for seq, count in new if self.encoded[seq] is None]
            seqs, counts = [seq for seq, _ in plain], [count for _, count in plain]
        if seqs and self.keys is not None:
            self._make_cache_room(seqs, counts)

    def _make_own_room(self, seq: int, count: int) -> None:
        """Make room outside the place; new entries get a bias of 0."""
        own, bias = self.encoded[seq], self.bias[seq]
        if own is not None and own.capacity and self._ends([seq])[0] + count > own.capacity:
            self._evict(seq)
            needed = self._ends([seq])[0] + count + self._spare
            if needed > own.capacity:
                own.make_room(needed)
                self.version += 1
        if bias is not None:
            end = self._ends([seq])[0]
            if end + count > bias.shape[1]:
                grown = bias.new_zeros(len(bias), int((end + count) * GROWTH) + 16)
                grown[:, :end] = bias[:, :end]
                self.bias[seq], self.version = grown, self.version + 1
            else:
                bias[:, end : end + count] = 0

    def _make_cache_room(self, seqs: Sequence[int], counts: Sequence[int]) -> None:
        assert self.keys is not None
        if self._needed(seqs, counts) <= self.keys.shape[2]:
            return
        if self.window is not None:
            for seq, own in enumerate(self.encoded):
                if own is None:
                    self._evict(seq)
        needed = self._needed(seqs, counts) + self._spare
        if needed > self.keys.shape[2]:
            grown = min(int(self.keys.shape[2] * GROWTH) + 16, self.limit)
            self.resize(self.max_seqs, max(needed, grown, self._ahead(needed)))

    def _ahead(self, slots: int) -> int:
        """Slots for which there is room at once where so many are needed; 0 where no limit is known, or in a window."""
        return 0 if self.limit == ENDLESS or self.window is not None else min(slots + _AHEAD, self.limit)

    @property
    def _spare(self) -> int:
        """Spare slots of a window, so that the next shift is not due at once."""
        return 0 if self.window is None else min(self.window, WINDOW_SLACK) // 2

    def _needed(self, seqs: Sequence[int], counts: Sequence[int]) -> int:
        return max(end + count for end, count in zip(self._ends(seqs), counts, strict=True))

    def _evict(self, seq: int) -> None:
        """Shift out committed positions that no later query can see."""
        gone = self.lengths[seq] - ((self.window or ENDLESS) - 1) - self.starts[seq]
        if gone > 0 and not self.released[seq]:
            (end,) = self._ends([seq])
            tensors = self.seq_tensors(seq)
            self._note_reach(seq)
            move(tensors, torch.arange(gone, end, device=tensors[0].device), to=0)
            self.starts[seq] += gone

    def seq_tensors(self, seq: int) -> list[Tensor]:
        """All tensors [heads, capacity, ...] with a sequence's slots, keys before values."""
        own, bias = self.encoded[seq], self.bias[seq]
        if own is not None:
            tensors = [*own.tensors]
        else:
            tensors = [] if self.keys is None or self.values is None else [self.keys[seq], self.values[seq]]
        return tensors if bias is None else [*tensors, bias]

    def keep_slots(self, seq: int, slots: Tensor | Sequence[int]) -> None:
        """Keep some of the sequence's committed slots and drop the others.

        Args:
            seq: number of the sequence, which must have no scratch entries.
            slots: ascending numbers [n], or int64 [heads, n] if the heads differ.

        Raises:
            ValueError: the layer has a sliding window, which decides itself what stays, or there are scratch entries.
        """
        tensors = self.seq_tensors(seq)
        chosen = torch.as_tensor(slots, dtype=torch.int64, device=tensors[0].device if tensors else None)
        self._check_rewrite(seq, chosen.shape[-1])
        move(tensors, chosen, to=0)
        self._note_rewrite(seq, chosen.shape[-1])

    def skip(self, seq: int, count: int) -> None:
        """Go on by `count` positions of which nothing is stored; raises as `keep_slots`."""
        self._check_rewrite(seq, 0)
        self.lengths[seq] += count
        self.starts[seq] += count
        self.rewritten[seq] = self.lengths[seq]

    def rewrite(self, seq: int, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Replace all committed slots of the sequence by others.

        Args:
            keys, values: [heads, n, head_dim], at most as many slots as are stored; may be views of what `read` gave.
            bias: [heads, n], added to the scores of every query, stored in float32; None for nothing.

        Raises:
            ValueError: as in `keep_slots`, the bias has another shape, or values that lie in the keys are others.
        """
        count, sizes = keys.shape[1], tuple(keys.shape[:2])
        if self.values is not None and not self.values.shape[3]:
            if not torch.equal(keys, values):
                raise ValueError("the values of this layer lie in its keys (latent attention), so that both can "
                                 "only be rewritten alike")
            values = values[..., :0]
        self._check_rewrite(seq, count)
        if bias is not None and tuple(bias.shape) != sizes:
            raise ValueError(f"the bias is {list(bias.shape)}; it must be {list(sizes)}: heads and slots")
        self._put(seq, 0, keys.clone(), values.clone())  # they may be views of the destination
        self._set_bias(seq, None if bias is None else keys.new_empty(sizes, dtype=torch.float32).copy_(bias))
        self._note_rewrite(seq, count)

    def turn_keys(self, seq: int, first: int, turn: Callable[[Tensor], Tensor]) -> None:
        """Replace the keys [heads, n, head_dim] of a sequence's committed slots from `first` on by what `turn` says."""
        if self.encoded[seq] is not None or self.first_stored(seq):
            raise ValueError(f"the keys of sequence {seq} lie in a form of their own, in which they cannot be turned")
        if self.keys is not None and not self.released[seq]:
            span = slice(first, self.stored(seq))
            self.keys[seq, :, span] = turn(self.keys[seq, :, span])
            self.rewritten[seq] = self.lengths[seq]

    def _set_bias(self, seq: int, bias: Tensor | None) -> None:
        if bias is not None or self.bias[seq] is not None:
            self.bias[seq], self.version = bias, self.version + 1
            self._note_extra()

    def _note_extra(self) -> None:
        self.extra = any(self.encoded) or any(self.settled) or any(bias is not None for bias in self.bias)

    def _check_rewrite(self, seq: int, count: int) -> None:
        if self.first_stored(seq):
            raise ValueError(f"{self.first_stored(seq)} slots of sequence {seq} have settled or are lent; they cannot "
                             "be rewritten")
        self._check_committed(seq, count)

    def _check_committed(self, seq: int, count: int) -> None:
        if self.window is not None:
            raise ValueError(f"a layer with a sliding window of {self.window} positions keeps what that says; leave it")
        if self.scratch[seq] or count > self.stored(seq):
            raise ValueError(f"{count} slots for sequence {seq}, which has {self.stored(seq)} committed ones and "
                             f"{self.scratch[seq]} that are not; rewrite after a commit, and never to more slots")

    def _note_reach(self, seq: int) -> None:
        """Record how far the place was used; to be called before the sequence drops slots."""
        self.reached[seq] = max(self.reached[seq], *self._ends([seq]))

    def _note_rewrite(self, seq: int, count: int) -> None:
        self._note_reach(seq)
        self.starts[seq], self.rewritten[seq] = self.lengths[seq] - count, self.lengths[seq]
        if self.encoded[seq] is None and self.reached[seq] >= count + GIVEN_BACK:
            for head in (head for store in (self.keys, self.values) if store is not None for head in store[seq]):
                clear(head[count:])
            self.reached[seq] = count

    def set_form(self, seq: int, form: KVForm | None, reserve: int = 0) -> None:
        """Set the form in which an empty sequence is stored, with room for `reserve` slots; None for its place."""
        if self.lengths[seq] or self.scratch[seq]:
            raise ValueError(f"sequence {seq} has stored {self.lengths[seq]} positions; "
                             "a form is set before the first one")
        if form is not None or self.encoded[seq] is not None or self.settled[seq] is not None:
            own = None if form is None else EncodedSequence(form, reserve)
            self.encoded[seq], self.settled[seq] = (None, own) if form is not None and form.late else (own, None)
            self.version += 1
            self._note_extra()

    def keep(self, seq: int, count: int) -> None:
        """Commit the sequence's first `count` scratch entries, or all if there are fewer, and drop the others."""
        scratch = self.scratch[seq]
        if scratch:
            if count < scratch:
                self._note_reach(seq)
            self.lengths[seq] += min(count, scratch)
            self.scratch[seq] = 0

    def commit(self, seq: int, path: Sequence[int]) -> None:
        """Commit the scratch entries of the nodes in `path` (ascending) and drop the others."""
        kept = [node for node in path if node < self.scratch[seq]]
        tensors = self.seq_tensors(seq)
        self._note_reach(seq)
        if kept and kept[-1] != len(kept) - 1 and tensors:
            first = self.lengths[seq] - self.starts[seq]
            move(tensors, torch.tensor(kept, device=tensors[0].device) + first, to=first)
        self.lengths[seq] += len(kept)
        self.scratch[seq] = 0

    def restorable(self, seq: int, length: int) -> bool:
        """Whether decoding could continue from `length` positions: the next query would find all it sees unchanged."""
        if length == 0:
            return True
        enough = self.starts[seq] <= oldest_seen(self.window, length) and length <= self.lengths[seq]
        return enough and not self.released[seq] and not self.rewritten[seq]

    def truncate(self, seq: int, length: int) -> None:
        """Forget every position from `length` on."""
        self._note_reach(seq)
        self.lengths[seq], self.scratch[seq] = length, 0
        lent = self.lent[seq]
        if lent is not None and length < lent.slots:
            self.lend(seq, lent.cut(length))
        if length == 0:
            self.starts[seq] = self.rewritten[seq] = 0
            self.released[seq] = False
            self._set_bias(seq, None)
            self._clear(self.settled[seq])

    def _clear(self, own: EncodedSequence | None) -> None:
        if own is not None and own.capacity:
            own.clear()
            self.version += 1

    def select(self, order: Sequence[int]) -> None:
        """Make sequence `order[i]`, which is i or one beyond the new end, sequence i; drop the others."""
        if self.extra or any(self.lent):
            self.version += 1
        held, first = self.held(), [self.first_stored(seq) for seq in range(len(self.lengths))]
        for name in ("lengths", "starts", "scratch", "released", "rewritten", "encoded", "settled", "bias", "lent"):
            setattr(self, name, [getattr(self, name)[seq] for seq in order])
        self.reached = [self.reached[seq] if seq == former else 0 for seq, former in enumerate(order)]
        self._note_extra()
        if all(self.released) and self.keys is not None:  # every replacement costs all layers a new binding
            self.replace(None, None)
        self.max_seqs = self.max_seqs if order else 0
        for store in (store for store in (self.keys, self.values) if store is not None):
            for seq, former in enumerate(order):
                if seq != former:
                    span = slice(first[former], held[former])
                    store[seq, :, span] = store[former, :, span]
                    for head in store[seq]:
                        clear(head[span.stop :])
                        clear(head[: span.start])
            clear(store[len(order) : len(held)])  # leftover infinities would reach sequences beside the next one here

    def extend(self, seqs: int, max_seqs: int) -> None:
        """Add empty sequences, in storage for `max_seqs` sequences, which must suffice."""
        self.resize(max_seqs, self.capacity)
        for counts in (self.lengths, self.starts, self.scratch, self.rewritten, self.reached):
            counts.extend([0] * seqs)
        self.released.extend([False] * seqs)
        for extra in (self.encoded, self.settled, self.bias, self.lent):
            extra.extend([None] * seqs)

    def fork(self, seq: int, to: int) -> None:
        """Make an empty sequence an exact copy of another one; neither may have scratch entries."""
        for name in ("lengths", "starts", "released", "rewritten"):
            getattr(self, name)[to] = getattr(self, name)[seq]
        self.lend(to, self.lent[seq])
        extra = self.encoded[seq], self.settled[seq], self.bias[seq]
        self.encoded[to], self.settled[to], self.bias[to] = copy.deepcopy(extra)
        if any(one is not None for one in extra):
            self.version += 1
            self._note_extra()
        first, stored = self.first_stored(seq), self.stored(seq) if self.encoded[seq] is None else 0
        for store in (store for store in (self.keys, self.values) if store is not None):
            store[to, :, first:stored] = store[seq, :, first:stored]

    def release(self, seq: int) -> None:
        """Free what a sequence stores that will not run this layer again; the storage goes with the last one."""
        before, self.released[seq] = self.released[seq], True
        self._clear(self.encoded[seq])
        self._clear(self.settled[seq])
        self._set_bias(seq, None)
        self.lend(seq, None)
        if all(self.released) and self.keys is not None:  # every replacement costs all layers a new binding
            self.replace(None, None)
        if self.keys is not None and self.values is not None and not before:
            clear(self.keys[seq])
            clear(self.values[seq])
            self.reached[seq] = 0

    def stored(self, seq: int) -> int:
        """Number of stored slots of a sequence."""
        return 0 if self.released[seq] else self.lengths[seq] - self.starts[seq]

    def seq_bytes(self, seq: int) -> int:
        """Bytes taken for a sequence, in its place and outside; of partly used pages only the used part counts."""
        own = self.encoded[seq]
        return self._extra_bytes(seq) + (self._cache_slots(seq) * self.bytes_per_position if own is None else 0)

    def slot_bytes(self, seq: int) -> int:
        """Bytes per slot of a sequence that has not settled."""
        own = self.encoded[seq]
        return self.bytes_per_position if own is None else own.slot_bytes

    def kept_bytes(self, seq: int) -> int:
        """Bytes of all slots that a sequence stores."""
        older = self.settled[seq]
        first = 0 if older is None else min(older.settled, self.stored(seq))
        newer = (self.stored(seq) - first) * self.slot_bytes(seq)
        return newer if older is None else newer + first * older.slot_bytes

    @property
    def allocated(self) -> int:
        """Bytes taken for all sequences and for free places."""
        seqs = range(len(self.lengths))
        if self.paged:
            return sum(map(self.seq_bytes, seqs))
        return self.max_seqs * self.capacity * self.bytes_per_position + sum(map(self._extra_bytes, seqs))

    @property
    def paged(self) -> bool:
        """Whether memory is taken only as sequences write."""
        return self.keys is not None and is_paged(self.keys.device)

    def _cache_slots(self, seq: int) -> int:
        end = max(self.reached[seq], self.stored(seq) + self.scratch[seq])
        return end - self.first_stored(seq) if self.paged else self.capacity

    def _extra_bytes(self, seq: int) -> int:
        return sum(one.nbytes for one in (self.encoded[seq], self.settled[seq], self.bias[seq]) if one is not None)


def _both(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as attention reads them."""
    return keys, values if values.shape[-1] else keys


def _moved(store: Tensor, held: Sequence[int], firsts: Sequence[int], max_seqs: int, capacity: int) -> Tensor:
    moved = zeros(store, max_seqs, store.shape[1], capacity, store.shape[3])
    for seq, (slots, first) in enumerate(zip(held, firsts, strict=True)):
        moved[seq, :, first:slots] = store[seq, :, first:slots]
    return moved
