"""A prefix cache: KV and states of earlier prompts and answers for later prompts that begin alike.

It serves the next turn of a chat and a common instruction. Texts form a radix tree, so that what several have in common
is kept once. Only positions that ran every layer are kept: of an answer under a depth plan that is its prompt. The rest
runs at full depth when it returns as part of a longer prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from shoal.heap import give_back
from shoal.model.kv.cache import KVCache, SequenceCopy, copy_in, look, usable
from shoal.model.layers.cross_attention import Encoded
from shoal.model.layers.pictures import keys_of
from shoal.model.lora.adapter import FittedAdapter
from shoal.model.state.layer import State, state_bytes

_GRID = 512
"""Fewest tokens between states that are kept within a prompt."""

_HOLES = 2**26
"""Memory is returned after this many kept bytes, or a quarter of the limit: returning it takes milliseconds."""


_Tenant = tuple[str, FittedAdapter | None, str]
"""A salt, and the adapter and the name of the source with which the KV was made. Pictures are part of the text."""


def _tenant(cache: KVCache, seq: int, salt: str) -> _Tenant:
    source = cache.encoded[seq]
    return salt, cache.adapters[seq], source.name if isinstance(source, Encoded) else ""


@dataclass(slots=True, eq=False)
class _Node:
    """Some tokens that follow those of its parent, with what is kept of their positions."""

    tokens: list[int]
    piece: SequenceCopy
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)


class Prefixes:
    """Keeps the most recently used texts, up to `limit` bytes; 0 keeps nothing.

    Texts of one salt see no other's, and those of one adapter or source, or of none, no other's either.

    Attributes:
        limit: most bytes.
        bytes: what is kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self._since = limit, 0, 0
        self._roots: dict[_Tenant, _Node] = {}
        self._order: OrderedDict[_Node, None] = OrderedDict()
        """All nodes but roots by their last use; a node comes after its children."""

    def fill(self, cache: KVCache, seq: int, prompt: Sequence[int], salt: str = "") -> tuple[int, int]:
        """Give a sequence the longest kept prefix of its prompt in place of a shorter one that it may hold.

        The last token is left to run, since its logits are needed.

        Returns:
            How many positions it was given, 0 for none; and how many tokens are known, which is more where recurrent
            layers have no state of that length, or a window has moved on.
        """
        path, known = self._find(keys_of(prompt, cache.encoded[seq]), _tenant(cache, seq, salt))
        known = min(known, len(prompt) - 1)
        pieces = [node.piece for node in path]
        length = usable(pieces, known) if path else 0
        if length <= cache.positions[seq]:
            return 0, known
        cache.truncate(seq, 0)
        self._touch(path)
        copy_in(cache, seq, pieces, length)
        return length, known

    def keep(self, cache: KVCache, seq: int, tokens: Sequence[int], salt: str = "") -> None:
        """Keep a copy of what a sequence has stored and is not kept yet; `tokens` are at least those it stores."""
        if not self.limit:
            return
        own = list(keys_of(tokens, cache.encoded[seq])[: cache.first_shallow(seq)])
        tenant = _tenant(cache, seq, salt)
        path, known = self._find(own, tenant)
        seen = look(cache, seq, known)
        if seen is None:
            return
        if path and known < min(path[-1].piece.last, seen.last):
            path[-1] = self._split(path[-1], known)
        self._touch(path)
        new = seen.cut(known, seen.last)
        states = [_missing(node.piece, seen) for node in path]
        if not self._make_room(new.bytes + sum(state_bytes(one) for lost in states for one in lost), path):
            return
        for node, lost in zip(path, states, strict=True):
            self._add(node, lost)
        if known < seen.last:
            parent = path[-1] if path else self._roots.setdefault(tenant, _Node([], SequenceCopy((), 0, 0), None))
            self._attach(_Node(own[known:], new.copied(), parent))
            self._touch(path)

    def clear(self) -> None:
        """Forget everything."""
        self._roots, self.bytes = {}, 0
        self._order.clear()

    def _find(self, tokens: Sequence[int], tenant: _Tenant) -> tuple[list[_Node], int]:
        """The nodes that tokens begin with, of which the last one may go on otherwise, and how many tokens that are."""
        path, node, at = list[_Node](), self._roots.get(tenant), 0
        while node is not None and at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            same = common(child.tokens, tokens[at : at + len(child.tokens)])
            path.append(child)
            at += same
            node = child if same == len(child.tokens) else None
        return path, at

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._order.move_to_end(node)

    def _attach(self, node: _Node) -> None:
        assert node.parent is not None
        node.parent.children[node.tokens[0]] = node
        self._order[node] = None
        self.bytes += node.piece.bytes

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two after position at - 1; returns the first part. What is stored is moved layer by layer."""
        size = at - node.piece.first
        self.bytes -= node.piece.bytes
        try:
            low, node.piece = node.piece.parted(at)
        except BaseException:  # a node that is half cut is of no use
            self.clear()
            raise
        part = _Node(node.tokens[:size], low, node.parent)
        self._attach(part)
        node.tokens, node.parent = node.tokens[size:], part
        part.children[node.tokens[0]] = node
        self.bytes += node.piece.bytes
        return part

    def _add(self, node: _Node, states: Sequence[dict[int, State]]) -> None:
        """Keep states of lengths within a node."""
        if any(states):
            layers = tuple(replace(layer, states={**(layer.states or {}), **more}) if more else layer
                           for layer, more in zip(node.piece.layers, states, strict=True))
            self.bytes -= node.piece.bytes
            node.piece = replace(node.piece, layers=layers)
            self.bytes += node.piece.bytes

    def _make_room(self, size: int, path: Sequence[_Node]) -> bool:
        """Drop what was used least until there is room, before anything is copied.

        Never a node of `path`, nor one that a sequence reads in place, which would give no memory back.
        """
        while self.bytes + size > self.limit:
            oldest = next((node for node in self._order
                           if not node.children and node not in path and not node.piece.readers), None)
            if oldest is None:
                return False
            self._drop(oldest)
        self._since += size
        if self._since > min(_HOLES, self.limit // 4):  # what passes leaves holes into which other things seldom fit
            self._since = 0
            give_back()
        return True

    def _drop(self, leaf: _Node) -> None:
        assert leaf.parent is not None and not leaf.children
        del leaf.parent.children[leaf.tokens[0]], self._order[leaf]
        if not leaf.parent.children and leaf.parent not in self._order:
            self._roots = {tenant: root for tenant, root in self._roots.items() if root.children}
        self.bytes -= leaf.piece.bytes


def _missing(piece: SequenceCopy, seen: SequenceCopy) -> list[dict[int, State]]:
    """Per layer, the states of a sequence that a piece could hold and does not."""
    return [{at: state for at, state in own.states_in(piece.first, piece.last).items() if at not in (kept.states or {})}
            for own, kept in zip(seen.layers, piece.layers, strict=True)]


def places_of_states(tokens: Sequence[int], special: Container[int]) -> tuple[int, ...]:
    """Lengths of a prompt after which recurrent layers keep a state, since a later prompt may part from it there.

    They are the end of a chat's first message, which is often an instruction that other chats share, and a grid of at
    most three places, however long the prompt.

    Args:
        special: tokens that text does not hold; the first one that comes twice begins messages.
    """
    step, begun = max(_GRID, 1 << (len(tokens) // 4).bit_length()), set[int]()
    grid = {*range(step, len(tokens), step)}
    for place, token in enumerate(tokens):
        if token in begun:
            return tuple(sorted(grid | {place}))
        if token in special:
            begun.add(token)
    return tuple(sorted(grid))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix, by bisection, since slices compare at C speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
