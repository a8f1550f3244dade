"""What the types of GGUF files cost in numbers: Shoal and llama.cpp beside exact arithmetic on the same file.

    python lab/benchmarks/file_types.py --model FILE.gguf --to DIR --text test.txt --importance valid.txt --json OUT \
        [--types Q2_K,...] [--windows 8] [--window 128] [--rounds 0]

llama.cpp's quantiser makes a file of each type from FILE in its usual mix, with an importance matrix: the mean square
of every input of every matrix over a text, which is what llama.cpp's own tool collects, taken here from transformers'
modules. The reference is those modules in float32 on the new file's numbers. `kl` is the mean divergence of a system's
next-token distributions from the reference's, in nats. Files stay in `--to`.

With `--rounds` it measures speed instead: Shoal and llama.cpp, each in a process, decode one row in turns. That takes
an idle machine.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

import perplexity
import readers
import script
from shoal.engine.loading.checkpoint import Checkpoint
from shoal_lab.bench import baselines, gguf_facts, idle, report, rounds
from shoal_lab.bench.baselines.gguf_file import requantise
from shoal_lab.bench.baselines.llama_cpp import library
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.speed.ours import Shoal
from shoal_lab.bench.speed.run import prompts_for
from shoal_lab.bench.system import Setting
from shoal_lab.bench.worker import SystemProcess

Array = np.ndarray[Any, Any]
MIXES = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL",
         "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0")
"""Names of mixes of the quantiser. MXFP4 and NVFP4 are none of dense models: all matrices of layers are of them."""
SOURCE = "source"
"""The file that the others are made of."""
SYSTEMS = ("shoal", readers.FLOAT32, "llama.cpp")
_READ = 16
"""Windows of the text that the importance matrix is taken from."""


def main(argv: Sequence[str]) -> int:
    """Make the files, measure, write the report after every type."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="that is judged")
    parser.add_argument("--importance", type=Path, required=True, help="text of the importance matrix")
    parser.add_argument("--types", default=",".join((SOURCE, *MIXES)), help="separated by commas")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=128, help="tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(),
                        help="of llama.cpp when it reads, of both when they are timed")
    parser.add_argument("--rounds", type=int, default=0, help="of speed, which is then measured instead of numbers")
    args = parser.parse_args(argv)
    source = MeasuredModel(model=str(args.model))
    weights = kept_importance(args.to / f"{args.model.stem}-importance.npz", source, args.importance)
    about = {**script.heading(__file__, argv), "model": args.model.name}
    if args.rounds:
        about |= {"kind": "speed of file types", "threads": args.threads}
        figures = partial(timed, rounds_wanted=args.rounds, threads=args.threads)
    else:
        about |= {"kind": "file types", "text": args.text.name, "window": args.window}
        figures = partial(measured, pieces=cut(source, args.text, args.windows, args.window), threads=args.threads)
    rows = []
    for kind in args.types.split(","):
        path = args.model if kind == SOURCE else args.to / f"{args.model.stem}-{kind}.gguf"
        if not path.is_file():
            requantise(library(), args.model, path, kind, torch.get_num_threads(), pure=False, importance=weights)
        rows.append(figures(path, kind))
        if args.json is not None:  # a type takes minutes
            report.write({**about, "results": rows}, args.json)
    print(json.dumps({**about, "results": rows}))
    return 0


def cut(model: MeasuredModel, text: Path, count: int, length: int) -> list[list[int]]:
    """The first windows of a text."""
    tokenizer = model.tokenizer()
    ids = tokenizer(text.read_text(encoding="utf-8")[: 12 * count * length], add_special_tokens=False)["input_ids"]
    start = tokenizer("a")["input_ids"][0]
    first = start if start == tokenizer.bos_token_id else None
    return perplexity.windows(ids, count * length, length, first)[:count]


def kept_importance(path: Path, model: MeasuredModel, text: Path) -> Mapping[str, Array]:
    """Of each matrix of the layers, by its name in the file: float32 [inputs]; kept at the path."""
    if not path.is_file():
        found = importance(Checkpoint(str(model.model), None, False).model(torch.float32), cut(model, text, _READ, 512))
        names = gguf.get_tensor_name_map(arch(model), model.text.num_hidden_layers)
        np.savez(path, **{f"{names.get_name(name)}.weight": one.numpy() for name, one in found.items()})
    return dict(np.load(path))


def arch(model: MeasuredModel) -> Any:
    """The architecture, as the package gguf numbers it."""
    name = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    field = gguf.GGUFReader(str(model.model)).fields["general.architecture"]
    return name[field.contents()]


