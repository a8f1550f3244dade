"""`shoal prune` to a size or a speed: remove the least that reaches it.

A size is that of the file, or of a folder's safetensors. A speed is predicted by the cost card: whole steps of the
original model are timed at several depths, and a layer's time is proportional to its weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common

if TYPE_CHECKING:
    from shoal.engine.loading.checkpoint import Checkpoint
    from shoal_lab.components.cost import CostCard

Pick = Callable[[float], tuple[Any, dict[str, Any]]]
"""Returns the change that removes a share of the neurons or a number of layers, and its fields of the note."""
Noted = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Returns the whole note from the fields about the change."""
SHARES = tuple(number / 10_000 for number in range(1, 10_000))
_PROMPT, _NEW = 128, 128
"""Tokens of the prompt, and of the answer over whose steps a speed is averaged."""


def check(args: argparse.Namespace) -> None:
    """Refuse an invalid size or speed before anything is read."""
    from shoal.engine.memory.amounts import parse

    if args.bytes is not None:
        args.bytes = parse(args.bytes)
    if args.speed is not None and not 1 < args.speed < math.inf:
        raise ValueError(f"--speed is {args.speed}; it must be above 1, such as 1.2 for a fifth more tokens per second")


class Goal:
    """The size or speed to reach.

    Args:
        args: with `bytes` or `speed`.
        files: the checkpoint to prune.
        noted: as in `Noted`.
        to_file: whether a GGUF file is written.
        card: cost of steps; None measures it when needed.
    """

    def __init__(self, args: argparse.Namespace, files: Checkpoint, noted: Noted, to_file: bool,
                 card: CostCard | None = None) -> None:
        self._args, self._files, self._noted, self._to_file = args, files, noted, to_file
        self._config = files.config()
        self.card = card
        if args.speed is None:
            self._told: dict[str, Any] = {"bytes": args.bytes}
        else:
            self.card = self.card or measured(args)
            self._told = {"speed": args.speed, "cost": self.card.to_dict()}
        if args.speed is None and not to_file:
            from shoal.engine.loading.checkpoint import named
            from shoal_lab.prune.write_checkpoint import Outline

            self._outline = Outline(named(files.weights(), files.name))

    def least(self, amounts: Sequence[float], pick: Pick) -> tuple[Any, dict[str, Any]]:
        """The least sufficient amount, by bisection: removing more is never larger or slower.

        Args:
            amounts: ascending amounts.
            pick: makes the change of an amount.

        Raises:
            ValueError: the model is small or fast enough already, or no amount suffices.
        """
        if self._args.speed is None and (now := self._bytes(_nothing, {})) <= self._args.bytes:
            raise ValueError(f"--bytes is {self._args.bytes}, and the model as it is would come to {now}: nothing has "
                             "to be left out. Use it as it is, or ask for less")
        last = self._reached(*pick(amounts[-1]))
        if not self._suffices(last):
            raise ValueError(f"{self._wish()}, and {self._shown(last)} is the best that can be reached this way; ask "
                             "for that, or start from a smaller model")
        low, high = -1, len(amounts) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._suffices(self._reached(*pick(amounts[middle]))) else (middle, high)
        change, why = pick(amounts[high])
        return change, self._with_target(change, why)

    def _with_target(self, change: Any, why: dict[str, Any]) -> dict[str, Any]:
        """The note with the target, and with the prediction of a speed."""
        if self._args.speed is None:
            return {**why, "target": self._told}
        return {**why, "target": {**self._told, "predicted": round(self._times_faster(change), 4)}}

    def _reached(self, change: Any, why: dict[str, Any]) -> float:
        return self._times_faster(change) if self._args.speed is not None else self._bytes(change, why)

    def _suffices(self, reached: float) -> bool:
        return bool(reached <= self._args.bytes if self._args.speed is None else reached >= self._args.speed)

    def _wish(self) -> str:
        args = self._args
        return f"--bytes is {args.bytes}" if args.speed is None else f"--speed is {args.speed}"

    def _shown(self, reached: float) -> str:
        return f"{reached:.0f} bytes" if self._args.speed is None else f"{math.floor(100 * reached) / 100:g} times"

    def _bytes(self, change: Any, why: dict[str, Any]) -> int:
        from shoal.engine.loading.device import as_dtype
        from shoal_lab.prune import write_gguf
        from shoal_lab.prune.write_checkpoint import folder_bytes

        if self._to_file:
            source = Path(place(self._args))
            return source.stat().st_size if change is _nothing else write_gguf.size(
                source, change, self._noted({**why, "target": self._told}), self._args.down)
        dtype = self._args.dtype and as_dtype(self._args.dtype)
        return folder_bytes(self._config, self._outline, change, dtype)

    def _times_faster(self, change: Any) -> float:
        assert self.card is not None
        return times_faster(self.card, self._config, change)


def times_faster(card: CostCard, config: Any, change: Any) -> float:
    """How many times faster decoding is without what a change removes, predicted by the card.

    A layer's time is proportional to its weights; kept layers read their KV, up to their windows; LM head and overhead
    stay.

    Args:
        card: of the model before the change.
        config: of that model.
        change: `DropLayers` or `NarrowMLPs`.
    """
    from shoal.depth.plan import DepthPlan
    from shoal.model.transform import DropLayers

    count = len(card.windows)
    if isinstance(change, DropLayers):
        stay, share = [layer for layer in range(count) if layer not in change.layers], 1.0
    else:
        stay, share = list(range(count)), _weights_left(config, [len(kept) for kept in change.kept])
    after = dataclasses.replace(card, layer_seconds=share * card.layer_seconds,
                                windows=tuple(card.windows[layer] for layer in stay))
    before, now = (one.tpot(DepthPlan.full(len(one.windows)), _PROMPT, _NEW) for one in (card, after))
    return before / now


def _weights_left(config: Any, widths: Sequence[int]) -> float:
    """The share of the layers' weights that is left with MLPs of these widths."""
    from shoal.model.config import widths_of

    text = config.get_text_config()
    heads, hidden = text.num_attention_heads, text.hidden_size
    size = getattr(text, "head_dim", None) or hidden // heads
    kv = getattr(text, "num_key_value_heads", None) or heads
    attention = 2 * hidden * size * (heads + kv)
    before, now = (sum(attention + 3 * hidden * width for width in some) for some in (widths_of(config), widths))
    return float(now / before)


def place(args: argparse.Namespace) -> str:
    """Where the model is."""
    from shoal import catalog

    return catalog.find(args.model)


def _nothing(config: Any, source: Any) -> tuple[Any, Any]:
    """The change that changes nothing."""
    return config, source


def measured(args: argparse.Namespace) -> CostCard:
    """Measure the cost of the model's steps on this machine."""
    from shoal.heap import give_back
    from shoal_lab.calibrate import cost

    found = cost.measure(common.load_engine(args))
    gc.collect()  # the model is loaded again next
    give_back()
    return found
