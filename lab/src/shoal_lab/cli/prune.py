"""Write a smaller checkpoint of a model: a folder that Shoal and transformers load, or a GGUF file.

`depth` removes whole layers, for the prompt too, as ShortGPT does (arXiv 2403.03853), by the model's calibration card;
a model without one is measured first, for at most a minute. `cfsp` and `ppm` remove neurons of the MLPs
(`prune_width`), and so does `consensus`, which trains first (`prune_consensus`). The amount is given, or follows from a
size or speed to be reached (`prune_target`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal.errors import Unsupported
from shoal_lab.cli import prune_consensus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.engine.loading.checkpoint import Checkpoint
    from shoal_lab.cli.prune_target import Noted

EXAMPLES = """examples:
  shoal prune depth --model path/to/model --layers 2 --out smaller
  shoal prune depth --model path/to/model --share 0.1 --by influence --out smaller
  shoal prune depth --model path/to/model --drop 21,22,24 --out smaller
  shoal prune cfsp --model path/to/model --share 0.2 --out smaller
  shoal prune ppm --model path/to/model --share 0.2 --dtype bfloat16 --out smaller
  shoal prune ppm --model model.gguf --share 0.2 --out smaller.gguf
  shoal prune cfsp --model model.gguf --bytes 80MB --out smaller.gguf
  shoal prune depth --model path/to/model --speed 1.2 --out faster
  shoal prune consensus --model model.gguf --share 0.1 --prompts asked.txt --minutes 30 --out smaller.gguf
