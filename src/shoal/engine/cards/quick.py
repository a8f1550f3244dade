"""Make a model's card: what each layer is worth, and how few layers the model bears.

A card holds what carries over from machine to machine: divergences, counts and shares of bytes. No times.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from shoal.compat import installed_version
from shoal.depth.budget import lowest_mean
from shoal.depth.order import ascending, default_core
from shoal.engine.cards import places as cards
from shoal.engine.cards.card import BEARABLE, FORMAT, Card
from shoal.engine.cards.divergence import DivergenceSums, Judged, Text
from shoal.engine.cards.own_texts import answered, asked
from shoal.engine.engine import Engine
from shoal.methods.d3 import D3

log = logging.getLogger(__name__)
_LADDER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Mean numbers of layers left out at which the model's tolerance is measured, gentlest first."""
_ANSWERING = 0.3
_BEARING = 0.25
"""Shares of the time for the answers and, after the layers, for the tolerance."""


class OutOfTime(ValueError):
    """The time did not suffice for a single text."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        seconds: end then, with what there is; None for no limit.
        tokens: tokens of answers to judge, about.
        answer: the longest answer.
        every: of the tokens every so many-th is judged.
    """

    seconds: float | None = 60.0
    tokens: int = 2000
    answer: int = 96
    every: int = 1


def measure_card(
    engine: Engine,
    texts: Sequence[Text] | None = None,
    effort: Effort | None = None,
    *,
    progress: bool | None = None,
    source: str = "its own answers",
) -> dict[str, Any]:
    """Measure a card.

    Args:
        engine: the model, at the precision in which it is to be judged.
        texts: prompts with answers in token ids; None lets the model answer a few prompts itself.
        effort: how much is measured.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.
        source: what the texts are, for the card.

    Returns:
        The card as JSON.

    Raises:
        OutOfTime: the time did not suffice for a single text.
        ValueError: there is no text to judge by.
    """
    effort = effort or Effort()
    began = time.monotonic()

    def left(share: float) -> Callable[[], bool]:
        until = None if effort.seconds is None else began + share * effort.seconds
        return lambda: until is None or time.monotonic() < until

    layers = engine.stack.num_layers
    hidden = None if progress is None else not progress
    with tqdm(total=1.0, desc="measuring the layers", bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}",
              disable=hidden) as bar:
        if texts is None:
            limit = None if effort.seconds is None else _ANSWERING * effort.seconds
            texts = answered(engine, asked(engine), effort.answer, limit)
        texts = [text for text in texts if len(text[1]) > 1]
        if not texts:
            raise ValueError("no text holds a prompt and an answer of two tokens; give longer ones, or more time")
        found = _LayerSums(layers)
        _layers(engine, texts, effort, found, left(1 - _BEARING), bar)
        order = ascending(found.scores(), range(layers), layers)  # of all layers: the core is for a method to choose
        curve = _curve(engine, texts[: found.texts], effort, order, left(1.0), bar)
        bar.update(max(0.0, 1.0 - bar.n))
    return {
        "format": FORMAT,
        "model": cards.identity(engine),
        "order": list(order),
        "layer_scores": {"leave_one_out": _rounded(found.scores()), "influence": _rounded(found.influence())},
        "agreement": _rounded(part.agreement for part in found.without),
        "bears": {"kl": BEARABLE, "mean_layers": bearable(layers, curve) if curve else None, "curve": curve},
        "bytes": _bytes(engine),
        "measured": {"score": "KL in nats per token without the layer, teacher-forced", "texts": found.texts,
                     "tokens": found.without[0].tokens, "source": source, **_circumstances(engine)},
    }


def bearable(num_layers: int, curve: Sequence[Sequence[float]], most: float = BEARABLE) -> float:
    """The mean depth at which KL reaches `most`, between the points (mean depth, KL, agreement), deepest first."""
    depth, kl = float(num_layers), 0.0
    for lower, higher_kl, *_ in curve:
        if higher_kl > most:
            return round(depth - (depth - lower) * max(0.0, most - kl) / (higher_kl - kl), 2)
        depth, kl = lower, higher_kl
    return depth


