"""Whether a model file runs correctly: perplexity, logits and greedy text against the same weights in float32.

    python lab/benchmarks/fidelity.py --model FILE.gguf --text test.txt --work DIR --json OUT \
        [--systems shoal,llama.cpp,...] [--tokens 20000] [--window 512] [--minutes 10]

The reference is transformers on the file's weights, dequantised to float32. Every system reads in a process of its own,
one after the other, each for at most `--minutes`; results are kept in the folder `--work`, and the same command
resumes. `--join` only writes the report from the results. For systems see `SYSTEMS` in lab/benchmarks/readers.py; those
in Shoal's own formats read the folder `--dequantised`, which is made below `--work` by default.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import perplexity
import readers
import script
from real_page import fidelity_rows
from shoal.cli import env
from shoal_lab.bench import bandwidth, idle, report
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.speed import dequantised
from shoal_lab.bench.table import aligned
from shoal_lab.cli.divergence import diverge

PROBE = 64
"""Tokens whose logits are compared one by one."""

PROMPTS, PROMPT, ANSWER = 4, 64, 48
"""Greedy texts: their number, tokens of each prompt, tokens of each answer."""


def main(argv: Sequence[str]) -> int:
    """Let every system read, then write the report."""
    args = arguments(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.only is not None:
        read_one(args, args.only)
        return 0
    systems = [readers.REFERENCE, *(name for name in args.systems.split(",") if name != readers.REFERENCE)]
    absent = {}
    for name in () if args.join else systems:
        done = subprocess.run([sys.executable, __file__, *argv, "--only", name], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            absent[name] = (done.stderr.strip().splitlines() or [f"its process ended with code {done.returncode}"])[-1]
            print(f"{name}: {absent[name]}", file=sys.stderr)
    found = joined(args, systems, absent, ["python", "lab/benchmarks/fidelity.py", *argv])
    if args.json is not None:
        report.write(found, args.json)
    print(text(found))
    print(json.dumps(found))
    return 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--work", type=Path, required=True, help="folder for what has been read so far")
    parser.add_argument("--systems", default=",".join(readers.SYSTEMS), help="separated by commas")
    parser.add_argument("--dequantised", help="the file's weights as a folder of safetensors")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--minutes", type=float, help="most time that a system reads in one go, loading not counted")
    parser.add_argument("--join", action="store_true", help="read nothing, write the report")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def read_one(args: argparse.Namespace, name: str) -> None:
    """Let one system read, in this process."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model = MeasuredModel(model=args.model, dequantised=args.dequantised)
    if readers.OURS.get(name, "file") != "file" and args.dequantised is None:
        model = MeasuredModel(model=args.model, dequantised=str(made(args, model)))
    ids, first = tokens_of(args, model)
    pieces = perplexity.windows(ids, args.tokens, args.window, first)
    record = args.work / f"{slug(name)}.json"
    about = {"model": Path(args.model).name, "text": args.text.name, "window": args.window, "first": first,
             "tokens": args.tokens}
    begun = perplexity.resume(record, about)
    if len(begun["losses"]) == len(pieces) and "greedy" in begun:
        return
    reader = readers.open_reader(name, model, torch.get_num_threads())
    if "greedy" not in begun:
        logits = reader.logits(pieces[0][:PROBE])
        numpy.save(args.work / f"{slug(name)}.npy", logits.float().numpy())
        begun["greedy"] = [reader.greedy(piece[:PROMPT], ANSWER) for piece in pieces[:PROMPTS]]
        begun["bits_per_weight"], begun["threads"] = reader.bits_per_weight, torch.get_num_threads()
        record.write_text(json.dumps(begun), encoding="utf-8")
    until = None if args.minutes is None else time.perf_counter() + 60 * args.minutes
    perplexity.read(reader, pieces, record, about, until)


