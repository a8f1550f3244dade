"""Divergence from the model if tokens of answers run a part of the MLPs: `read_me` compared with other choices.

    python lab/benchmarks/experts.py --model M.gguf --part PART --answers DIR [--texts 24] [--epochs 16] [--json OUT]
    python lab/benchmarks/experts.py --model M.gguf --part PART --rounds 15 [--json OUT]

PART is the output of `shoal train read_me --model M.gguf --out PART --answers DIR`. On held-out answers, with prompts
that run all neurons, it measures the mean Kullback-Leibler divergence from the whole model, the share of its argmax
tokens that stay argmax, and the share of the MLPs' outputs (by squared norms of groups) from what runs. The router is
compared with as many random groups; the groups that a token's own forward would choose; the same for groups of random
neurons, with a router trained alike; and the same neurons for all tokens, those used most, or those that `shoal prune
ppm` and `shoal prune cfsp --uniform` keep. The latter are also measured with prompts that run only these neurons, as in
a pruned model.

With --rounds it measures the time of a token on the model's default executor: all neurons and some of them take turns,
in the file's own types (whose groups are int8 copies), int8 and int4; a ratio is one of two neighbours, with the
quartiles of all. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

import script
import shoal
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.methods.full import Full
from shoal.model.packed.linear import Quant
from shoal.speculative import draft_head_file
from shoal.speculative.draft_head_file import DraftHead
from shoal_lab.bench import report
from shoal_lab.calibrate import neurons
from shoal_lab.components.router import BIAS, MIX, NEURONS, OUT
from shoal_lab.methods.read_me import ReadME
from shoal_lab.train.corpus import Corpus, batches
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from shoal_lab.train.read_me import ReadMEModule, some_answers

SHARES = (0.75, 0.5)
_BATCH, _TOKENS = 2048, 64
_PROMPT = "Write a long story about a lighthouse keeper and the sea.\n"


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--part", required=True)
    parser.add_argument("--answers", type=Path, help="those that the part was trained on; they are measured")
    parser.add_argument("--rounds", type=int, default=0, help="of steps that are timed")
    parser.add_argument("--texts", type=int, default=24, help="answers that are measured, at most")
    parser.add_argument("--epochs", type=int, default=16, help="of the router of random groups; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = script.heading(__file__, sys.argv[1:])
    if args.answers is not None:
        found |= _losses(args)
    if args.rounds:
        found["times"] = [row for quant in (None, "int8", "int4") for row in _times(args, quant)]
    report.publish(found, args.json)


def _losses(args: argparse.Namespace) -> dict[str, Any]:
    """The losses, by who chooses."""
    engine, answers = shoal.load(args.model, backend="hf", dtype="float32"), Corpus(args.answers)
    part = draft_head_file.read(args.part, "read_me", engine.info())
    held_out = [TextBatch.of(some) for some in batches(answers.validation(args.texts), _BATCH)]
    rows = [row for measure in (_routed, _random, _static)
            for row in measure(args, engine, part, answers, held_out)]
    texts = sum(len(batch.tokens) for batch in held_out)
    return {"model": Path(engine.model_name).name, "shape": dict(part.shape), "texts": texts, "rows": rows}


def _times(args: argparse.Namespace, quant: Quant | None) -> list[dict[str, Any]]:
    """Milliseconds of a token, and ratios of neighbouring times."""
    engine = shoal.load(args.model, quant=quant)
    groups = draft_head_file.read(args.part, "read_me", engine.info()).size("groups")
    ways = {1.0: Full(), **{share: ReadME(args.part, round(share * groups)) for share in SHARES}}
    taken: dict[float, list[float]] = {share: [] for share in ways}
    for turn in range(args.rounds + 1):
        for share, method in ways.items():
            stats = engine.generate(_PROMPT, method=method, max_new_tokens=_TOKENS).stats
            if turn:  # the first one makes groups and warms up
                taken[share].append(1e3 * stats.decode_seconds / (stats.new_tokens - 1))
    rows = []
    for share, times in taken.items():
        ratios = [whole / some for whole, some in zip(taken[1.0], times, strict=True)]
        low, middle, high = (round(one, 3) for one in quantiles(ratios, n=4))
        rows.append({"quant": quant, "share": share, "ms": round(median(times), 3), "gain": middle,
                     "quartiles": [low, high], "raw": [round(one, 3) for one in times]})
        _tell(f"{quant or 'file':5} {share:.2f} {rows[-1]['ms']:.2f} ms a token, {middle:.2f} [{low:.2f}, {high:.2f}]")
    return rows


def _routed(
    args: argparse.Namespace, engine: Engine, part: DraftHead, answers: Corpus, held_out: Sequence[TextBatch]
) -> list[dict[str, Any]]:
    """The component's own groups."""
    shape = part.shape
    groups = part.take(NEURONS, shape["layers"], shape["groups"], shape["neurons"]).long()
    module = ReadMEModule(Base(engine.runner), engine.model, groups, shape["shared"], shape["groups"])
    with torch.no_grad():
        for name, layer in ((MIX, module.mix), (OUT, module.out)):
            layer.weight.copy_(part.take(name, *layer.weight.shape))
            layer.bias.copy_(part.take(BIAS.format(name), *layer.bias.shape))
    return _rows(module, held_out, {"router": module.routed, "groups by lot": module.drawn,
                                    "each token's best groups": module.oracle})


