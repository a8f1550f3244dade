"""Options that the measuring commands share, and what they are parsed into."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal.errors import needs

if TYPE_CHECKING:
    from shoal_lab.bench.model import MeasuredModel
    from shoal_lab.bench.system import Setting

Number = TypeVar("Number", int, float)


def add_weights(parser: Parser, default: str, shapes: bool = True) -> argparse._ArgumentGroup:
    """Add options of the model and its number formats; `default` says which model is measured if none is named."""
    group = parser.add_argument_group("weights")
    if shapes:
        group.add_argument("--shape", metavar="S", help="random weights in the shape 135m, 1b, 7b, 13b or 70b")
    instead = ", instead of a shape" if shapes else ""
    group.add_argument("--model", metavar="M", help=f"folder, Hub id or .gguf file{instead}; {default}")
    group.add_argument("--dtype", choices=common.DTYPES, help="type of weights and computation; where not given, "
                       "bfloat16 where the device computes it natively, else float32")
    group.add_argument("--device", metavar="D", help="such as cpu or cuda:0; where not given, CUDA where there is one")
    group.add_argument("--threads", metavar="N", type=int, help="CPU threads of every system; as torch chooses if none")
    return group


def add_loading(group: argparse._ArgumentGroup) -> None:
    """Add options of finding and running a model in this process."""
    group.add_argument("--revision", metavar="R", help="branch, tag or commit on the Hub")
    group.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")
    group.add_argument("--backend", choices=("auto", "hf", "packed"), default="auto", help="who runs Shoal's layers")


def add_procedure(parser: Parser) -> argparse._ArgumentGroup:
    """Add options of the rounds and the report."""
    group = parser.add_argument_group("procedure")
    group.add_argument("--rounds", metavar="N", type=int, default=3, help="how often everything is measured")
    group.add_argument("--json", metavar="FILE", nargs="?", const="", help="write the report to a file as well as on "
                       "the last line of stdout; without FILE, print no table")
    return group


def add_box(group: argparse._ArgumentGroup) -> None:
    """Add options of the time limit and the plot."""
    group.add_argument("--minutes", metavar="T", type=float, help="begin no round that would end later")
    group.add_argument("--plot", metavar="F.png", type=Path, help="write a picture (needs matplotlib)")


def check_outputs(*paths: str | Path | None) -> None:
    """Refuse a file in a folder that does not exist, before minutes are spent measuring."""
    for path in (Path(path) for path in paths if path):
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} to")


def model_of(args: argparse.Namespace, **more: Any) -> MeasuredModel:
    """The model to measure; the default model if none is named."""
    from shoal import catalog
    from shoal_lab.bench.model import MeasuredModel

    shape = getattr(args, "shape", None)
    if shape is not None and args.model is not None:
        raise ValueError("--shape and --model exclude each other")
    return MeasuredModel(shape, None if shape is not None else catalog.find(args.model), **more)


def setting_of(args: argparse.Namespace, quant: str | None = None, backend: str = "auto") -> Setting:
    """The setting: number formats, device, threads."""
    import torch

    from shoal.engine.loading.device import default_device, default_dtype
    from shoal_lab.bench.system import Setting

    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads is {args.threads}; it must be at least 1")
        torch.set_num_threads(args.threads)
    device = torch.device(args.device) if args.device is not None else default_device()
    dtype = args.dtype or str(default_dtype(device)).removeprefix("torch.")
    return Setting(dtype, quant, backend, str(device), torch.get_num_threads())


def quants_from(text: str, known: Iterable[str] = ("none", "int8", "int4")) -> list[str | None]:
    """Parse weight formats; None for the unquantised one."""
    names, listed = [name for name in text.split(",") if name], list(known)
    for name in names:
        if name not in listed:
            raise ValueError(f"--quant holds {name!r}; it takes {', '.join(listed)}")
    return [None if name == "none" else name for name in names]


def baselines_from(asked: Iterable[str] | None) -> list[str]:
    """Parse names of other software, each once; "none" stands for none."""
    return [name for name in dict.fromkeys(asked or ()) if name != "none"]


def numbers(option: str, text: str | None, kind: Callable[[str], Number]) -> list[Number]:
    """Parse numbers between commas."""
    try:
        return [kind(word) for word in (text or "").split(",") if word]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} is {text!r}; it must be {what} separated by commas") from None


def publish(found: dict[str, Any], args: argparse.Namespace, table: Callable[[Mapping[str, Any]], str]) -> None:
    """Write the file, print the table, end with one JSON line."""
    from shoal_lab.bench import report

    if args.json:
        report.write(found, Path(args.json))
    if args.json != "":
        print(table(found))
    common.print_json(found)


def check_plot(path: Path | None) -> None:
    """Raise `Unsupported` if a plot is wanted and matplotlib is missing, before minutes of work."""
    if path is not None:
        with needs("plot", "--plot", "shoal-lab"):
            import matplotlib.figure  # noqa: F401
