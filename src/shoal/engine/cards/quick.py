"""Make a model's card: what each layer is worth, and how few layers the model bears.

A card holds what carries over from machine to machine: divergences, counts and shares of bytes. No times. Where nobody
gives texts to measure on, the model's own answers to a few prompts of different kinds are those.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shoal.compat import installed_version
from shoal.depth.budget import lowest_mean
from shoal.depth.order import ascending, core_for
from shoal.engine.cards import card as cards
from shoal.engine.cards.card import BEARABLE, FORMAT, Card
from shoal.engine.cards.divergence import DivergenceSums, Judged, Text
from shoal.engine.engine import Engine
from shoal.engine.request import prompt_ids
from shoal.errors import Unsupported
from shoal.methods.d3 import D3

log = logging.getLogger(__name__)

_LADDER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Mean numbers of layers left out at which the model's tolerance is measured, gentlest first."""
_ANSWERING, _BEARING = 0.3, 0.25
"""Shares of the time for the answers and, after the layers, for the tolerance."""
ASKED = (
    "Why do leaves change their colour in autumn?",
    "Write a short letter to a friend about a walk by the sea.",
    "A train leaves at 14:10 and arrives at 16:45. How long does it take? Explain each step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name three ways to save water at home and say which one saves most.",
    "Summarise the story of Noah's ark in four sentences.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: The library opens at nine and closes at six.",
    "Give me a recipe for a simple vegetable soup.",
    "Explain to a child how a rainbow comes about.",
    "Which is larger, 3/4 or 5/7? Show your work.",
    "List five animals that live in the desert.",
    "Write a polite answer to a customer whose parcel is late.",
    "What does the HTTP status code 404 mean, and what should a server send with it?",
    "Describe the city where you would like to live.",
    "How does a bicycle stay upright?",
)
BEGUN = (
    "The old lighthouse had stood on the cliff for more than a hundred years, and",
    "In mathematics, a prime number is a natural number greater than 1 that",
    "The river rises in the mountains in the north of the country and flows",
    "def binary_search(values, target):\n",
    "She opened the door slowly and saw that the room was empty. On the table",
    "The company was founded in 1923 by two brothers who",
    "Photosynthesis is the process by which plants",
    "The first season of the series was broadcast in the autumn of",
)


class OutOfTime(ValueError):
    """The time did not suffice for a single text."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        seconds: end then, with what there is; None for no limit.
        tokens: about how many tokens of answers are judged.
        answer: the longest answer.
        every: one token in this many is judged.
    """

    seconds: float | None = 60.0
    tokens: int = 2000
    answer: int = 96
    every: int = 1


def measure_card(
    engine: Engine, texts: Sequence[Text] | None = None, effort: Effort | None = None, *, progress: bool | None = None,
    source: str = "its own answers",
) -> dict[str, Any]:
    """Measure a card; returns its JSON.

    Args:
        engine: the model, at the precision in which it is to be judged.
        texts: prompts with answers in token ids; None lets the model answer a few prompts itself.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.
        source: what the texts are, for the card.

    Raises:
        OutOfTime: the time did not suffice for a single text.
        ValueError: there is no text to judge by.
        Unsupported: the model has an encoder.
    """
    if engine.encoder is not None:
        raise Unsupported("a card of a model with an encoder", "layers are measured on texts without a source",
                          "Leave layers out by their position")
    effort = effort or Effort()
    began = time.monotonic()

    def left(share: float) -> Callable[[], bool]:
        until = None if effort.seconds is None else began + share * effort.seconds
        return lambda: until is None or time.monotonic() < until

    layers = engine.runner.num_layers
    hidden = None if progress is None else not progress
    with tqdm(total=1.0, desc="measuring the layers", bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}",
              disable=hidden) as bar:
        if texts is None:
            limit = None if effort.seconds is None else _ANSWERING * effort.seconds
            texts = answered(engine, asked(engine), effort.answer, limit)
        texts = [text for text in texts if len(text[1]) > 1]
        if not texts:
            raise ValueError("no text holds a prompt and an answer of two tokens; give longer ones, or more time")
        without, influence, count = _layers(engine, texts, effort, left(1 - _BEARING), bar)
        scores = [part.mean for part in without]
        order = ascending(scores, range(layers), layers)  # of all layers: the core is for a method to choose
        curve = _curve(engine, texts[:count], effort, order, left(1.0), bar)
        bar.update(max(0.0, 1.0 - bar.n))
    return {
        "format": FORMAT,
        "model": cards.identity(engine),
        "order": list(order),
        "layer_scores": {"leave_one_out": _rounded(scores), "influence": _rounded(influence)},
        "agreement": _rounded(part.agreement for part in without),
        **_by_kind(engine.info().attends, scores),
        "bears": {"kl": BEARABLE, "mean_layers": bearable(layers, curve) if curve else None, "curve": curve},
        "bytes": {"head_layers": round(engine.runner.head_layers, 3)},  # of the model's shape, not of a machine
        "measured": {"score": "KL in nats per token without the layer, teacher-forced", "texts": count,
                     "tokens": without[0].tokens, "source": source,
                     "dtype": str(engine.runner.dtype).removeprefix("torch."), "machine": platform.machine(),
                     "torch": torch.__version__, "shoal": installed_version("shoal")},
    }


def _by_kind(attends: Sequence[bool], scores: Sequence[float]) -> dict[str, Any]:
    """Of a hybrid, the layers of each kind and the mean cost of leaving one of them out."""
    kinds = {"attention": True, "recurrent": False}
    layers = {kind: [layer for layer, own in enumerate(attends) if own == wanted] for kind, wanted in kinds.items()}
    if not all(layers.values()):
        return {}
    return {"by_kind": {kind: {"layers": mine, "leave_one_out": round(sum(scores[one] for one in mine) / len(mine), 5)}
                        for kind, mine in layers.items()}}


