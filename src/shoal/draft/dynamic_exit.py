"""Choosing exit layer and draft length from shadow tokens: what every exit would have said of tokens just verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.decode.tree import TokenTree
from shoal.depth.plan import NEVER, DepthPlan
from shoal.draft.exits import Exit, best_block
from shoal.draft.forwards import Draft, ShallowDrafter, confidences
from shoal.draft.per_row import PerRow
from shoal.model.rewind import earliest, rewound
from shoal.model.stack import Feed

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.draft.dynamic import DynamicExit
    from shoal.model.kv import KVCache
    from shoal.model.stack import Stack, Tap


@dataclass
class _State:
    """A row's exits, and what it does now."""

    exits: dict[int, Exit]
    length: int = 0
    fresh: bool = True
    idle: int = 0


@dataclass(frozen=True)
class _Capture:
    """A row whose states were shown: its place among them, its tree, and how many tokens it had."""

    row: Row
    place: int
    tree: TokenTree
    tokens: int

    def path(self) -> tuple[list[int], list[int]]:
        """The nodes that were kept, and the target's token after each of them."""
        after = self.row.tokens[self.tokens :]
        nodes = [0]
        for token in after[:-1]:
            child = self.tree.child(nodes[-1], token)
            if child is None:
                break
            nodes.append(child)
        return nodes, after[: len(nodes)]


class DynamicDrafter(ShallowDrafter):
    """See `shoal.draft.dynamic.DynamicExit`. Every row has estimates of its own."""

    def __init__(self, proposer: DynamicExit, stack: Stack, cache: KVCache) -> None:
        super().__init__(proposer, stack, cache)
        self._settings = proposer
        self._states = PerRow(lambda _: _State({exit_layer: Exit(proposer.memory) for exit_layer in proposer.exits}))
        self._captures: list[_Capture] = []
        self._hidden: dict[int, Tensor] = {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """Learn from the block before, then draft."""
        self._learn()
        for row in rows:
            if self._states[row].fresh and self._settings.window:
                self._look_back(row)
        return super().propose(rows, limits)

    def draft(self, row: Row, limit: int) -> Draft:
        """As long and as deep as the estimates say; one guess from the first exit while there are none."""
        one, state = self._settings, self._states[row]
        if state.fresh:
            exit_layer, state.length = one.exits[0], 1
        else:
            rates = {exit_layer: known.rate for exit_layer, known in state.exits.items()}
            exit_layer, state.length = best_block(rates, one.longest, self.stack.num_layers, one.head)
        state.idle = 0 if state.length else state.idle + 1
        plan = first_layers(exit_layer, self.stack.num_layers)
        return Draft(row, plan, min(state.length, limit), state.exits[exit_layer].threshold)

    def watch(self, rows: Sequence[Row], trees: Sequence[TokenTree]) -> Tap | None:
        """Keep the states at every exit of the rows that draft, and now and then of those that do not."""
        self._hidden = {}
        self._captures = [
            _Capture(row, place, tree, len(row.tokens))
            for place, (row, tree) in enumerate(zip(rows, trees, strict=True))
            if self._states[row].idle % self._settings.probe == 0
        ]
        return self._keep if self._captures else None

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if layer in self._settings.exits:
            self._hidden[layer] = hidden

    def _learn(self) -> None:
        """From the states of the last forward, now that it is known what was kept."""
        alive = [one for one in self._captures if one.row.finish_reason is None and len(one.row.tokens) > one.tokens]
        self._captures = []
        if not alive:
            return
        paths = [one.path() for one in alive]
        places = [(one.place, nodes) for one, (nodes, _) in zip(alive, paths, strict=True)]
        states = torch.cat([hidden[place, nodes] for place, nodes in places for hidden in self._hidden.values()])
        tokens, sure = self._said(states)
        for one, (nodes, targets) in zip(alive, paths, strict=True):
            self._judge(one.row, targets, tokens, sure)
            del tokens[: len(nodes) * len(self._hidden)], sure[: len(nodes) * len(self._hidden)]

    def _said(self, states: Tensor) -> tuple[list[int], list[float]]:
        """Shadow tokens of states [N, D], and how confident they are."""
        logits = self.stack.exit_logits(states)
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens, confidences(logits)

    def _judge(self, row: Row, targets: Sequence[int], tokens: Sequence[int], sure: Sequence[float]) -> None:
        """Compare what each exit said (exit after exit) with what the target said."""
        state, count = self._states[row], len(targets)
        row.ledger.heads_read += 1
        state.fresh = False
        for index, exit_layer in enumerate(self._hidden):
            span = slice(index * count, (index + 1) * count)
            hits = [said == meant for said, meant in zip(tokens[span], targets, strict=True)]
            state.exits[exit_layer].learn(hits, sure[span])

    @torch.no_grad()
    def _look_back(self, row: Row) -> None:
        """Run the last tokens once more, to see what the exits say of them."""
        end = self.cache.positions[row.slot]
        count = min(self._settings.window, end - earliest(self.cache, row.slot))
        if count < 1:
            return
        self._hidden = {}
        plan = row.recipe.plan
        feed = Feed(row.slot, row.tokens[end - count : end], [0] * count, plan, wanted=count)
        with rewound(self.cache, row.slot, end - count):
            targets = self.stack.forward([feed], self.cache, self._keep).argmax(-1).tolist()
        row.ledger.draft_forwards += 1
        row.ledger.draft_layer_tokens += count * plan.num_layers
        row.ledger.read(plan.num_layers)
        states = torch.cat([hidden[0, :count] for hidden in self._hidden.values()])
        self._judge(row, targets, *self._said(states))


def first_layers(count: int, num_layers: int) -> DepthPlan:
    """The plan that runs the first `count` layers from step 1 on."""
    return DepthPlan.whole_layers([NEVER if layer < count else 1 for layer in range(num_layers)])
