"""Measure everything that lab/reports/serving reports of `shoal serve` under load.

    python lab/benchmarks/serving.py --minutes 25
    python lab/benchmarks/serving.py --only streams,card,depth --minutes 10
    python lab/benchmarks/serving.py --model smollm2-135m --quick --out quick --pictures quick

Every stage but two is one `shoal bench-serve` command, which is printed and recorded in its result:

    streams   full depth, 1, 8 and 16 clients that ask again once answered
    card      cost of a step with 1, 8 and 16 rows, for the predictions (no server)
    depth     D3 and full depth, 8 clients, waves, answers of one length
    peers     8 and 16 clients, with transformers and llama.cpp on the same weights
    mixed     D3 and full depth, answers of random lengths, joining at once and in waves
    arrivals  the same with requests at random times
    gain      the summary, and the predictions of the cost cards (from the files, in seconds)

Stages run in that order, the most informative first; `--only` picks some. Close everything else first.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import serving_gain

ROOT = Path(__file__).resolve().parents[2]
CARD_ROWS = (1, 8, 16)
D3 = "d3:mean=0.6"


@dataclass(frozen=True)
class Stage:
    """A command.

    Attributes:
        argv: its own options.
        rounds: most rounds.
        weight: minutes that it takes with the shape 1b on two cores, which decide its share of the time.
    """

    argv: list[str]
    rounds: int
    weight: float


def main() -> int:
    args = arguments().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.out.mkdir(parents=True, exist_ok=True)
    args.pictures.mkdir(parents=True, exist_ok=True)
    todo, until = chosen(args.only), time.monotonic() + 60 * args.minutes
    every = stages(args)
    for place, name in enumerate(todo):
        left = (until - time.monotonic()) / 60
        share = left * every[name].weight / sum(every[one].weight for one in todo[place:])
        if left <= 0:
            print(f"out of time before the stage {name}; go on with: --only {','.join(todo[place:])}")
            return 1
        perform(name, every[name], share, args)
    if args.only is None or "gain" in args.only.split(","):
        serving_gain.publish(args.out, args.pictures, ["lab/benchmarks/serving.py", *sys.argv[1:]])
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="A,...", help="stages; all if none")
    parser.add_argument("--minutes", metavar="T", type=float, default=25.0, help="for all stages together: what is "
                        "left is shared out, and a stage begins no round that would end later; each does one at least")
    parser.add_argument("--shape", metavar="S", help="1b (default), or another shape of `shoal bench-serve`")
    parser.add_argument("--model", metavar="M", help="folder, Hub id or name instead")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", metavar="N", type=int, help="most rounds of every stage")
    parser.add_argument("--new-tokens", metavar="N", type=int, default=64, help="of answers of one length")
    parser.add_argument("--words", metavar="N", type=int, default=32, help="of every prompt")
    parser.add_argument("--answers", metavar="N,...", default="16,32,64,96", help="lengths of mixed answers")
    parser.add_argument("--rates", metavar="R,...", default="0.5,1.0", help="requests a second that arrive")
    parser.add_argument("--requests", metavar="N", type=int, default=12, help="of a turn of arrivals")
    parser.add_argument("--quick", action="store_true", help="one short round of everything, to see that it runs: "
                        "for small models")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "lab" / "reports" / "serving")
    parser.add_argument("--pictures", metavar="DIR", type=Path, default=ROOT / "lab" / "reports" / "pictures")
    return parser


def chosen(only: str | None) -> list[str]:
    """The measuring stages in order; SystemExit for an unknown name."""
    known = ["streams", "card", "depth", "peers", "mixed", "arrivals"]
    asked = [*known, "gain"] if only is None else only.split(",")
    if unknown := [name for name in asked if name not in (*known, "gain")]:
        raise SystemExit(f"there is no stage {unknown[0]!r}; there are {', '.join([*known, 'gain'])}")
    return [name for name in known if name in asked]


def stages(args: argparse.Namespace) -> dict[str, Stage]:
    """All measuring stages."""
    rates, answers = ("10,40", "8,16,24") if args.quick else (args.rates, args.answers)
    both = ["--methods", f"full,{D3}"]
    mixed = [*both, "--answers", answers, "--admission", "join,waves"]
    arriving = ["--rate", rates, "--requests", str(args.requests)]
    baselines = ["--requests", "16", "--peer", "transformers", "--peer", "llama.cpp"]
    return {
        "streams": Stage(["--concurrency", "1,8,16", "--methods", "full"], 3, 3.0),
        "card": Stage([], 1, 2.0),
        "depth": Stage(["--concurrency", "8", *both, "--admission", "waves"], 6, 4.0),
        "peers": Stage(["--concurrency", "8,16", *baselines], 2, 7.0),
        "mixed": Stage(["--concurrency", "4,8,16", *mixed], 2, 5.0),
        "arrivals": Stage([*arriving, *mixed], 2, 4.0),
    }


def perform(name: str, stage: Stage, minutes: float, args: argparse.Namespace) -> None:
    """Run a stage; CalledProcessError if it fails."""
    if name == "card":
        measure_cards(args)
        return
    rounds = 1 if args.quick else args.rounds or stage.rounds
    lengths = ["--context", str(args.words), "--new-tokens", str(16 if args.quick else args.new_tokens)]
    # A quarter of the time is for writing weights, loading and warming up, which the command does not count.
    how = ["--rounds", str(rounds), "--minutes", f"{0.75 * minutes:.2f}"]
    what = [*model(args), "--dtype", args.dtype, *lengths, *stage.argv, *how]
    shoal(["bench-serve", *what, "--json", str(shown(args.out / f"{name}.json"))])


def model(args: argparse.Namespace) -> list[str]:
    """The options that name the weights."""
    return ["--model", args.model] if args.model else ["--shape", args.shape or "1b"]


def shown(path: Path) -> Path:
    """The path as commands show it: relative to the working directory if it lies there."""
    whole = path.resolve()
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


def shoal(argv: list[str]) -> None:
    """Run one command; if this script is stopped, the command's servers end too."""
    print("shoal", shlex.join(argv), flush=True)
    running = subprocess.Popen([sys.executable, "-m", "shoal", *argv], stdout=subprocess.PIPE, text=True)
    try:
        said, _ = running.communicate()
    except BaseException:
        running.terminate()
        running.wait()
        raise
    print("\n".join(said.splitlines()[:-1]), flush=True)  # the last line is the result, which is in its file
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, running.args)


