"""List the models on this machine: what to give as --model, their size, whether they fit, and their cards.

It looks in the folder $SHOAL_MODELS (by default ~/.cache/shoal-models), in the package of the default model and in the
Hub's cache. For known models that are absent it says how to get them.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.engine.cards.inventory import HeldModel

EXAMPLES = """examples:
  shoal models
  shoal models --json
"""
_MARGIN = 1.25
"""Memory that a model takes, as a multiple of its weights: KV, buffers and libraries included."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    import torch

    from shoal import catalog
    from shoal.engine.cards import inventory
    from shoal.engine.memory import amounts as memory

    held = inventory.held()
    room = memory.free(torch.device("cpu"))
    absent = {name: catalog.remedy(name) for name in catalog.KNOWN if name not in {model.name for model in held}}
    if args.json:
        rows = [{**dataclasses.asdict(model), "fits": fits(model, room)} for model in held]
        common.print_json({"models": rows, "free_bytes": room, "absent": absent})
    else:
        print(_text(held, room, absent))
    return 0


def fits(model: HeldModel, room: int | None) -> bool | None:
    """Whether a model should fit into the free memory; None if the system does not say how much is free."""
    return None if room is None else model.nbytes * _MARGIN < room


def _text(held: list[HeldModel], room: int | None, absent: dict[str, str]) -> str:
    free = "" if room is None else f"; {room / 1e9:.1f} GB of memory are free"
    lines = [f"{len(held)} models{free}"] if held else ["no model is on this machine"]
    cells = [("--model", "weights", "GB", "fits", "card"), *(_cells(model, room) for model in held)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells if held else ():
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    lines += [f"{model.name} cannot be loaded: {model.problem}" for model in held if model.problem]
    lines += [f"not here: {name}. {how}" for name, how in absent.items()]
    return "\n".join(lines)


def _cells(model: HeldModel, room: int | None) -> tuple[str, ...]:
    answer: dict[Any, str] = {True: "yes", False: "no", None: ""}
    kind = f"{model.architecture}, {model.form}" if model.architecture else model.form
    return (model.name, kind, f"{model.nbytes / 1e9:.2f}", answer[fits(model, room)], " or ".join(model.cards))
