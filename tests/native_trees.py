"""Random token trees after random KV, and the chains of their paths: the kernels must give both the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from native_reference import Case, make_reference
from settling import Bitmap
from shoal.model.kv.blocks import Int4, Int8
from shoal.model.kv.form import forms_of
from shoal.model.packed.native import (
    ATTENTION,
    LANES,
    MLP,
    KVBinding,
    NativeBatch,
    NativeModel,
    SlotChoice,
    SlotLabels,
)
from shoal.model.packed.native.batch import OwnSlots

BLOCKS = {"int8": Int8(), "int4": Int4(), "int8 and int4": Int4(Int8())}
FORMS = ("float32", "bfloat16", *BLOCKS, "bitmap", "biased")
"""Ways in which the KV of a sequence is stored; all but the first in or beside a cache in bfloat16."""
READS = ("all", "named", "chosen", "labelled")
"""How slots are selected: not at all, by the caller, by the largest scores of an earlier layer, by labels."""
SHAPES = (
    {"heads": 7, "kv_heads": 1, "head_dim": 64, "rotary_dim": 64},
    {"heads": 6, "kv_heads": 2, "head_dim": 20, "rotary_dim": 12},
    {"heads": 3, "kv_heads": 3, "head_dim": 32, "rotary_dim": 32},
    {"heads": 4, "kv_heads": 2, "head_dim": 128, "rotary_dim": 128, "caps": (0.6, 2.5)},
    {"heads": 2, "kv_heads": 1, "head_dim": 256, "rotary_dim": 256},
)
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, None), (None, 5), (37, None), (2, 150))
LAYERS, ROOM, LONGEST, COUNT, WIDTH = 2, 80, 1100, 24, 5
PRUNED = Bitmap(0.6)


@dataclass
class Tree:
    """Parents of nodes in breadth-first order, a token for each, and how many of them are fed first."""

    parents: list[int]
    ids: list[int]
    first: int

    def path(self, node: int) -> list[int]:
        above = [] if self.parents[node] < 0 else self.path(self.parents[node])
        return [*above, node]

    def leaves(self) -> list[int]:
        return sorted(set(range(len(self.parents))) - set(self.parents))

    def ancestors(self, node: int) -> int:
        return sum(1 << one for one in self.path(node))


def random_tree(dice: random.Random, most: int) -> Tree:
    """Wide ones, deep ones and nearly straight ones."""
    size, reach = dice.randint(2, most), dice.choice((1, 2, 4, most))
    parents = [-1]
    for node in range(1, size):
        parents.append(dice.randint(max(parents[-1], node - reach, 0), node - 1))
    return Tree(parents, [dice.randrange(70) for _ in parents], dice.choice((0, 0, dice.randrange(size))))


class StoredText:
    """Random KV of all layers in one form, of which each run gets a copy of its own.

    Args:
        form: one of `FORMS`.
        case: sizes of the model.
        slots: how many are committed in each layer.
        start: positions before them that are not stored any more.
        seed: of the numbers.
    """

    def __init__(self, form: str, case: Case, slots: int, start: int, seed: int) -> None:
        self.form, self.case, self.slots, self.start = form, case, slots, start
        dice = torch.Generator().manual_seed(seed)
        shape = (case.kv_heads, slots + ROOM, case.head_dim)
        self.lines = [[torch.randn(shape, generator=dice).to(case.kv_dtype) for _ in range(2)] for _ in range(LAYERS)]
        self.bias = torch.randn(shape[:2], generator=dice) if form == "biased" else None
        if self.bias is not None:
            self.bias[:, slots:] = 0  # new slots have none
        self.settled = slots * 3 // 4 if form == "bitmap" else 0

    def binding(self, model: NativeModel) -> tuple[KVBinding, list[list[Tensor]]]:
        """A copy, bound, and what its lines lie in by layer."""
        slots = [[one[None].clone() for one in pair] for pair in self.lines]
        own = [self._own(pair) for pair in self.lines]
        return model.bind(*zip(*slots, strict=True), [[one] for one in own]), slots

    def _own(self, pair: Sequence[Tensor]) -> OwnSlots:
        if self.form == "bitmap":
            older = [part for one in pair for part in PRUNED.encode(one[:, : self.settled])]
            return OwnSlots(older=older, settled=self.settled)
        if self.form in BLOCKS:
            forms = forms_of(BLOCKS[self.form])
            return OwnSlots(*(list(form.encode(one)) for form, one in zip(forms, pair, strict=True)))
        return OwnSlots(bias=self.bias)


@dataclass
class Trial:
    """A model, a sequence and a tree, run as a tree and as the chains of its paths."""

    model: NativeModel
    kv: StoredText
    tree: Tree
    reads: str
    threads: int
    attention_alone: bool
    seed: int

    def differences(self) -> list[str]:
        """What differs: nodes whose logits or states have other bits than at the end of their path."""
        found = self._run(self.tree.parents, self.tree.ids, self.tree.first)
        wrong = []
        for leaf in self.tree.leaves():
            path = self.tree.path(leaf)
            straight = self._run(range(-1, len(path) - 1), [self.tree.ids[node] for node in path], 0)
            wrong += [f"{what} of node {node}" for what, tree, chain in zip(("logits", "states"), found, straight,
                                                                           strict=True)
                      for place, node in enumerate(path) if not torch.equal(tree[..., node, :], chain[..., place, :])]
        return wrong

    def _run(self, parents: Sequence[int], ids: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
        """Logits [nodes, V] and states [layers + 1, nodes, D] of a tree, the nodes before `first` fed by themselves."""
        tree, kv = Tree(list(parents), list(ids), first), self.kv.binding(self.model)[0]
        parts = [self._forward(tree, kv, range(first)), self._forward(tree, kv, range(first, len(ids)))]
        logits, states = zip(*(part for part in parts if part is not None), strict=True)
        return torch.cat(logits), torch.cat(states, 1)

    def _forward(self, tree: Tree, kv: KVBinding, nodes: range) -> tuple[Tensor, Tensor] | None:
        if not nodes:
            return None
        base, start = self.kv.start + self.kv.slots, self.kv.start
        flags = [ATTENTION if self.attention_alone else ATTENTION | MLP] * len(nodes)
        batch = NativeBatch(
            ids=[tree.ids[node] for node in nodes], positions=[base + len(tree.path(node)) - 1 for node in nodes],
            rows=[0] * len(nodes), nodes=nodes, bases=[base] * len(nodes),
            ancestors=[tree.ancestors(node) for node in nodes], wanted=range(len(nodes)), layers=range(LAYERS),
            active=[flags] * LAYERS, starts=[[start] * len(nodes)] * LAYERS,
        )  # fmt: skip
        taps = torch.empty(LAYERS + 1, len(nodes), self.kv.case.hidden)
        choices = self._choices(nodes) if self.reads in ("chosen", "labelled") else None
        logits = self.model.forward(batch, kv, self.threads, taps, self._named(tree, nodes), choices)
        return logits, taps

    def _named(self, tree: Tree, nodes: range) -> Callable[[int, Tensor], list[Tensor | None]] | None:
        """Slots that depend on a node's path alone: some places of its text, and its own."""
        if self.reads != "named":
            return None

        def choose(entry: int, queries: Tensor) -> list[Tensor | None]:
            return [self._some(entry, tree.path(node)) for node in nodes]

        return choose

    def _some(self, entry: int, path: list[int]) -> Tensor | None:
        last = self.kv.slots + len(path) - 1
        dice = random.Random(self.seed * 1000 + entry * 100 + last)
        if dice.random() < 0.2:
            return None
        heads, window = dice.choice((self.kv.case.kv_heads, self.kv.case.heads)), self.kv.case.windows[entry]
        seen = range(0 if window is None else max(0, last - window + 1), last + 1)
        lists = [sorted({*dice.sample(seen, min(len(seen) - 1, 90)), last}) for _ in range(heads)]
        named = [[place if place < self.kv.slots else self.kv.slots + path[place - self.kv.slots]
                  for place in places] for places in lists]
        longest = max(map(len, named))
        return torch.tensor([[-1] * (longest - len(one)) + one for one in named], dtype=torch.int32)

    def _choices(self, nodes: range) -> list[SlotChoice | None]:
        case, slots = self.kv.case, self.kv.slots + nodes[-1] + 1
        roles = bytes(0 if case.windows[layer] else 3 if self.reads == "labelled" else 1 + layer
                      for layer in range(LAYERS))
        labels = self._labels(slots) if self.reads == "labelled" else None
        return [SlotChoice(COUNT, roles, slots, labels, apart=bool(self.seed % 2))] * len(nodes)

    def _labels(self, slots: int) -> SlotLabels:
        case, dice = self.kv.case, torch.Generator().manual_seed(self.seed)
        dims = torch.randint(case.head_dim, (LAYERS, case.kv_heads, WIDTH), generator=dice, dtype=torch.int32)
        groups = (slots + ROOM) // LANES + 3
        buffers = [torch.zeros(case.kv_heads, groups, WIDTH, LANES, dtype=case.kv_dtype) for _ in range(LAYERS)]
        return SlotLabels(dims, buffers, [0] * LAYERS)


def models(form: str) -> list[tuple[Case, NativeModel]]:
    """A tiny model for each shape and set of windows."""
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    plain = Case(layers=LAYERS, windows=WINDOWS[0], positions=LONGEST + ROOM, kv_dtype=dtype)
    cases = [replace(plain, **shape, windows=windows) for shape in SHAPES for windows in WINDOWS]  # type: ignore[arg-type]
    return [(case, make_reference(case).native) for case in cases]


def trials(form: str, reads: str, count: int, seed: int = 0) -> list[Trial]:
    """Random ones, many of them where nodes stand across the ends of chunks and splits of slots."""
    dice, made = random.Random(f"{form} {reads} {seed}"), models(form)
    found = []
    for number in range(count):
        case, model = dice.choice(made)
        slots = dice.choice((dice.randint(0, 40), dice.randint(50, 70), dice.randint(480, 530), dice.randint(0, 900)))
        start = dice.choice((0, 0, dice.randint(1, 100)))
        kv = StoredText(form, case, slots, start, seed=number)
        tree = random_tree(dice, dice.choice((5, 14, 30, 64)))
        found.append(Trial(model, kv, tree, reads, dice.choice((1, 2)), dice.random() < 0.3, number))
    return found
