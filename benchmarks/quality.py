"""Measure everything that docs/evidence.md reports, on the packaged model or any other.

    python benchmarks/quality.py --data DIR
    python benchmarks/quality.py --data DIR --quick --out quick

Calibrates the model, then runs `shoal eval` on every suite, two commands at a time with one thread each. What was
measured is kept under --work, so an interrupted run goes on; results go to --out, pictures to --pictures. The commands
are printed and stand in each result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quality_tables import between, merged, tables

ROOT = Path(__file__).resolve().parents[1]
FAST = ["--dtype", "float32", "--batch", "64"]


def main() -> int:
    args = arguments().parse_args()
    small = args.quick
    args.out.mkdir(parents=True, exist_ok=True)
    card = args.out / "card.json"
    if not card.is_file():
        shoal(args, calibration(card, small), threads=2)
    else:
        print(f"{card} is there already; remove it to calibrate anew")
    jobs = evaluations(card, args.data, small)
    evaluate(args, "known", jobs.pop("known"))
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: evaluate(args, *job), jobs.items()))
    draw(args.out, args.pictures)
    page = ROOT / "docs" / "evidence.md"
    if args.out.resolve() == (ROOT / "benchmarks" / "quality").resolve() and page.is_file():
        page.write_text(between(page.read_text("utf-8"), tables(args.out)), encoding="utf-8")
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", type=Path, required=True, help="holds gsm8k/, wikitext2/, novels/")
    parser.add_argument("--model", metavar="M", help="folder or Hub id; the packaged model if none")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "benchmarks" / "quality")
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path("build/quality"), help="outcomes of items")
    parser.add_argument("--pictures", metavar="DIR", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="commands at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help="a few items of everything, to see that it runs")
    return parser


def calibration(card: Path, small: bool) -> list[str]:
    size = ["--trials", "60", "--loss-n", "8", "--answer-n", "16"] if small else ["--trials", "450", "--loss-n", "64",
                                                                                 "--answer-n", "512"]
    return ["calibrate", "--suite", "known", "--metric", "accuracy", "--max-drop", "0.01", *size, "--max-new-tokens",
            "160", "--out", str(card), *FAST]


def evaluations(card: Path, data: Path, small: bool) -> dict[str, list[str]]:
    """Result name -> command, the most telling first."""
    n = "24" if small else "2000"
    few = "16" if small else "400"
    longest, plain = ["--max-new-tokens", "160"], ["--groups", "constant", "--loss-groups", "constant,budgets"]
    timed = ["--timed", "2" if small else "12"]
    common = ["--loss-n", few, "--card", str(card), *longest]
    known = ["eval", "--suite", "known", "--n", n, *common]
    return {
        "known": [*known, "--measure", "answers"],
        "known_1.25": [*known, "--controls", "1.25", *timed],
        "known_1.5": [*known, "--controls", "1.5", *timed],
        "unseen": ["eval", "--suite", "unseen", "--n", n, *common, "--controls", "1.25", *plain],
        "known_1.1": [*known, "--controls", "1.1", *plain],
        "equations": ["eval", "--suite", "known_gsm8k_equations", "--n", "24" if small else "1000", *common,
                      "--controls", "1.25", *plain],
        "known_2": [*known, "--controls", "2", *plain],
        "text": ["eval", "--suite", "novels,wikitext2", "--data", str(data), "--n", few, "--measure", "loss", "--card",
                 str(card), "--controls", "1.25", "--loss-groups", "constant"],
        "gsm8k": ["eval", "--suite", "gsm8k", "--data", str(data), "--n", "24" if small else "1319", "--loss-n", few,
                  *longest],
    }


def evaluate(args: argparse.Namespace, name: str, words: list[str]) -> None:
    """Run a command of `shoal eval` and keep its results."""
    work, base = args.work / name, args.work / name.partition("_")[0] / "outcomes.jsonl"
    if base.is_file() and not work.is_dir():  # commands on one suite share what the full model answered
        work.mkdir(parents=True)
        shutil.copy(base, work)
    shoal(args, [*words, *FAST, "--threads", "1", "--out", str(work)], threads=1)
    report = json.loads((work / "results.json").read_text("utf-8"))
    report["command"] = ["shoal", *words, *FAST, "--threads", "1"]
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def shoal(args: argparse.Namespace, words: list[str], threads: int) -> None:
    model = [] if args.model is None else ["--model", args.model]
    command = ["-m", "shoal", *words, *model]
    print("python", *command, flush=True)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *command, "--json"], env=env, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"failed with code {done.returncode}: shoal {' '.join(words)}")


def draw(out: Path, pictures: Path) -> None:
    """Pictures of all results, the controls on one suite at all speed-ups together."""
    from shoal.eval.plots import draw_layers, draw_report

    pictures.mkdir(parents=True, exist_ok=True)
    for path in merged(out):
        draw_report(path, pictures)
    draw_layers(json.loads((out / "card.json").read_text("utf-8")), pictures / "layers.png")
    print(f"pictures are in {pictures}")


if __name__ == "__main__":
    raise SystemExit(main())
