"""Trees of guesses on a real model: are their nodes bit-equal to chains of their paths, and what does a tree cost?

    python lab/benchmarks/trees.py --model FILE --json OUT [--trees 100] [--rounds 40] [--forms none,kv_int8,kv_int4]

For each KV format, random trees of 2 to 64 nodes follow texts of 20 to 1,100 tokens; the logits of every node are
compared with those at the end of its path, fed as a chain. Then steps are timed in turn: a tree, a chain of as many
nodes, and one token. The last line on stdout is the report as JSON; the exit code is 1 if a node differs.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import script
import shoal
from shoal.depth.plan import DepthPlan
from shoal.model.packed import native
from shoal.model.runner import SequenceChunk
from shoal_lab.bench import idle
from shoal_lab.cli.method_list import methods_from

TIMED = (8, 16, 24, 48)
"""Nodes of the trees that are timed."""


class Text:
    """A text in the cache in one format, after which trees are fed and rolled back."""

    def __init__(self, engine: Any, form: str, ids: Sequence[int]) -> None:
        self.runner, self.plan = engine.runner, DepthPlan.full(engine.runner.num_layers)
        self.cache = self.runner.new_cache(1)
        if form != "none":
            method = methods_from(form).popitem()[1]
            self.cache.set_store(0, method.recipe(engine.info(64)).store)
        for first in range(0, len(ids), 64):
            some = ids[first : first + 64]
            self.runner.forward([SequenceChunk(0, some, [0] * len(some), self.plan)], self.cache)
            self.cache.commit(0, range(len(some)))

    def logits(self, ids: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        """Logits of all nodes of a tree, or of a chain, which is then rolled back."""
        depths = None if parents is None else depths_of(parents)
        chunk = SequenceChunk(0, ids, [0] * len(ids), self.plan, parents, depths, wanted=len(ids))
        found: Tensor = self.runner.forward([chunk], self.cache)
        self.cache.rollback(0)
        return found


def depths_of(parents: Sequence[int]) -> list[int]:
    """Distance of each node from node 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from node 0 to `node`."""
    return [*([] if parents[node] < 0 else path_to(parents, parents[node])), node]


def random_tree(dice: random.Random, size: int) -> list[int]:
    """Parents in breadth-first order, of wide, deep and nearly straight trees."""
    parents, reach = [-1], dice.choice((1, 2, 4, size))
    for node in range(1, size):
        parents.append(dice.randint(max(parents[-1], node - reach, 0), node - 1))
    return parents


def differing(text: Text, dice: random.Random, vocabulary: int) -> tuple[int, int]:
    """Nodes of one random tree, and how many differ from the ends of their paths."""
    parents = random_tree(dice, dice.choice((dice.randint(2, 12), dice.randint(2, 64))))
    ids = [dice.randrange(vocabulary) for _ in parents]
    found, wrong = text.logits(ids, parents), set[int]()
    for leaf in set(range(len(parents))) - set(parents):
        path = path_to(parents, leaf)
        straight = text.logits([ids[node] for node in path])
        wrong |= {node for place, node in enumerate(path) if not torch.equal(found[node], straight[place])}
    return len(parents), len(wrong)


def compared(engine: Any, form: str, ids: Sequence[int], trees: int) -> dict[str, int]:
    """Random trees after texts of several lengths."""
    dice, nodes, wrong = random.Random(form), 0, 0
    for _ in range(10):
        length = dice.choice((dice.randint(20, 90), dice.randint(480, 530), dice.randint(90, 1100)))
        text = Text(engine, form, ids[:length])
        for _ in range(-(-trees // 10)):
            size, apart = differing(text, dice, engine.runner.vocab_size)
            nodes, wrong = nodes + size, wrong + apart
    return {"trees": -(-trees // 10) * 10, "nodes": nodes, "differ": wrong}


def timed(text: Text, rounds: int, vocabulary: int) -> dict[str, Any]:
    """Milliseconds of steps that take turns: medians of a tree, a chain, and one token, and ratios of them."""
    dice, found = random.Random(1), {}
    for size in TIMED:
        parents, ids = random_tree(dice, size), [dice.randrange(vocabulary) for _ in range(size)]
        steps: dict[str, Callable[[], Tensor]] = {
            "tree": lambda ids=ids, parents=parents: text.logits(ids, parents),  # type: ignore[misc]
            "chain": lambda ids=ids: text.logits(ids), "token": lambda ids=ids: text.logits(ids[:1]),  # type: ignore[misc]
        }
        spent: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds + 2):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if turn > 1:
                    spent[name].append(1000 * (time.perf_counter() - start))
        medians = {name: statistics.median(one) for name, one in spent.items()}
        leaves = len(set(range(size)) - set(parents))
        found[size] = {"leaves": leaves, **medians, "tree_over_chain": medians["tree"] / medians["chain"]}
    return found


def main(argv: Sequence[str]) -> int:
    """Compare, time, write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--forms", default="none,kv_int8,kv_int4,kv_int4:keys=8")
    parser.add_argument("--dtype", help="of the KV that has no form of its own: float32 or bfloat16")
    args = parser.parse_args(argv)
    engine = shoal.load(args.model, **({} if args.dtype is None else {"dtype": args.dtype}))
    prose = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    ids = engine.tokenizer(prose)["input_ids"][:1200]
    forms = {form: compared(engine, form, ids, args.trees) for form in args.forms.split(",")}
    times = timed(Text(engine, "none", ids[:600]), args.rounds, engine.runner.vocab_size) if args.rounds else None
    script.publish(__file__, argv, {
        "kind": "trees",
        "model": Path(args.model).name, "vectors": native.vector_set(), "threads": torch.get_num_threads(),
        "idle": idle.watch(0.5), "forms": forms, "milliseconds": times,
    }, args.json)
    return int(any(one["differ"] for one in forms.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
