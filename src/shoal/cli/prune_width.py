"""`shoal prune cfsp` and `shoal prune ppm`: which neurons of the MLPs stay, and by what."""

from __future__ import annotations

import argparse
import hashlib
from typing import TYPE_CHECKING, Any

from shoal.cli import common

if TYPE_CHECKING:
    from shoal.engine.checkpoint import Checkpoint
    from shoal.model.narrow import NarrowMLPs

_PIECE, _PIECES = 512, 32
"""Tokens of a piece of text that the model is watched on, and how many pieces there are at most."""


def check(args: argparse.Namespace) -> None:
    """Refuse options that do not fit, before anything is read."""
    if args.share is None:
        raise ValueError(f"{args.what} leaves neurons out, not layers; say which share of them goes with --share")
    if not 0 <= args.share < 1:
        raise ValueError(f"--share is {args.share}; it must be at least 0 and below 1, such as 0.2")
    if args.multiple < 1:
        raise ValueError(f"--multiple is {args.multiple}; it must be at least 1 neuron")
    if args.by:
        raise ValueError(f"--by chooses among layers and {args.what} leaves out neurons; leave it out")
    if args.what == "ppm" and (args.form or args.text):
        raise ValueError("ppm looks at the weights alone; --form and --text are for cfsp")


def choose(args: argparse.Namespace, files: Checkpoint) -> tuple[NarrowMLPs, dict[str, Any]]:
    """The change, and what the note beside the weights says of it."""
    from shoal.calibrate import neurons
    from shoal.errors import Unsupported
    from shoal.model.narrow import NarrowMLPs, gated_widths

    source = files.weights()
    if source is None:
        raise Unsupported(f"pruning {files.name!r}", "its weights cannot be read by their names",
                          "Use its safetensors, or a GGUF file that Shoal reads itself")
    widths = gated_widths(files.config(), source)
    why: dict[str, Any] = {"by": args.what, "share": args.share, "multiple": args.multiple}
    shares = [1 - args.share] * len(widths)
    if args.what == "ppm":
        scores = neurons.peak_to_peak(source)
    else:
        form: neurons.Form = args.form or "stated"
        texts = _texts(args, files)
        seen = neurons.activity(files.model(_dtype(args)).eval(), texts)
        scores = neurons.cfsp(source, seen, form)
        shares = shares if args.uniform else neurons.shares(seen.turns, args.share)
        why |= {"form": form, "uniform": args.uniform, "tokens": seen.tokens,
                "text": args.text.name if args.text else "what the model says to prompts of Shoal's",
                "turns": [round(turn, 5) for turn in seen.turns]}
    kept = neurons.best(scores, neurons.counts(shares, widths, args.multiple))
    why |= {"widths": [len(layer) for layer in kept], "of": round(sum(widths) / len(widths)),
            "neurons": hashlib.sha256(repr(kept).encode()).hexdigest()[:16]}
    return NarrowMLPs(kept), why


def _dtype(args: argparse.Namespace) -> Any:
    from shoal.engine.device import as_dtype

    return as_dtype(args.dtype or "float32")


def _texts(args: argparse.Namespace, files: Checkpoint) -> list[list[int]]:
    """Pieces of the text that is named, else what the model itself says."""
    if args.text is not None:
        ids = files.tokenizer()(args.text.read_text(encoding="utf-8"))["input_ids"]
        return [ids[at : at + _PIECE] for at in range(0, min(len(ids), _PIECES * _PIECE), _PIECE)]
    from shoal.calibrate.own_texts import answered, asked

    engine = common.load_engine(args)
    return [[*prompt, *answer] for prompt, answer in answered(engine, asked(engine), 128)]
