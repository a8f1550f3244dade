"""Write a smaller checkpoint of a model, which Shoal and transformers load as any other.

`depth` leaves out whole layers, for the prompt too, as ShortGPT does (arXiv 2403.03853). Which ones go follows from
the model's calibration card; a model that has none is measured first, a minute at most.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.cli import common
from shoal.cli.parser import Parser
from shoal.errors import Unsupported

EXAMPLES = """examples:
  shoal prune depth --model path/to/model --layers 2 --out smaller
  shoal prune depth --model path/to/model --share 0.1 --by influence --out smaller
  shoal prune depth --model path/to/model --drop 21,22,24 --out smaller
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("depth",), help="depth: leave out whole layers")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a folder that is new or empty")
    much = parser.add_mutually_exclusive_group(required=True)
    much.add_argument("--layers", metavar="N", type=int, help="how many layers go; the first and the last stay")
    much.add_argument("--share", metavar="S", type=float, help="the share of the layers that goes, such as 0.1")
    much.add_argument("--drop", metavar="I,J,...", type=_numbers, help="these layers go, the first being 0")
    parser.add_argument("--by", choices=("order", "leave_one_out", "influence"), help="what tells who goes first: the "
                        "card's own order, what is lost without a layer, or its influence, as in ShortGPT and if none")
    common.add_model(parser)
    common.add_json(parser)
    parser.set_defaults(no_card=False)
    parser.elsewhere = {"--quant": "the weights are written as they are; give it to the command that runs the result"}


def run(args: argparse.Namespace) -> int:
    """Choose, write, say what was done."""
    from shoal import catalog
    from shoal.engine import fingerprint, write_checkpoint
    from shoal.engine.checkpoint import NOTE, Checkpoint, shown_name
    from shoal.engine.device import as_dtype
    from shoal.engine.transformed import Transformed
    from shoal.model.transform import DropLayers

    if args.drop and args.by:
        raise ValueError("--by chooses among the layers and --drop names them; leave one of them out")
    write_checkpoint.check_free(args.out)
    place = (catalog.find(args.model), args.revision, args.trust_remote_code)
    count = int(Checkpoint(*place).config().get_text_config().num_hidden_layers)
    dropped, why = (args.drop, {"by": "hand"}) if args.drop else _choose(args, _wanted(args, count))
    files = Transformed(*place, DropLayers(dropped))
    done = {"format": 1, "source": shown_name(place[0]), "fingerprint": fingerprint.of_model(None, *place[:2]),
            "num_layers": count, "dropped": sorted(dropped), **why}
    write_checkpoint.write(files, args.out, args.dtype and as_dtype(args.dtype), **{NOTE: done})
    if args.json:
        common.print_json({**done, "out": str(args.out)})
    else:
        print(f"{count - len(dropped)} of {count} layers written to {args.out}, without "
              f"{', '.join(map(str, sorted(dropped)))}")
    return 0


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