"""
CONSENSUS = "consensus"
WIDTH = ("cfsp", "ppm", "maw", CONSENSUS)
DOWN = ("F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""Types of GGUF files that the `gguf` package writes and Shoal reads."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("depth", *WIDTH), help="depth: leave out whole layers. cfsp: neurons of the "
                        "MLPs, by weights and activations. ppm, alias maw: neurons, by the range of their weights. "
                        "consensus: neurons, by gates that are trained until all texts agree")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a folder that is new or empty; "
                        "NAME.gguf writes a GGUF file, where the model is one: what stays keeps its bytes")
    much = parser.add_mutually_exclusive_group(required=True)
    much.add_argument("--layers", metavar="N", type=int, help="how many layers go; the first and the last stay")
    much.add_argument("--share", metavar="S", type=float, help="the share of the layers or neurons that goes, as 0.1")
    much.add_argument("--drop", metavar="I,J,...", type=_numbers, help="these layers go, the first being 0")
    much.add_argument("--bytes", metavar="SIZE", help="as little goes as it takes for the file, or the safetensors "
                      "of a folder, to come to at most this, such as 90MB")
    much.add_argument("--speed", metavar="X", type=float, help="as little goes as it takes for X times as many tokens "
                      "per second, predicted from steps that are timed here")
    parser.add_argument("--by", choices=("order", "leave_one_out", "influence"), help="what tells who goes first: the "
                        "card's own order, what is lost without a layer, or its influence, as in ShortGPT and if none")
    group = parser.add_argument_group("neurons")
    group.add_argument("--multiple", metavar="N", type=int, default=64, help="layers keep multiples of so many neurons")
    group.add_argument("--uniform", action="store_true", help="cfsp, consensus: the same number in every layer, "
                       "which transformers loads too; ppm always does so")
    group.add_argument("--form", choices=("stated", "released"), help="cfsp: scores as the paper states them, which is "
                       "the default, or as its code computes them: by activations alone")
    group.add_argument("--text", metavar="FILE", type=Path, help="cfsp, consensus: a text to watch the model on; "
                       "what the model itself says to prompts if none")
    group.add_argument("--random", metavar="SEED", type=int, help="cfsp, ppm: a control; as many neurons of each layer "
                       "go, but drawn")
    group.add_argument("--down", choices=DOWN, help="GGUF files: the type of down where neurons leave it, which is "
                       "quantised again; one step finer than it was if none")
    prune_consensus.add_arguments(parser)
    common.add_model(parser)
    common.add_json(parser)
    parser.set_defaults(no_card=False)
    parser.elsewhere = {"--quant": "the weights are written as they are; give it to the command that runs the result"}
    parser.show_usual("--model", "--out", "--layers", "--share", "--drop", "--bytes", "--by", "--text", "--json")


def run(args: argparse.Namespace) -> int:
    """Choose, write, print what was done."""
    from shoal import catalog
    from shoal.engine.cards import fingerprint
    from shoal.engine.loading.checkpoint import NOTE, Checkpoint, shown_name
    from shoal.engine.loading.device import as_dtype
    from shoal_lab.prune import write_checkpoint, write_gguf

    _check(args)
    place = (catalog.find(args.model), args.revision, args.trust_remote_code)
    if _to_file(args):
        uneven = args.what in ("cfsp", CONSENSUS) and args.share != 0 and not args.uniform
        write_gguf.check(place[0], args.out, uneven)
    else:
        write_checkpoint.check_free(args.out)
    mark = fingerprint.of_model(None, *place[:2])

    def noted(why: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": 1, "source": shown_name(place[0]), "fingerprint": mark, **why}

    chosen = _chosen(args, Checkpoint(*place), noted)
    if chosen is None:  # the reason was printed already
        if args.json:
            common.print_json({"out": None})
        return 0
    change, why = chosen
    done, summary = noted(why), _summary(args, why)
    if _to_file(args):
        done["requantised"] = again = _write_file(args, place[0], change, done)
        told = ", ".join(f"{kind} in {count} layers" for kind, count in again.items())
        summary += f"; down quantised again: {told}" if again else ""
    else:
        dtype = args.dtype and as_dtype(args.dtype)
        write_checkpoint.write(Checkpoint(*place, change), args.out, dtype, **{NOTE: done})
    if args.json:
        size = {} if args.bytes is None else {"bytes": _written_bytes(args.out)}
        common.print_json({**done, "out": str(args.out), **size})
    else:
        print(summary)
    return 0


def _chosen(args: argparse.Namespace, files: Checkpoint, noted: Noted) -> tuple[Any, dict[str, Any]] | None:
    """The change, and its note; None if time was up before there was one."""
    from shoal_lab.cli import prune_target, prune_width

    if args.what not in WIDTH:
        return _layers(args, files, noted)
    if args.what != CONSENSUS:
        card = prune_target.measured(args) if args.speed is not None else None
        pick = prune_width.picker(args, files)
        if args.share is not None:
            return pick(args.share)
        return prune_target.Goal(args, files, noted, _to_file(args), card).least(prune_target.SHARES, pick)
    even = prune_width.even(args, files)
    if args.share is not None:
        found = prune_consensus.trained(args, files, args.share) if args.share else (even, {})
        return found and _with(found[0](args.share), found[1])
    target = prune_target.Goal(args, files, noted, _to_file(args), prune_consensus.card(args))
    found = prune_consensus.trained(args, files, target.least(prune_target.SHARES, even)[1]["share"])
    return found and target.least(prune_target.SHARES, lambda share: _with(found[0](share), found[1]))


def _with(picked: tuple[Any, dict[str, Any]], told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A change with more fields in its note."""
    return picked[0], {**picked[1], **told}


def _written_bytes(out: Path) -> int:
    """Bytes of the written weights."""
    return sum(path.stat().st_size for path in ([out] if out.is_file() else out.glob("*.safetensors")))


def _to_file(args: argparse.Namespace) -> bool:
    return bool(args.out.suffix.lower() == ".gguf")


def _write_file(args: argparse.Namespace, source: str, change: Any, note: dict[str, Any]) -> dict[str, int]:
    """Write a GGUF file, whole or not at all; returns how many matrices were quantised again to which type."""
    from shoal_lab.prune import write_gguf
    from shoal_lab.train import files

    again: dict[str, int] = {}
    files.write(args.out, lambda part: again.update(write_gguf.write(Path(source), change, part, note, args.down)))
    return again


def _check(args: argparse.Namespace) -> None:
    """Refuse options that do not fit each other."""
    from shoal_lab.cli import prune_target, prune_width

    args.what = "ppm" if args.what == "maw" else args.what
    if args.down and (not _to_file(args) or args.what == "depth"):
        raise ValueError("--down is about neurons left out of a GGUF file; name one with --out, or leave it out")
    if args.dtype and _to_file(args):
        raise ValueError(f"--dtype is {args.dtype}, and a GGUF file keeps the types of its source; leave it out")
    prune_target.check(args)
    prune_consensus.check(args)
    if args.what in WIDTH:
        prune_width.check(args)
    elif args.uniform or args.form or args.text or args.random is not None:
        raise ValueError("--uniform, --form, --text and --random are about neurons, and depth leaves out layers; leave "
                         "them out")
    elif args.drop and args.by:
        raise ValueError("--by chooses among the layers and --drop names them; leave one of them out")


