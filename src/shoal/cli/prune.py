"""Write a smaller checkpoint of a model: a folder that Shoal and transformers load, or a GGUF file.

`depth` leaves out whole layers, for the prompt too, as ShortGPT does (arXiv 2403.03853). Which ones go follows from
the model's calibration card; a model that has none is measured first, a minute at most. `cfsp` and `ppm` leave out
neurons of the MLPs (`prune_width`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import common
from shoal.cli.parser import Parser
from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.engine.checkpoint import Checkpoint

EXAMPLES = """examples:
  shoal prune depth --model path/to/model --layers 2 --out smaller
  shoal prune depth --model path/to/model --share 0.1 --by influence --out smaller
  shoal prune depth --model path/to/model --drop 21,22,24 --out smaller
  shoal prune cfsp --model path/to/model --share 0.2 --out smaller
  shoal prune ppm --model path/to/model --share 0.2 --dtype bfloat16 --out smaller
  shoal prune ppm --model model.gguf --share 0.2 --out smaller.gguf
"""
WIDTH = ("cfsp", "ppm", "maw")
DOWN = ("F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""Types of GGUF files that the `gguf` package writes and Shoal reads."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("depth", *WIDTH), help="depth: leave out whole layers. cfsp: neurons of the "
                        "MLPs, by weights and activations. ppm, alias maw: neurons, by the range of their weights")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a folder that is new or empty; "
                        "NAME.gguf writes a GGUF file, where the model is one: what stays keeps its bytes")
    much = parser.add_mutually_exclusive_group(required=True)
    much.add_argument("--layers", metavar="N", type=int, help="how many layers go; the first and the last stay")
    much.add_argument("--share", metavar="S", type=float, help="the share of the layers or neurons that goes, as 0.1")
    much.add_argument("--drop", metavar="I,J,...", type=_numbers, help="these layers go, the first being 0")
    parser.add_argument("--by", choices=("order", "leave_one_out", "influence"), help="what tells who goes first: the "
                        "card's own order, what is lost without a layer, or its influence, as in ShortGPT and if none")
    group = parser.add_argument_group("neurons")
    group.add_argument("--multiple", metavar="N", type=int, default=64, help="layers keep multiples of so many neurons")
    group.add_argument("--uniform", action="store_true", help="cfsp: the same number in every layer, which "
                       "transformers loads too; ppm always does so")
    group.add_argument("--form", choices=("stated", "released"), help="cfsp: scores as the paper states them, which is "
                       "the default, or as its code computes them: by activations alone")
    group.add_argument("--text", metavar="FILE", type=Path, help="cfsp: a text to watch the model on; what the model "
                       "itself says to prompts of Shoal's if none")
    group.add_argument("--down", choices=DOWN, help="GGUF files: the type of down where neurons leave it, which is "
                       "quantised again; one step finer than it was if none")
    common.add_model(parser)
    common.add_json(parser)
    parser.set_defaults(no_card=False)
    parser.elsewhere = {"--quant": "the weights are written as they are; give it to the command that runs the result"}


def run(args: argparse.Namespace) -> int:
    """Choose, write, say what was done."""
    from shoal import catalog
    from shoal.engine import fingerprint, write_checkpoint, write_gguf
    from shoal.engine.checkpoint import NOTE, Checkpoint, shown_name
    from shoal.engine.device import as_dtype
    from shoal.engine.transformed import Transformed

    _check(args)
    place = (catalog.find(args.model), args.revision, args.trust_remote_code)
    if _to_file(args):
        write_gguf.check(place[0], args.out, args.what == "cfsp" and args.share > 0 and not args.uniform)
    else:
        write_checkpoint.check_free(args.out)
    change, why, words = (_neurons if args.what in WIDTH else _layers)(args, Checkpoint(*place))
    done = {"format": 1, "source": shown_name(place[0]), "fingerprint": fingerprint.of_model(None, *place[:2]), **why}
    if _to_file(args):
        done["requantised"] = again = _write_file(args, place[0], change, done)
        told = ", ".join(f"{kind} in {count} layers" for kind, count in again.items())
        words += f"; down quantised again: {told}" if again else ""
    else:
        dtype = args.dtype and as_dtype(args.dtype)
        write_checkpoint.write(Transformed(*place, change), args.out, dtype, **{NOTE: done})
    if args.json:
        common.print_json({**done, "out": str(args.out)})
    else:
        print(words)
    return 0


def _to_file(args: argparse.Namespace) -> bool:
    return bool(args.out.suffix.lower() == ".gguf")


def _write_file(args: argparse.Namespace, source: str, change: Any, note: dict[str, Any]) -> dict[str, int]:
    """A GGUF file, whole or not at all; returns how many matrices were quantised again to which type."""
    from shoal.engine import write_gguf
    from shoal.train import files

    again: dict[str, int] = {}
    files.write(args.out, lambda part: again.update(write_gguf.write(Path(source), change, part, note, args.down)))
    return again


def _check(args: argparse.Namespace) -> None:
    """Refuse options that do not fit each other."""
    from shoal.cli import prune_width

    args.what = "ppm" if args.what == "maw" else args.what
    if args.down and (not _to_file(args) or args.what == "depth"):
        raise ValueError("--down is about neurons left out of a GGUF file; name one with --out, or leave it out")
    if args.dtype and _to_file(args):
        raise ValueError(f"--dtype is {args.dtype}, and a GGUF file keeps the types of its source; leave it out")
    if args.what in WIDTH:
        prune_width.check(args)
    elif args.uniform or args.form or args.text:
        raise ValueError("--uniform, --form and --text are about neurons, and depth leaves out layers; leave them out")
    elif args.drop and args.by:
        raise ValueError("--by chooses among the layers and --drop names them; leave one of them out")


def _layers(args: argparse.Namespace, files: Checkpoint) -> tuple[Any, dict[str, Any], str]:
    """The change that leaves out layers, what its note says, and what a person is told."""
    from shoal.model.transform import DropLayers

    count = int(files.config().get_text_config().num_hidden_layers)
    dropped, why = (args.drop, {"by": "hand"}) if args.drop else _choose(args, _wanted(args, count))
    gone = ", ".join(map(str, sorted(dropped)))
    return (DropLayers(dropped), {"num_layers": count, "dropped": sorted(dropped), **why},
            f"{count - len(dropped)} of {count} layers written to {args.out}, without {gone}")


def _neurons(args: argparse.Namespace, files: Checkpoint) -> tuple[Any, dict[str, Any], str]:
    """The same of a change that leaves out neurons."""
    from shoal.cli import prune_width

    change, why = prune_width.choose(args, files)
    kept, widest = sum(why["widths"]) / len(why["widths"]), max(why["widths"])
    spread = "each" if min(why["widths"]) == widest else f"on average, {min(why['widths'])} to {widest}"
    return change, why, f"layers with {kept:.0f} of {why['of']} neurons {spread}, written to {args.out}"


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 3,4,5") from error


def _wanted(args: argparse.Namespace, count: int) -> int:
    """How many layers go."""
    if args.share is not None and not 0 < args.share < 1:
        raise ValueError(f"--share is {args.share}; it must be above 0 and below 1, such as 0.1")
    number = args.layers if args.share is None else round(args.share * count)
    if not 1 <= number <= count - 2:
        option = f"--layers is {args.layers}" if args.share is None else f"--share is {args.share}, {number} layers"
        raise ValueError(f"{option}; 1 to {max(count - 2, 0)} of {count} layers may go, since the first and the last "
                         "stay (--drop names any)")
    return int(number)


def _choose(args: argparse.Namespace, number: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The layers that go, and by what."""
    from shoal.depth.order import removal_order
    from shoal.methods.d3 import D3

    engine = common.load_engine(args, methods=(D3(),))  # it too goes by the card: an unknown model is measured
    card, count, by = engine.card, engine.stack.num_layers, args.by or "influence"
    if by not in card.layer_scores and not (by == "order" and card.order is not None):
        remedy = "Calibrate it, take another --by, or name the layers with --drop"
        raise Unsupported(f"pruning {engine.model_name} by {by}", "its card does not say", remedy)
    order = removal_order("auto" if by == "order" else by, count, 1, 1, card.layer_scores, card.order)[:number]
    scores = {kind: {str(layer): values[layer] for layer in order} for kind, values in card.layer_scores.items()}
    return order, {"by": by, "card": card.origin or "measured for this", "scores": scores}