class _LayerSums:
    """Sums of what was measured so far."""

    def __init__(self, layers: int) -> None:
        self.without = [DivergenceSums() for _ in range(layers)]
        self.turns, self.turned, self.texts = torch.zeros(layers, dtype=torch.float64), 0, 0

    def scores(self) -> tuple[float, ...]:
        return tuple(part.mean for part in self.without)

    def influence(self) -> tuple[float, ...]:
        return tuple((self.turns / max(self.turned, 1)).tolist())


def _layers(
    engine: Engine, texts: Sequence[Text], effort: Effort, found: _LayerSums, wanted: Callable[[], bool], bar: Any
) -> None:
    """Leave each layer out, text after text, until there are enough tokens or no time is left; whole texts count."""
    layers = engine.stack.num_layers
    goal = min(effort.tokens, sum(len(answer) - 1 for _, answer in texts))
    for text in texts:
        judged = Judged(engine.stack, text, effort.every)
        parts = []
        for layer in range(layers):
            if found.texts and not wanted():
                return
            if not found.texts and not wanted() and 4 * layer < 3 * layers:
                raise OutOfTime("the time does not suffice to leave out each layer on a single text; give more of it")
            parts.append(judged.without(layer))
            bar.update(0.75 * (len(text[1]) - 1) / (goal * layers))
        for sums, part in zip(found.without, parts, strict=True):
            sums.add(part)
        found.turns += judged.turn()
        found.turned += len(text[1]) - 1
        found.texts += 1
        if found.turned >= effort.tokens:
            return


def _curve(
    engine: Engine, texts: Sequence[Text], effort: Effort, order: tuple[int, ...], wanted: Callable[[], bool], bar: Any
) -> list[list[float]]:
    """[mean depth, KL, agreement] of D3 in this order, deepest first, up to where it is more than the model bears."""
    layers, core = engine.stack.num_layers, default_core(engine.stack.num_layers)
    removal = tuple(layer for layer in order if layer in core.flex(layers))
    shortest = min(len(answer) for _, answer in texts)
    least = lowest_mean(layers, shortest, 0.0, core.size)
    sums = {layers - fewer: DivergenceSums() for fewer in _LADDER if layers - fewer >= least}
    depths: dict[float, float] = {}
    for text in texts[: max(1, len(texts) // 2)]:
        if not wanted():
            break
        judged, tokens = Judged(engine.stack, text, effort.every), len(text[1])
        for mean in list(sums):
            plan = engine.recipe(D3(mean=mean, order=removal, horizon=tokens), tokens).plan
            sums[mean].add(judged.under(plan))
            depths[mean] = plan.mean_depth(tokens)  # floors make it a little more than what was asked for
            if sums[mean].mean > 2 * BEARABLE:  # the deeper cuts are worse still
                sums = {kept: part for kept, part in sums.items() if kept >= mean}
                break
        bar.update(0.25 / len(texts))
    return [[round(depths[mean], 2), round(part.mean, 4), round(part.agreement, 4)]
            for mean, part in sums.items() if part.tokens]


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 5) for value in values]


def _bytes(engine: Engine) -> dict[str, float]:
    """What the parts of a step read, in layers: a property of the model's shape, not of a machine."""
    return {"head_layers": round(engine.stack.head_layers, 3)}


def _circumstances(engine: Engine) -> dict[str, Any]:
    dtype = str(engine.stack.dtype).removeprefix("torch.")
    return {"dtype": dtype, "machine": platform.machine(), "torch": torch.__version__,
            "shoal": installed_version("shoal")}


def quick_card(
    engine: Engine, *, seconds: float = 60.0, keep: bool = True, progress: bool | None = None
) -> Card:
    """Measure an engine's layers on a few answers of its own, use the result, and keep it for the next time.

    Takes about `seconds`; the removal order and D3's default depth then follow from it.

    Args:
        engine: the model; its card is replaced.
        seconds: most time to spend.
        keep: whether the card goes to the user's cache, where `shoal.load` finds it; where that cannot be written, a
            warning says so.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.

    Raises:
        ValueError: the time does not suffice, the model answers nothing, or it fills masks.
    """
    engine.recipe("full", 1)
    data = measure_card(engine, effort=Effort(seconds), progress=progress)
    engine.card = Card.from_dict(data, engine.stack.num_layers)
    if keep:
        try:
            cards.keep(data)
        except OSError as error:
            log.warning("the card of %s is not kept for the next start: %s", engine.model_name or "the model", error)
    return engine.card
