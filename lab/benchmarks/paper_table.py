"""The published setting of D3 (arXiv 2503.08524): GSM8K and BBH, full depth and D3, with lm-evaluation-harness.

    python lab/benchmarks/paper_table.py --model meta-llama/Llama-2-7b-hf --device cuda
    python lab/benchmarks/paper_table.py --data DIR --limit 20

The paper states the mean layers of each run but not alpha, the core or the removal order. So D3 is solved for the
published mean depth over --horizon tokens, with our defaults for the rest; the table shows the realised mean. Models
without published figures run at the depth shares of the 7B model. Needs: pip install 'shoal-lab[eval]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import script
from shoal import catalog
from shoal.methods.d3 import D3
from shoal_lab.eval.harness import compare

PUBLISHED: dict[int, dict[str, dict[str, float]]] = {
    32: {"bbh": {"full": 31.22, "d3": 31.88, "mean": 19.17}, "gsm8k": {"full": 10.61, "d3": 12.05, "mean": 29.9}},
    40: {"bbh": {"full": 37.77, "d3": 39.07, "mean": 20.33}, "gsm8k": {"full": 22.67, "d3": 23.43, "mean": 37.7}},
    80: {"bbh": {"full": 50.90, "d3": 51.42, "mean": 48.43}, "gsm8k": {"full": 52.91, "d3": 54.51, "mean": 76.2}},
}
"""By number of layers (Llama-2 7B, 13B, 70B). GSM8K's means follow from the published speed-ups of 1.05 to 1.07."""


def main() -> int:
    args = arguments().parse_args()
    rows = [run(args, task) for task in args.tasks.split(",")]
    print(table(rows))
    report = {"model": str(args.model), "data": str(args.data), "limit": args.limit, "rows": rows}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = script.parser(__doc__)
    parser.add_argument("--model", help="folder, Hub id or name; SmolLM2-135M-Instruct if none")
    parser.add_argument("--data", metavar="DIR", type=Path, help="holds gsm8k/ and bbh/; the Hub's data sets if none")
    parser.add_argument("--tasks", default="gsm8k,bbh", help="gsm8k, bbh, bbh_<task>")
    parser.add_argument("--limit", metavar="N", type=int, help="documents per task; all if none")
    parser.add_argument("--shots", metavar="N", type=int, help="worked examples per question; the task's own if none")
    parser.add_argument("--start", type=float, default=0.0, help="share of the horizon without decay")
    parser.add_argument("--horizon", type=int, default=256, help="tokens over which D3 is laid out")
    parser.add_argument("--order", default="auto", help="removal order; the paper's is not known")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", metavar="N", type=int, default=8)
    parser.add_argument("--backend", choices=("hf", "packed", "auto"), default="auto", help="who runs the layers")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=256)
    return parser


def run(args: argparse.Namespace, task: str) -> dict[str, Any]:
    """Full depth and D3 on one task, paired document by document."""
    model = catalog.find(args.model)
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    known = PUBLISHED.get(layers, PUBLISHED[32])[task.partition("_")[0]]
    wanted = known["mean"] if layers in PUBLISHED else known["mean"] * layers / 32
    method = D3(mean=max(1.01, wanted), start=args.start, horizon=args.horizon, order=args.order)
    options: dict[str, Any] = {"gen_kwargs": f"max_gen_toks={args.max_new_tokens}"}
    if args.shots is not None:
        options["num_fewshot"] = args.shots
    rows = compare(
        model, {"d3": method}, names(task, args.data), args.data, args.limit, task_options=options, truncation=True,
        engine_backend=args.backend, device=args.device, dtype=args.dtype, batch_size=args.batch,
    )
    full, mine = ([row for row in rows if row["label"] == label][-1] for label in ("full", "d3"))
    return {"task": task, "full": full["accuracy"], "published": known if layers in PUBLISHED else None,
            "wanted_mean": wanted, **{key: mine[key] for key in mine if key not in ("label", "task")}}


def names(task: str, data: Path | None) -> list[str]:
    """Task names: the harness's own definitions if there is no local data."""
    if data is not None:
        return [task]
    return ["bbh_cot_fewshot"] if task == "bbh" else [task]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | n | full % | D3 % | difference [95 %] | p | mean layers | ideal | published full -> D3 |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        paper, gap = row["published"], row["difference"]
        said = "" if paper is None else f"{paper['full']} -> {paper['d3']} at {paper['mean']}"
        lines.append(
            f"| {row['task']} | {row['n']} | {100 * row['full']:.2f} | {100 * row['accuracy']:.2f} | "
            f"{100 * gap['mean']:+.2f} [{100 * gap['low']:+.2f}, {100 * gap['high']:+.2f}] | {gap['p_holm']:.3f} | "
            f"{row['mean_layers']:.2f} / {row['num_layers']} | {row['ideal_speedup']:.2f}x | {said} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