def _layers(args: argparse.Namespace, files: Checkpoint, noted: Noted) -> tuple[Any, dict[str, Any]]:
    """The change that removes layers, and its note."""
    from shoal.model.transform import DropLayers
    from shoal_lab.cli import prune_target

    count = int(files.config().get_text_config().num_hidden_layers)
    if args.drop:
        return DropLayers(args.drop), {"num_layers": count, "dropped": sorted(args.drop), "by": "hand"}
    if args.bytes is None and args.speed is None:
        return _picked(count, *_choose(args, _wanted(args, count)))
    if count < 3:
        raise ValueError(f"the model has {count} layers, of which the first and the last stay; take cfsp or ppm")
    target = prune_target.Goal(args, files, noted, _to_file(args))
    order, why = _choose(args, count - 2)
    return target.least(range(1, count - 1), lambda number: _picked(count, order[: int(number)], why))


def _picked(count: int, dropped: tuple[int, ...], why: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from shoal.model.transform import DropLayers

    scores = {kind: {str(layer): values[str(layer)] for layer in dropped} for kind, values in why["scores"].items()}
    return DropLayers(dropped), {"num_layers": count, "dropped": sorted(dropped), **why, "scores": scores}


def _summary(args: argparse.Namespace, why: Mapping[str, Any]) -> str:
    """The summary for a user."""
    summary = _layers_summary(args, why) if args.what not in WIDTH else _neurons_summary(args, why)
    if "predicted" in why.get("target", {}):
        summary += f"; {why['target']['predicted']:.2f} times as fast by the cost of steps measured here"
    return summary


def _layers_summary(args: argparse.Namespace, why: Mapping[str, Any]) -> str:
    dropped, count = why["dropped"], why["num_layers"]
    return f"{count - len(dropped)} of {count} layers written to {args.out}, without {', '.join(map(str, dropped))}"


def _neurons_summary(args: argparse.Namespace, why: Mapping[str, Any]) -> str:
    kept, widest = sum(why["widths"]) / len(why["widths"]), max(why["widths"])
    spread = "each" if min(why["widths"]) == widest else f"on average, {min(why['widths'])} to {widest}"
    summary = f"layers with {kept:.0f} of {why['of']} neurons {spread}, written to {args.out}"
    if "undecided" in why:
        summary += (f"; {why['undecided']:.1%} of the gates undecided after {why['steps'][0]} steps. Answers and "
                    f"checkpoint are in {args.work}")
    return summary


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 3,4,5") from error


def _wanted(args: argparse.Namespace, count: int) -> int:
    """Number of layers to remove."""
    if args.share is not None and not 0 < args.share < 1:
        raise ValueError(f"--share is {args.share}; it must be above 0 and below 1, such as 0.1")
    number = args.layers if args.share is None else round(args.share * count)
    if not 1 <= number <= count - 2:
        option = f"--layers is {args.layers}" if args.share is None else f"--share is {args.share}, {number} layers"
        raise ValueError(f"{option}; 1 to {max(count - 2, 0)} of {count} layers may go, since the first and the last "
                         "stay (--drop names any)")
    return int(number)


def _choose(args: argparse.Namespace, number: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The layers to remove, and the reason."""
    from shoal.depth.order import removal_order
    from shoal.methods.d3 import D3

    engine = common.load_engine(args, methods=(D3(),))  # D3 needs a card, so a model without one is measured
    card, count, by = engine.card, engine.runner.num_layers, args.by or "influence"
    if by not in card.layer_scores and not (by == "order" and card.order is not None):
        remedy = "Calibrate it, take another --by, or name the layers with --drop"
        raise Unsupported(f"pruning {engine.model_name} by {by}", "its card does not say", remedy)
    order = removal_order("auto" if by == "order" else by, count, 1, 1, card.layer_scores, card.order)[:number]
    scores = {kind: {str(layer): values[layer] for layer in order} for kind, values in card.layer_scores.items()}
    return order, {"by": by, "card": card.origin or "measured for this", "scores": scores}