def bearable(num_layers: int, curve: Sequence[Sequence[float]], most: float = BEARABLE) -> float:
    """The mean depth at which KL reaches `most`, between the points (mean depth, KL, agreement), deepest first."""
    depth, kl = float(num_layers), 0.0
    for lower, higher_kl, *_ in curve:
        if higher_kl > most:
            return round(depth - (depth - lower) * max(0.0, most - kl) / (higher_kl - kl), 2)
        depth, kl = lower, higher_kl
    return depth


def _layers(
    engine: Engine, texts: Sequence[Text], effort: Effort, wanted: Callable[[], bool], bar: Any
) -> tuple[list[DivergenceSums], Tensor, int]:
    """Sums without each layer, its influence on a token, and the number of texts: whole ones, while time lasts."""
    layers = engine.runner.num_layers
    without, turns = [DivergenceSums() for _ in range(layers)], torch.zeros(layers, dtype=torch.float64)
    goal, turned, count = min(effort.tokens, sum(len(answer) - 1 for _, answer in texts)), 0, 0
    for text in texts:
        judged = Judged(engine.runner, text, effort.every)
        parts = []
        for layer in range(layers):
            late = not wanted()
            if late and count:
                return without, turns / turned, count
            if late and 4 * layer < 3 * layers:
                raise OutOfTime("the time does not suffice to leave out each layer on a single text; give more of it")
            parts.append(judged.without(layer))
            bar.update(0.75 * (len(text[1]) - 1) / (goal * layers))
        for sums, part in zip(without, parts, strict=True):
            sums.add(part)
        turns, turned, count = turns + judged.turn(), turned + len(text[1]) - 1, count + 1
        if turned >= effort.tokens:
            break
    return without, turns / turned, count


def _curve(
    engine: Engine, texts: Sequence[Text], effort: Effort, order: tuple[int, ...], wanted: Callable[[], bool], bar: Any
) -> list[list[float]]:
    """[mean depth, KL, agreement] of D3 in this order, deepest first, until KL exceeds what the model bears."""
    layers = engine.runner.num_layers
    core = core_for(layers, least=engine.info().core_head)
    removal = tuple(layer for layer in order if layer in core.flex(layers))
    shortest = min(len(answer) for _, answer in texts)
    least = lowest_mean(layers, shortest, 0.0, core.size)
    sums = {layers - fewer: DivergenceSums() for fewer in _LADDER if layers - fewer >= least}
    depths: dict[float, float] = {}
    for text in texts[: max(1, len(texts) // 2)]:
        if not wanted():
            break
        judged, tokens = Judged(engine.runner, text, effort.every), len(text[1])
        for mean in list(sums):
            plan = engine.recipe(D3(mean=mean, order=removal, horizon=tokens), tokens).plan
            sums[mean].add(judged.under(plan))
            depths[mean] = plan.mean_depth(tokens)  # floors make it a little more than `mean`
            if sums[mean].mean > 2 * BEARABLE:  # the deeper cuts are worse still
                sums = {kept: part for kept, part in sums.items() if kept >= mean}
                break
        bar.update(0.25 / len(texts))
    return [[round(depths[mean], 2), round(part.mean, 4), round(part.agreement, 4)]
            for mean, part in sums.items() if part.tokens]


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 5) for value in values]


def quick_card(engine: Engine, *, seconds: float = 60.0, keep: bool = True, progress: bool | None = None) -> Card:
    """Measure an engine's layers on a few of its own answers, use the result, and keep it for the next time.

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
    engine.card = Card.from_dict(data, engine.runner.num_layers)
    if keep:
        try:
            cards.keep(data)
        except OSError as error:
            log.warning("the card of %s is not kept for the next start: %s", engine.model_name or "the model", error)
    return engine.card


def asked(engine: Engine, questions: Sequence[str] = ASKED, begun: Sequence[str] = BEGUN) -> list[list[int]]:
    """Token ids of prompts: questions where the tokenizer has a chat template, else beginnings of texts."""
    tokenizer, runner, prompts = engine.tokenizer, engine.runner, list[Any](begun)
    if getattr(tokenizer, "chat_template", None):
        prompts = [[{"role": "user", "content": question}] for question in questions]
    return [prompt_ids(one, tokenizer, runner.vocab_size, runner.max_positions) for one in prompts]


def answered(
    engine: Engine, prompts: Sequence[list[int]], new_tokens: int, seconds: float | None = None, together: int = 8
) -> list[Text]:
    """The model's answer to each prompt: greedy if it chats, else drawn with a fixed seed, since base models repeat.

    Args:
        new_tokens: the longest answer.
        seconds: stop then and return what there is; None for no limit.
        together: prompts decoded at once.
    """
    texts: list[Text] = []
    chats = bool(getattr(engine.tokenizer, "chat_template", None))
    until = None if seconds is None else time.monotonic() + seconds
    for first in range(0, len(prompts), together):
        part = list(prompts[first : first + together])
        answers: list[list[int]] = [[] for _ in part]
        with engine.stream(part, max_new_tokens=new_tokens, temperature=0.0 if chats else 1.0, seed=first,
                           method="full") as stream:
            for step in stream:
                answers[step.seq].append(step.token)
                if until is not None and time.monotonic() > until:
                    break
        texts += [(one, answer) for one, answer in zip(part, answers, strict=True) if len(answer) > 1]
        if until is not None and time.monotonic() > until:
            break
    return texts