def made(args: argparse.Namespace, model: MeasuredModel) -> Path:
    """The dequantised folder, written once."""
    folder: Path = args.work / "dequantised"
    if not (folder / "model.safetensors").is_file() and not (folder / "model.safetensors.index.json").is_file():
        dequantised.write(model, folder)
    return folder


def tokens_of(args: argparse.Namespace, model: MeasuredModel) -> tuple[list[int], int | None]:
    """The text's ids without special tokens, and the token that begins every text, if any; kept in the folder."""
    place = args.work / "ids.json"
    about = [Path(args.model).name, args.text.name, args.tokens]
    if place.is_file() and (kept := json.loads(place.read_text("utf-8")))["about"] == about:
        return kept["ids"], kept["first"]
    tokenizer = model.tokenizer()
    text = args.text.read_text(encoding="utf-8")[: 12 * args.tokens]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: args.tokens]
    start = tokenizer("a")["input_ids"]
    first = start[0] if start and start[0] == tokenizer.bos_token_id else None
    place.write_text(json.dumps({"about": about, "ids": ids, "first": first}), encoding="utf-8")
    return ids, first


def joined(
    args: argparse.Namespace, systems: Sequence[str], absent: dict[str, str], command: Sequence[str]
) -> dict[str, Any]:
    """The report from the existing records."""
    model = MeasuredModel(model=args.model)
    records = {name: args.work / f"{slug(name)}.json" for name in systems}
    found = {name: json.loads(path.read_text("utf-8")) for name, path in records.items() if path.is_file()}
    if readers.REFERENCE not in found:
        raise SystemExit(f"the reference has read nothing yet: {absent.get(readers.REFERENCE, 'run without --join')}")
    return {
        **report.heading(env.collect(), command),
        "kind": "fidelity",
        "subject": dict(model.facts()),
        "text": args.text.name,
        "window": {"tokens": args.window, "stride": args.window, "judged": "all tokens but a window's first",
                   "begins_with": found[readers.REFERENCE]["about"]["first"]},
        "roof": {"unit": "bytes/s", "median": bandwidth.read_bandwidth(0.5)},
        "idle": {"now": idle.watch(0.5)},
        "results": [row(args.work, name, one, found[readers.REFERENCE]) for name, one in found.items()],
        "not_measured": [{"system": name, "quant": None, "what": None, "reason": why} for name, why in absent.items()],
    }


def row(work: Path, name: str, found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """All figures of one system."""
    ours, theirs = (torch.from_numpy(numpy.load(work / f"{slug(one)}.npy")) for one in (name, readers.REFERENCE))
    error = perplexity.logit_error(ours, theirs)
    seconds = found["seconds"]
    return {
        "system": name, "bits_per_weight": found["bits_per_weight"], **perplexity.against(found, reference),
        "logits": {"tokens": PROBE, **error},
        "greedy": greedy(found["greedy"], reference["greedy"], 2 * error["largest"]),
        "tokens_per_second": sum(found["judged"]) / seconds if seconds else None, "threads": found["threads"],
    }


def greedy(found: Sequence[Any], reference: Sequence[Any], tolerance: float) -> dict[str, Any]:
    """Where greedy texts diverge from the reference's; a margin below the logits' largest difference is a tie."""
    parted = []
    for (tokens, _), (expected, margins) in zip(found, reference, strict=True):
        parted.append(diverge(expected, tokens, lambda before, gaps=margins: gaps[len(before)], tolerance))
    return {
        "texts": len(parted), "tokens": ANSWER, "tolerance": tolerance,
        "equal": sum(one.at is None for one in parted), "ties": sum(one.tie for one in parted),
        "wrong": sum(one.wrong for one in parted), "parted_at": [one.at for one in parted],
        "margins": [one.margin for one in parted],
    }


def slug(name: str) -> str:
    """A file name."""
    return name.replace(" ", "-")


def text(found: dict[str, Any]) -> str:
    """A table for a terminal."""
    return "\n".join(aligned(fidelity_rows(found)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