def _random(
    args: argparse.Namespace, engine: Engine, part: DraftHead, answers: Corpus, held_out: Sequence[TextBatch]
) -> list[dict[str, Any]]:
    """Groups of random neurons with the same shared ones, and a router of their own."""
    shape, generator = part.shape, torch.Generator().manual_seed(0)
    groups = part.take(NEURONS, shape["layers"], shape["groups"], shape["neurons"]).long()
    for layer in groups[:, shape["shared"] :]:
        flat = layer.flatten()
        layer.copy_(flat[torch.randperm(len(flat), generator=generator)].view_as(layer))
    module = ReadMEModule(Base(engine.runner), engine.model, groups, shape["shared"], shape["groups"])
    ways = {"each token's best random groups": module.oracle}
    if args.epochs:
        with tempfile.TemporaryDirectory() as folder:
            Trainer(module, answers, Training(args.epochs), Path(folder), _tell).train()
        ways["router of random groups"] = module.routed
    return _rows(module, held_out, ways)


def _static(
    args: argparse.Namespace, engine: Engine, part: DraftHead, answers: Corpus, held_out: Sequence[TextBatch]
) -> list[dict[str, Any]]:
    """The same neurons for all tokens: groups in the order of a score, of which the first run."""
    source = Checkpoint(args.model, None, False).weights()
    assert source is not None
    seen = neurons.activity(engine.model, [text.tolist() for text, _ in some_answers(answers)], progress=False)
    down = [matrix.norm(dim=0) for _, _, matrix in neurons.matrices(source)]
    used = [norms * column for norms, column in zip(seen.norms, down, strict=True)]
    found = []
    for name, scores in (("most used neurons", used), ("ppm", neurons.peak_to_peak(source)),
                         ("cfsp", neurons.cfsp(source, seen))):
        order = torch.stack([one.sort(descending=True, stable=True).indices for one in scores])
        groups = order.view(len(order), part.shape["groups"], -1)
        module = ReadMEModule(Base(engine.runner), engine.model, groups, 0, part.shape["groups"])
        first = {name: partial(_first, groups.shape[0], groups.shape[1])}
        found += _rows(module, held_out, first)
        if name != "most used neurons":
            found += _rows(module, held_out, {f"{name}, prompts too": first[name]}, prompts=False)
    return found


def _first(layers: int, groups: int, batch: TextBatch, experts: int) -> Tensor:
    """The first groups, for all tokens: bool [B, T, layers, groups]."""
    return (torch.arange(groups) < experts).expand(*batch.tokens.shape, layers, groups)


def _rows(
    module: ReadMEModule, held_out: Sequence[TextBatch], ways: dict[str, Callable[[TextBatch, int], Tensor]],
    prompts: bool = True,
) -> list[dict[str, Any]]:
    groups, rows = module.neurons.shape[1], [(share, name) for share in SHARES for name in ways]
    opens = {f"{share} {name}": partial(ways[name], experts=round(share * groups)) for share, name in rows}
    costs, found = module.costs(held_out, opens, prompts), []
    for share, name in rows:
        one = costs[f"{share} {name}"]
        found.append({"share": share, "by": name, **one})
        _tell(f"{share:.2f} {name:32} divergence {one['distance']:.4f} nats, words kept {one['kept_words']:.1%}, "
              f"energy {one['energy']:.3f}")
    return found


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
