"""Measure real model files: speed, loading, fidelity, formats. Takes an idle machine and about an hour.

    python lab/benchmarks/real.py --text ../shared/data/wikitext2/test.txt --work DIR [--minutes 60] [--dry-run]
        [--models smollm2-135m,...] [--parts speed,together,startup,fidelity,quantised,formats] [--methods auto]

The files are looked for in $SHOAL_MODELS, otherwise in ~/.cache/shoal-models. Each part of each model is a command of
its own, which is printed, limited to its share of `--minutes`, and writes lab/reports/real/MODEL-PART.json; a command
that fails is reported at the end and stops nothing. Weights in other formats and fidelity's readings are kept below
`--work`, so that another run resumes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("lab") / "reports" / "real"

MODELS = {
    "smollm2-135m": ("SmolLM2-135M-Instruct.Q4_1.gguf", 1.0),
    "gemma3-270m": ("gemma-3-270m-q4_k_m.gguf", 1.2),
    "qwen2.5-coder-0.5b": ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 2.0),
    "qwen2.5-coder-1.5b": ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 4.5),
}
"""Name -> file, and share of the time."""

PARTS = {"speed": 0.25, "together": 0.1, "startup": 0.15, "fidelity": 0.2, "quantised": 0.2, "formats": 0.1}
"""Part -> share of the time."""

READERS = {
    "fidelity": ("shoal", "llama.cpp"),
    "quantised": ("shoal bf16", "shoal int8", "shoal int4", "llama.cpp Q8_0", "llama.cpp Q4_0", "llama.cpp Q4_1",
                  "llama.cpp Q4_K_M"),
}
"""Part -> systems that read the text after the reference, which has already read it before the second part."""


def main(argv: Sequence[str]) -> int:
    """Run every command in turn."""
    args = arguments(argv)
    (ROOT / OUT).mkdir(exist_ok=True)
    failed = []
    for part in args.parts.split(","):
        for name in args.models.split(","):
            command = command_of(part, name, args)
            print(shlex.join(command), flush=True)
            if not args.dry_run and subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
                failed.append(f"{name} {part}")
    print("failed: " + ", ".join(failed) if failed else "all done", "(then: python lab/tools/bench_table.py)")
    return int(bool(failed))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options, checked before anything runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="wikitext-2's test split, or another UTF-8 text")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0, help="for everything, loading roughly included")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--methods", help="Shoal's methods beside plain decoding, as for shoal bench")
    parser.add_argument("--tokens", type=int, default=20_000, help="that fidelity reads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    args = parser.parse_args(argv)
    for option, known in (("models", MODELS), ("parts", PARTS)):
        wrong = [word for word in getattr(args, option).split(",") if word not in known]
        if wrong:
            parser.error(f"--{option} holds {wrong[0]!r}; known: {', '.join(known)}")
    return args


def command_of(part: str, name: str, args: argparse.Namespace) -> list[str]:
    """The command line of a model's part."""
    folder = Path(os.environ.get("SHOAL_MODELS") or Path.home() / ".cache" / "shoal-models")
    file, report = str(folder / MODELS[name][0]), str(OUT / f"{name}-{part}.json")
    work, text = args.work.resolve() / name, os.path.relpath(args.text, ROOT)
    minutes = minutes_of(part, name, args)
    bench = [sys.executable, "-m", "shoal", "bench", "--model", file, "--rounds", str(args.rounds),
             "--minutes", f"{minutes:.1f}", "--json", report]
    methods = ["--methods", args.methods] if args.methods else []
    if part == "speed":
        return [*bench, "--peer", "hf", "--peer", "llama.cpp", "--text", text, "--context", "64", "--new-tokens", "96",
                "--prefill", "64,512", *methods]
    if part == "together":
        return [*bench, "--peer", "llama.cpp", "--text", text, "--context", "64", "--new-tokens", "32",
                "--batch", "8", "--positions", "1,2,4,8,16"]
    if part == "startup":
        return [*bench, "--startup", "--peer", "hf", "--peer", "llama.cpp"]
    if part == "formats":
        kept = work / "dequantised"
        given = ["--dequantised", str(kept)] if (kept / "config.json").is_file() or args.dry_run else []
        return [*bench, "--quant", "none,int8,int4", "--dtype", "bfloat16", "--peer", "llama.cpp", "--text", text,
                "--context", "64", "--new-tokens", "96", *given]
    return [sys.executable, "lab/benchmarks/fidelity.py", "--model", file, "--text", text, "--work", str(work),
            "--tokens", str(args.tokens), "--systems", ",".join(READERS[part]),
            "--minutes", f"{minutes / (1 + len(READERS[part])):.2f}", "--json", report]


def minutes_of(part: str, name: str, args: argparse.Namespace) -> float:
    """A command's share of the time."""
    models, parts = args.models.split(","), args.parts.split(",")
    share = PARTS[part] / sum(PARTS[one] for one in parts) * MODELS[name][1] / sum(MODELS[one][1] for one in models)
    return float(args.minutes * share)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
