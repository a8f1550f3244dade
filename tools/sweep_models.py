#!/usr/bin/env python3
"""Run a tiny random model of every causal type of the installed transformers, and say which are decoded right.

    python tools/sweep_models.py --out docs/supported_models.json
    python tools/sweep_models.py llama gpt_neo

Each configuration is decoded by the model's own modules and by the packed executor, plainly and with methods that
draft, in a batch and alone, and compared with transformers' own generate; D3 is compared with uncached passes. Shoal
has to be right, or to refuse the model with a reason. Exit code 1 where it is neither. `make_docs.py` makes
docs/supported_models.md of the report.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

from tools.sweep.workers import run_all  # noqa: E402


def main(words: list[str]) -> int:
    """Sweep, print a line for each row, write the report."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; all where none is named")
    parser.add_argument("--out", type=Path, help="the report, as JSON; rows of named types replace theirs in it")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one configuration")
    args = parser.parse_args(words)
    report = sweep(args.types, args.workers, args.limit)
    counts = Counter(row["outcome"] for row in report["rows"])
    print(json.dumps({"outcomes": counts, "seconds": report["seconds"]}))
    if args.out is not None:
        if args.types and args.out.is_file():
            report = merged(json.loads(args.out.read_text("utf-8")), report)
        rows = ",\n".join(json.dumps(row) for row in report.pop("rows"))
        args.out.write_text(f"{json.dumps(report)[:-1]}, \"rows\": [\n{rows}\n]}}\n", encoding="utf-8")
    return int(counts["wrong"] > 0)


def sweep(types: list[str], workers: int, limit: float) -> dict[str, Any]:
    """The report of some types, or of all."""
    import torch
    import transformers
    from tools.sweep.configs import configurations
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    transformers.logging.set_verbosity_error()
    jobs = [(kind, name) for kind in types or CAUSAL for name in configurations(kind)]
    rows: list[dict[str, Any]] = []
    started = time.monotonic()

    def done(row: dict[str, Any]) -> None:
        rows.append(row)
        name = f"{row['model_type']} {row['configuration']}".strip()
        print(f"{len(rows)}/{len(jobs)} {name}: {row['outcome']} {row['reason'][:200]}", file=sys.stderr, flush=True)

    run_all(jobs, workers, limit, done)
    rows.sort(key=_place)
    return {
        "command": "python tools/sweep_models.py --out docs/supported_models.json",
        "transformers": transformers.__version__, "torch": torch.__version__,
        "seconds": round(time.monotonic() - started), "rows": rows,
    }


def merged(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A report of every type with the rows of some types in place of those it had."""
    if known["transformers"] != new["transformers"]:
        raise SystemExit(f"the report is of transformers {known['transformers']}; sweep every type")
    types = {row["model_type"] for row in new["rows"]}
    rows = [*(row for row in known["rows"] if row["model_type"] not in types), *new["rows"]]
    return {**known, "rows": sorted(rows, key=_place)}


def _place(row: dict[str, Any]) -> tuple[str, str]:
    return row["model_type"], row["configuration"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
