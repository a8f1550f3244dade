"""`shoal prune cfsp`, `ppm` and, with trained gates, `consensus`: which neurons of the MLPs are kept."""

from __future__ import annotations

import argparse
import gc
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.engine.loading.checkpoint import Checkpoint
    from shoal.model.transform import NarrowMLPs
    from shoal_lab.cli.prune_target import Pick

_PIECE, _PIECES = 512, 32
"""Tokens of a piece of calibration text, and most pieces."""


def check(args: argparse.Namespace) -> None:
    """Refuse invalid options before anything is read."""
    if args.layers is not None or args.drop is not None:
        raise ValueError(f"{args.what} leaves neurons out, not layers; say which share of them goes with --share, or "
                         "what is to be reached with --bytes or --speed")
    if args.share is not None and not 0 <= args.share < 1:
        raise ValueError(f"--share is {args.share}; it must be at least 0 and below 1, such as 0.2")
    if args.multiple < 1:
        raise ValueError(f"--multiple is {args.multiple}; it must be at least 1 neuron")
    if args.by:
        raise ValueError(f"--by chooses among layers and {args.what} leaves out neurons; leave it out")
    if args.what == "ppm" and (args.form or args.text):
        raise ValueError("ppm looks at the weights alone; --form and --text are for cfsp")
    if args.what == "consensus" and (args.form or args.random is not None):
        raise ValueError("consensus learns which neurons go; --form is for cfsp, --random for cfsp and ppm")


def picker(args: argparse.Namespace, files: Checkpoint) -> Pick:
    """Returns a function that makes the change of a share, and its fields of the note."""
    import torch

    from shoal.engine.loading.checkpoint import named
    from shoal.model.transform import gated_widths
    from shoal_lab.calibrate import neurons

    source = named(files.weights(), files.name)
    widths = gated_widths(files.config(), source)
    why: dict[str, Any] = {"by": args.what, "multiple": args.multiple}
    turns: Sequence[float] | None = None
    if args.what == "ppm":
        scores = neurons.peak_to_peak(source)
    else:
        form: neurons.Form = args.form or "stated"
        texts = _texts(args, files)  # before the modules are loaded, so that the model is not in memory twice
        gc.collect()  # frames of imports may hold the engine
        seen = neurons.activity(files.model(_dtype(args)).eval(), texts)
        scores, turns = neurons.cfsp(source, seen, form), None if args.uniform else seen.turns
        why |= {"form": form, "uniform": args.uniform, "tokens": seen.tokens,
                "text": args.text.name if args.text else "what the model says to prompts of Shoal's",
                "turns": [round(turn, 5) for turn in seen.turns]}
    if args.random is not None:
        dice = torch.Generator().manual_seed(args.random)
        scores = [torch.rand(width, generator=dice) for width in widths]
        why["random"] = args.random

    def pick(share: float) -> tuple[NarrowMLPs, dict[str, Any]]:
        shares = [1 - share] * len(widths) if turns is None else neurons.shares(turns, share)
        return left(scores, shares, widths, {**why, "share": share})

    return pick


def even(args: argparse.Namespace, files: Checkpoint) -> Pick:
    """The same for sizes alone: the last neurons of every layer go, equally many of each."""
    import torch

    from shoal.engine.loading.checkpoint import named
    from shoal.model.transform import gated_widths

    widths = gated_widths(files.config(), named(files.weights(), files.name))
    return lambda share: left([-torch.arange(width) for width in widths], [1 - share] * len(widths), widths,
                              {"by": args.what, "multiple": args.multiple, "share": share})


def left(
    scores: Sequence[Tensor], shares: Sequence[float], widths: Sequence[int], why: dict[str, Any]
) -> tuple[NarrowMLPs, dict[str, Any]]:
    """The change that keeps a share of each layer's neurons, in multiples, by their scores.

    Of agreed gates at least that share is kept: open gates are all alike.
    """
    from shoal.model.transform import NarrowMLPs
    from shoal_lab.calibrate import neurons

    kept = neurons.best(scores, neurons.counts(shares, widths, why["multiple"], up=why["by"] == "consensus"))
    return NarrowMLPs(kept), {
        **why, "widths": [len(layer) for layer in kept], "of": round(sum(widths) / len(widths)),
        "neurons": hashlib.sha256(repr(kept).encode()).hexdigest()[:16]}


def _dtype(args: argparse.Namespace) -> Any:
    from shoal.engine.loading.device import as_dtype, default_dtype, device_of

    return as_dtype(args.dtype) if args.dtype else default_dtype(device_of("cpu"))


def _texts(args: argparse.Namespace, files: Checkpoint) -> list[list[int]]:
    """Pieces of the given text, or of the model's own answers."""
    if args.text is not None:
        ids = files.tokenizer()(args.text.read_text(encoding="utf-8-sig"))["input_ids"]
        return [ids[at : at + _PIECE] for at in range(0, min(len(ids), _PIECES * _PIECE), _PIECE)]
    from shoal.engine.cards.quick import answered, asked

    engine = common.load_engine(args)
    return [[*prompt, *answer] for prompt, answer in answered(engine, asked(engine), 128)]