def measure_cards(args: argparse.Namespace) -> None:
    """Cost cards for some numbers of rows, with contexts as long as those of the load."""
    from shoal import catalog
    from shoal.cli import env
    from shoal.engine.loading.device import as_dtype
    from shoal_lab.bench import report
    from shoal_lab.bench.model import MeasuredModel
    from shoal_lab.bench.system import Setting
    from shoal_lab.calibrate.cost import measure

    what = MeasuredModel(model=catalog.find(args.model)) if args.model else MeasuredModel(args.shape or "1b")
    engine = what.engine(as_dtype(args.dtype), "cpu", "auto", None)
    contexts, began = (args.words, 4 * args.words), time.perf_counter()
    cards = [measure(engine, rows=rows, contexts=contexts).to_dict() for rows in CARD_ROWS]
    argv = ["lab/benchmarks/serving.py", *model(args), "--dtype", args.dtype, "--words", str(args.words)]
    found = report.framed(
        {"seconds": time.perf_counter() - began, "cost_cards": [{"quant": None, **card} for card in cards]},
        what, Setting(args.dtype, threads=_threads()), machine=env.collect(), command=[*argv, "--only", "card"],
    )
    report.write(found, args.out / "card.json")
    print(json.dumps(found["cost_cards"]), flush=True)
    del engine
    gc.collect()  # frees gigabytes that the servers need


def _threads() -> int:
    import torch

    return torch.get_num_threads()


if __name__ == "__main__":
    sys.exit(main())
