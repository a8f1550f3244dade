"""Measure everything that lab/reports/quality/README.md reports, on shoal-reference or any other model.

    python lab/benchmarks/quality.py --data DIR
    python lab/benchmarks/quality.py --data DIR --quick --out quick

Calibrates the model, then runs `shoal eval` on every suite, two commands at a time with one thread each. Outcomes are
kept under --work, so an interrupted run resumes; results go to --out, plots to --pictures. The commands are printed,
and each result holds its own. quality_times.py measures times separately, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import quality_dial
from quality_tables import between, merged, tables, times_of

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "models"
FAST = ["--dtype", "bfloat16", "--batch", "16"]  # for comparisons
EXACT = ["--dtype", "float32", "--batch", "64"]  # for calibration


def main() -> int:
    args = arguments().parse_args()
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    card = args.out / "card.json"
    with ThreadPoolExecutor(args.jobs) as pool:
        for number, stage in enumerate(stages(card, args.data, args.quick)):
            if args.minutes is not None and time.monotonic() - started > 60 * args.minutes:
                print(f"out of time before stage {number}; the same command goes on from here")
                break
            list(pool.map(lambda job: evaluate(args, *job), stage))
            publish(args.out, args.pictures)
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", type=Path, required=True, help="holds gsm8k/, wikitext2/, novels/")
    parser.add_argument("--model", metavar="M", default="shoal-reference", help="folder, Hub id or name")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("lab/reports/quality"))
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path("build/quality"), help="outcomes of items")
    parser.add_argument("--pictures", metavar="DIR", type=Path, default=Path("lab/reports/pictures"))
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="commands at a time, one thread each")
    parser.add_argument("--minutes", metavar="T", type=float, help="begin no stage after so long; all if none")
    parser.add_argument("--quick", action="store_true", help="a few items of everything, to see that it runs")
    return parser


def stages(card: Path, data: Path, small: bool) -> list[list[tuple[str, list[str]]]]:
    """Lists of (result, command); those of a list run side by side. The most informative come first."""
    n, few = ("24", "16") if small else ("2000", "300")
    size = ("60", "8", "16") if small else ("200", "48", "300")
    longest = ["--max-new-tokens", "160"]
    common = ["--loss-n", few, *longest]
    known = ["eval", "--suite", "known", "--n", n, *common]
    plain = ["--card", str(card), "--groups", "constant", "--loss-groups", "constant,budgets", "--controls"]
    dial = ["--measure", "answers", "--methods", quality_dial.methods(small)]
    texts = ["eval", "--suite", "novels,wikitext2", "--data", str(data), "--n", few, "--measure", "loss"]
    rest = ["--card", str(card), "--controls"]
    trained = ["eval", "--suite", "known", "--n", "24" if small else "1000", *common,
               "--model", "shoal-reference-layerskip", "--loss-groups", "constant,budgets", "--controls", "1.25"]
    equations = ["eval", "--suite", "known_gsm8k_equations", "--n", "24" if small else "1000", *common]
    return [
        [
            ("card", ["calibrate", "--suite", "known", "--metric", "accuracy", "--max-drop", "0.01", "--trials",
                      size[0], "--loss-n", size[1], "--answer-n", size[2], *longest, "--out", str(card)]),
            ("known", [*known, "--measure", "answers"]),
        ],
        [("known_1.25", [*known, *rest, "1.25"]), ("known_1.1", [*known, *rest, "1.1"])],
        [
            ("known_1.5", [*known, *rest, "1.5"]),
            ("dial", ["eval", "--suite", "known", "--n", "16" if small else "400", *longest, *dial]),
            ("text", [*texts, *plain, "1.1"]),
        ],
        [("known_2", [*known, *rest, "2"]), ("equations", [*equations, *plain, "1.1"])],
        [("layerskip/known_1.25", trained)],
    ]


def evaluate(args: argparse.Namespace, name: str, argv: list[str]) -> None:
    """Run a command of shoal and keep its results."""
    if argv[0] == "calibrate":
        if not (args.out / "card.json").is_file():
            shoal(args, [*argv, *EXACT, "--threads", "1"])
        return
    work, base = args.work / name, args.work / name.partition("_")[0] / "outcomes.jsonl"
    if base.is_file() and not work.is_dir():  # commands on one suite share the full model's answers
        work.mkdir(parents=True)
        shutil.copy(base, work)
    shoal(args, [*argv, *FAST, "--threads", "1", "--out", str(work)])
    report = json.loads((work / "results.json").read_text("utf-8"))
    report["command"] = ["shoal", *argv, *FAST, "--threads", "1"]
    (args.out / name).parent.mkdir(exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def shoal(args: argparse.Namespace, argv: list[str]) -> None:
    model = [] if "--model" in argv else ["--model", args.model]
    command = ["-m", "shoal", *argv, *model]
    print("python", *command, flush=True)
    env = {"SHOAL_MODELS": str(FIXTURES), **os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=env, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"failed with code {done.returncode}: shoal {' '.join(argv)}")


def publish(out: Path, pictures: Path) -> None:
    """Plots of all results, the controls on one suite at all speed-ups together, and the tables of the page."""
    from shoal_lab.eval.plots import draw_layers, draw_positions, draw_report

    pictures.mkdir(parents=True, exist_ok=True)
    for report in merged(out):
        suite = report["suites"][0]
        if suite["suite"] == "known":
            draw_report(report, pictures)
        elif "by_position" in suite:  # measured at one speed-up, which gives no curve
            draw_positions(suite, pictures / f"{suite['suite']}-positions.png")
    found = tables(out) | {f"layerskip {name}": table for name, table in tables(out / "layerskip").items()}
    if (out / "dial.json").is_file():
        dial = json.loads((out / "dial.json").read_text("utf-8"))
        known = [row for report in merged(out) for row in report["suites"][0].get("answers", ())]
        quality_dial.draw(dial, known, pictures / "dial.png")
        found["dial"] = quality_dial.table(dial, times_of(out))
    draw_layers(json.loads((out / "card.json").read_text("utf-8")), pictures / "layers.png")
    page = out / "README.md"
    if out.resolve() == ROOT / "lab" / "reports" / "quality" and page.is_file():
        page.write_text(between(page.read_text("utf-8"), found), encoding="utf-8")
    print(f"results are in {out}, pictures in {pictures}")


if __name__ == "__main__":
    raise SystemExit(main())
