"""The kernels' vector sets compared on one processor: prefill, and rows that decode together.

    python lab/benchmarks/vectors.py --model MODEL --text TEXT [--quant int8] [--sets amx,avx512] [--rounds 6]
        [--json OUT]

The set `amx/whole` reads the whole LM head where `amx` finds the argmax by bounds.

A process per set, chosen by SHOAL_NATIVE, all loaded at once; they take turns by the round, every other round
backwards. Ratios are of times within a round, the last set's over the first one's. The last line on stdout is the
result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import script
import shoal
from shoal.cli import env
from shoal.engine.engine import Engine
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal_lab.bench import idle, report, rounds

WORK = {"prompt of 64": (64, 1, 1), "prompt of 512": (512, 1, 1), "decode": (64, 1, 41), "decode 8 rows": (64, 8, 41),
        "decode 16 rows": (64, 16, 41)}
"""What is timed -> tokens of a prompt, rows, new tokens of each."""
_WHOLE = "/whole"


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--quant", choices=("int8", "int4"))
    parser.add_argument("--sets", default="amx,avx512", help="what SHOAL_NATIVE may be")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        engine = shoal.load(args.model, quant=args.quant)
        assert isinstance(engine.runner, NativeRunner)
        engine.runner.bounds_logits = not args.serve.endswith(_WHOLE)
        serve(engine, args.text.read_text("utf-8")[:20_000])
        return
    sets = args.sets.split(",")
    machine, processes = env.collect(), {vectors: started(vectors) for vectors in sets}
    for process in processes.values():  # load, and warm up
        ask(process, "prompt of 64")
    before = idle.snapshot([process.pid for process in processes.values()])
    times: dict[str, dict[str, list[float]]] = {label: {vectors: [] for vectors in sets} for label in WORK}
    for turn in range(args.rounds):
        for label in WORK:
            for vectors in rounds.in_order(sets, turn):
                times[label][vectors].append(ask(processes[vectors], label))
    busy = idle.others(before, idle.snapshot([process.pid for process in processes.values()]))
    for process in processes.values():
        process.kill()
    heading = script.heading(__file__, sys.argv[1:], machine)
    work = {label: {"seconds": {vectors: rounds.figure(values) for vectors, values in found.items()},
                    "ratio": rounds.ratio(b / a for a, b in zip(found[sets[0]], found[sets[-1]], strict=True)),
                    "times": found} for label, found in times.items()}
    report.publish({**heading, "sets": sets, "busy": busy, "work": work}, args.json)


def started(vectors: str) -> subprocess.Popen[str]:
    """A process that runs on these vectors and answers line by line."""
    argv = [sys.executable, __file__, *sys.argv[1:], "--serve", vectors]
    environment = {**os.environ, "SHOAL_NATIVE": vectors.removesuffix(_WHOLE)}
    return subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], label: str) -> float:
    """Seconds of one piece of work in a process."""
    assert process.stdin is not None and process.stdout is not None
    print(label, file=process.stdin, flush=True)
    return float(json.loads(process.stdout.readline()))


def serve(engine: Engine, text: str) -> None:
    """The other side of `ask`."""
    assert native.vector_set() == os.environ["SHOAL_NATIVE"], native.vector_set()
    tokens: list[int] = engine.tokenizer(text)["input_ids"]
    for number, line in enumerate(sys.stdin):  # prompts differ, so that no prefix is found again
        length, rows, new = WORK[line.rstrip()]
        prompts = [[*tokens[row : row + length - 1], tokens[2000 + number]] for row in range(rows)]
        began = time.perf_counter()
        stats = engine.generate(prompts, max_new_tokens=new, ignore_eos=True)[0].stats
        print(stats.decode_seconds if new > 1 else time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