def importance(model: Any, pieces: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Mean square of each input of each matrix of the layers, float32 [inputs], by the module's name."""
    sums: dict[str, Tensor] = {}
    with watched(model, sums), torch.inference_mode():
        for ids in pieces:
            model(torch.tensor([list(ids)]), use_cache=False)
    return {name: total / sum(map(len, pieces)) for name, total in sums.items()}


@contextmanager
def watched(model: Any, sums: dict[str, Tensor]) -> Iterator[None]:
    """Add up the squares of what the layers' matrices read."""
    def adding(name: str) -> Any:
        def add(_: Any, inputs: tuple[Tensor, ...]) -> None:
            sums[name] = sums.get(name, torch.zeros(())) + inputs[0].flatten(0, -2).square().sum(0)

        return add

    hooks = [module.register_forward_pre_hook(adding(name)) for name, module in model.named_modules()
             if ".layers." in name and isinstance(module, torch.nn.Linear)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measured(path: Path, kind: str, pieces: Sequence[Sequence[int]], threads: int) -> dict[str, Any]:
    """Figures of one file."""
    model = MeasuredModel(model=str(path))
    exact = logits_of(readers.MODULES, model, pieces, threads)
    row = {"type": kind, "file": gguf_facts.read(path).to_dict(), "tokens": sum(len(ids) - 1 for ids in pieces),
           "reference_perplexity": perplexed(exact, pieces)}
    for name in SYSTEMS:
        found = logits_of(name, model, pieces, threads)
        each = [divergence(ours, theirs) for ours, theirs in zip(found, exact, strict=True)]
        row[name] = {"kl": float(torch.cat(each).mean()), "kl_of_windows": [float(one.mean()) for one in each],
                     "perplexity": perplexed(found, pieces)}
    print(json.dumps(row), file=sys.stderr)
    return row


def timed(path: Path, kind: str, rounds_wanted: int, threads: int) -> dict[str, Any]:
    """Seconds per token of one row, in rounds whose order turns, and how many times as fast Shoal is."""
    model = MeasuredModel(model=str(path))
    setting = Setting("bfloat16", FILE, threads=threads)
    systems = {"shoal": SystemProcess(Shoal, model, setting),
               "llama.cpp": SystemProcess(baselines.load("llama.cpp"), model, setting)}
    found: dict[str, list[float]] = {name: [] for name in systems}
    try:
        for process in systems.values():
            process.call("prepare")
            seconds_per_token(process, model)
        busy = idle.watch(1.0)
        for number in range(rounds_wanted):
            for name in rounds.in_order(list(systems), number):
                found[name].append(seconds_per_token(systems[name], model))
    finally:
        for process in systems.values():
            process.stop()
    ratios = (theirs / ours for ours, theirs in zip(found["shoal"], found["llama.cpp"], strict=True))
    row = {"type": kind, "file": gguf_facts.read(path).to_dict(), "busy_before": busy, "seconds_per_token": found,
           "times_faster": rounds.ratio(ratios)}
    print(json.dumps(row), file=sys.stderr)
    return row


def seconds_per_token(process: SystemProcess, model: MeasuredModel) -> float:
    """Of an answer of 32 tokens after a prompt of 64."""
    times = process.call("generate", prompts_for(1, 64, model.text.vocab_size), 33, None).times
    return round((times[-1] - times[0]) / 32, 6)


def logits_of(name: str, model: MeasuredModel, pieces: Sequence[Sequence[int]], threads: int) -> list[Tensor]:
    """float32 [tokens, V] of each window."""
    reader = readers.open_reader(name, model, threads)
    return [reader.logits(ids) for ids in pieces]


def divergence(found: Tensor, exact: Tensor) -> Tensor:
    """KL(exact || found) of every position, float64 [tokens], nats; of logits [tokens, V], some of which are padded."""
    width = min(found.shape[1], exact.shape[1])
    parts = zip(found[:, :width].split(32), exact[:, :width].split(32), strict=True)
    return torch.cat([_divergence(ours.double(), theirs.double()) for ours, theirs in parts])


def _divergence(found: Tensor, exact: Tensor) -> Tensor:
    target = exact.log_softmax(-1)
    return (target.exp() * (target - found.log_softmax(-1))).sum(-1)


def perplexed(found: Sequence[Tensor], pieces: Sequence[Sequence[int]]) -> float:
    """Perplexity over all windows."""
    losses = [perplexity.loss(logits, ids) for logits, ids in zip(found, pieces, strict=True)]
    return math.exp(sum(losses) / sum(len(ids) - 1 for ids in pieces))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
