"""What an answer will cost by joining at once and in waves, if the next answers are like the recent ones.

A tick reads a layer's weights once if any row runs the layer, so what counts is how long so many rows keep each
sublayer busy between them. With `life` for the ticks in which an answer runs a sublayer, and n rows at all times:

    joining   rows are at unrelated steps; a tick spares a sublayer if none of n runs it: (1 - share of ticks)^n
    waves     n answers start together; a sublayer is busy until the longest of n lives ends, the head until the
              longest answer does

Everything that is paid per row (reading the prompt, attention, arithmetic) is the same in both. It does not decide,
but it is counted, so that a gain is a gain of all the time. Guessing forwards are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.decode.row import Row
from shoal.model.cost import CostCard


@dataclass(frozen=True)
class Pace:
    """Seconds of the parts of a tick over any number of rows.

    Attributes:
        tick: head and overhead, whatever the number of rows.
        layer: reading one layer's weights, whatever the number of rows.
        row: what a row adds to head and overhead.
        layer_row: what a row adds to a layer that it runs.
        card: measured with as many rows as there may be; for attention and prompts.
    """

    tick: float
    layer: float
    row: float
    layer_row: float
    card: CostCard

    @classmethod
    def between(cls, one: CostCard, many: CostCard) -> Pace:
        """Straight lines through the costs of one row and of many; level ones where many should cost less than one.

        Args:
            one: measured with one row.
            many: measured with at least two.
        """
        layer, layer_row = _line(one.layer_seconds, many.layer_seconds, many.rows)
        tick, row = _line(_fixed(one), _fixed(many), many.rows)
        return cls(tick, layer, row, layer_row, many)


def _fixed(card: CostCard) -> float:
    return card.head_seconds + card.overhead_seconds


def _line(one: float, many: float, rows: int) -> tuple[float, float]:
    """Constant and slope per row, neither below zero."""
    slope = min(max((many - one) / (rows - 1), 0.0), many / rows)
    return many - rows * slope, slope


@dataclass(frozen=True)
class Answer:
    """What an answer that has ended took.

    Attributes:
        ticks: forwards after its prompt.
        lives: for every sublayer, attentions first, the ticks that ran it.
        prompt: prompt tokens.
        read: those of them that were run.
    """

    ticks: int
    lives: tuple[int, ...]
    prompt: int
    read: int

    @classmethod
    def of(cls, row: Row) -> Answer:
        """A row's. One that drafts counts as if it needed every layer: it checks several steps in a forward."""
        ledger, plan = row.ledger, row.recipe.plan
        ticks = ledger.target_forwards - ledger.prefill_forwards
        drops = plan.attention + plan.mlp
        plain = row.recipe.proposer is None
        lives = tuple(min(drop - 1, ticks) if plain else ticks for drop in drops)
        return cls(ticks, lives, row.prompt_length, ledger.prefill_tokens)

    def own_seconds(self, pace: Pace) -> float:
        """What it costs whoever decodes beside it; a window counts by the mean position of the ticks."""
        card, half = pace.card, len(self.lives) // 2
        places = ((life, self.prompt + (life + 1) / 2) for life in self.lives[:half])
        seen = sum(
            life * (place if window is None else min(window, place))
            for (life, place), window in zip(places, card.windows, strict=True)
        )
        rows = self.ticks * pace.row + sum(self.lives) / 2 * pace.layer_row
        return rows + (seen * card.kv_seconds_per_position + card.prefill_seconds(self.read)) / card.rows


@dataclass(frozen=True)
class Forecast:
    """Seconds per answer.

    Attributes:
        join: where rows join at once.
        waves: where they start together.
    """

    join: float
    waves: float

    @classmethod
    def of(cls, answers: Sequence[Answer], rows: int, pace: Pace) -> Forecast:
        """For so many rows at all times.

        Args:
            answers: recent ones, at least `rows`.
            rows: how many decode together.
            pace: what ticks cost.
        """
        count = len(answers)
        own = sum(answer.own_seconds(pace) for answer in answers) / count
        ticks = [answer.ticks for answer in answers]
        columns = [(pace.tick, ticks)]
        columns += [(pace.layer / 2, list(lives)) for lives in zip(*(one.lives for one in answers), strict=True)]
        total = max(1, sum(ticks))
        join = sum(cost * (1 - (1 - sum(lives) / total) ** rows) for cost, lives in columns) * total / count
        waves = sum(cost * _longest(lives, rows) for cost, lives in columns)
        return cls(own + join / rows, own + waves / rows)


def _longest(lives: Sequence[int], rows: int) -> float:
    """The mean of the longest life among `rows` different answers, over all ways to choose them."""
    ways = math.comb(len(lives), rows)
    return sum(life * (math.comb(place, rows - 1) / ways) for place, life in enumerate(sorted(lives)))
