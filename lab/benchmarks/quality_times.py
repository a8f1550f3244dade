"""Time every method in the results of quality.py, one answer at a time, in turn. Run it on an idle machine.

    python lab/benchmarks/quality_times.py

Reads lab/reports/quality/*.json and writes times.json beside them; quality.py puts the figures into its tables. The
model runs in Shoal's default dtype for the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import shoal
from quality import publish
from quality_tables import key_of
from shoal import methods
from shoal.cli import env
from shoal_lab.eval import suites
from shoal_lab.eval.decoders import Candidate, Decoder, candidate
from shoal_lab.eval.items import encode
from shoal_lab.eval.timing import alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="M", default="shoal-reference", help="folder, Hub id or name")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("lab/reports/quality"), help="of quality.py")
    parser.add_argument("--pictures", metavar="DIR", type=Path, default=Path("lab/reports/pictures"))
    parser.add_argument("--items", metavar="N", type=int, default=24, help="answers of each method")
    parser.add_argument("--threads", metavar="N", type=int, default=1, help="of torch")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=160, help="longest answer")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    specs = found(args.out)
    engine = shoal.load(args.model)
    items = suites.get("known").items(None, limit=args.items, seed=1)
    samples = encode(items, engine.tokenizer, min(engine.eos_token_ids), engine.runner.max_positions)
    who: list[Candidate] = [candidate(engine, methods.make(spec), args.max_new_tokens) for spec in specs]
    print(f"{len(who)} methods, {len(samples)} answers each", flush=True)
    timed = alone(Decoder(engine), samples, who, args.max_new_tokens)
    report = {
        "command": ["python", "lab/benchmarks/quality_times.py", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d"),
        "machine": env.collect(),
        "threads": args.threads,
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
        "times": [{"method": spec, **figures} for spec, figures in zip(specs, timed, strict=True) if figures],
    }
    (args.out / "times.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    publish(args.out, args.pictures)
    return 0


def found(out: Path) -> list[dict]:
    """The methods of all results, each once, the full model first; schedules without a method are left out."""
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(out.glob("*.json"))]
    rows = [row for report in reports for suite in report.get("suites", ()) for row in suite.get("answers", ())]
    first = methods.make("full").to_dict()
    specs = {key_of(spec): spec for spec in (first, *(row["method"] for row in rows))}
    return [spec for spec in specs.values() if spec["method"] in methods.names()]


if __name__ == "__main__":
    raise SystemExit(main())
