"""How much of what its drafts could bring `auto` brings: beside an oracle that knows which guesses will be kept.

    python lab/benchmarks/draft_oracle.py --model M --data DATA [--texts chat,code] [--items 8] [--new-tokens 64] 
        [--rounds 3] [--threads 2] [--json OUT]

Texts are answered greedily, one at a time, plainly and by `auto` in turns; `faster` is the median ratio of a text's
times of decoding. Then each answer is written once more, in which `auto`'s drafter guesses at every place and nothing
is kept, and a matcher says what the text itself suggests there. So it is known for every place how many guesses would
have been right. The oracle chooses at every place between a plain step and as many right guesses of either source as is
best, at the costs that `auto` has measured: the shortest way through the answer. `share` is `faster` over the oracle's;
it may exceed 1 where a forward is timed as dearer than it is. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch

import script
import shoal
from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import shown_name
from shoal.methods.auto import Auto, Cautious
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.speculative.suffix_matcher import Chances, SuffixMatcher
from shoal.types import ModelInfo
from shoal_lab.bench import workloads
from shoal_lab.bench.rounds import in_order, ratio
from shoal_lab.train.prompts import encoded

_MOST = 15
"""Guesses from the text at a time, as `auto`'s."""


@dataclass(eq=False)
class Overheard(Drafter, Proposer):
    """Asks a proposer at every step and keeps what it says from the model.

    Attributes:
        said: by the number of tokens before them, its guesses.
    """

    proposer: Proposer
    said: dict[int, Sequence[int]] = field(default_factory=dict)

    def begin(self, runner: Any, cache: Any) -> Overheard:
        """It is its own drafter, of one sequence."""
        self._drafter: Drafter = self.proposer.begin(runner, cache)
        return self

    def watch(self, seqs: Any, chunks: Any) -> Any:
        """What the proposer sees."""
        return self._drafter.watch(seqs, chunks)

    def propose(self, seqs: Any, limits: Sequence[int]) -> list[TokenTree]:
        """Nothing."""
        for seq, tree in zip(seqs, self._drafter.propose(seqs, limits), strict=True):
            self.said[len(seq.tokens)] = tree.tokens[1:]
        return [TokenTree.root(seq.tokens[-1]) for seq in seqs]


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", default="chat,code,edits,mathematics,summaries,retrieval")
    parser.add_argument("--items", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine, rows = shoal.load(args.model), []
    for kind in args.texts.split(","):
        prompts = encoded(workloads.prompts(args.data, kind, args.items), engine.tokenizer)
        found = [row_of(engine, kind, prompt, args) for prompt in prompts]
        rows.append({"kind": kind, "n": len(found), "faster": ratio(each["faster"] for each in found),
                     "oracle": ratio(each["oracle"] for each in found),
                     "share": ratio(each["faster"] / each["oracle"] for each in found), "each": found})
        medians = {name: round(rows[-1][name]["median"], 3) for name in ("faster", "oracle", "share")}
        print(kind, medians, file=sys.stderr)
    script.publish(__file__, sys.argv[1:], {
        "model": shown_name(engine.model_name), "threads": args.threads, "new_tokens": args.new_tokens,
        "rounds": args.rounds, "rows": rows,
    }, args.json)


def row_of(engine: Engine, kind: str, prompt: Sequence[int], args: Any) -> dict[str, Any]:
    """What `auto` and the oracle make of a text; answers to the same text are kept from each other by their salts."""
    ratios = []
    for number in range(args.rounds):
        request = {"max_new_tokens": args.new_tokens, "cache_salt": f"{kind} {number} {hash(tuple(prompt))}"}
        found = {name: engine.generate(prompt, method=name, **request) for name in in_order(["full", "auto"], number)}
        assert found["auto"].tokens == found["full"].tokens
        ratios.append(found["full"].stats.decode_seconds / found["auto"].stats.decode_seconds)
    tokens = [*prompt, *found["full"].tokens]
    return {"faster": median(ratios), "oracle": best(engine, tokens, len(prompt)), "tokens": len(tokens) - len(prompt)}


def best(engine: Engine, tokens: Sequence[int], prompt: int) -> float:
    """How many times as fast as plain decoding the shortest way through an answer is."""
    auto = Auto().recipe(engine.info()).proposer
    assert isinstance(auto, Cautious)
    said = {} if auto.drafter is None else overheard(engine, auto.drafter, tokens, prompt)
    matcher, right = SuffixMatcher((Chances(),), prompt), dict[int, int]()
    for place in range(prompt + 1, len(tokens)):
        matcher.read(tokens[:place])
        right[place] = agreeing(matcher.guesses(tokens[:place], _MOST), tokens[place:])
    times, draft, left = auto.judge.times, auto.judge.drafter.cost, {len(tokens): 0.0}
    for place in range(len(tokens) - 1, prompt, -1):
        kept = agreeing(said.get(place, ()), tokens[place:])
        ways = [1.0 + left[place + 1]]
        for count, asked in ((right[place], 0.0), (kept, draft(kept) if kept else 0.0)):
            ways += [1.0 + times.added(1, guesses) + asked + left[min(place + 1 + guesses, len(tokens))]
                     for guesses in range(1, count + 1)]
        left[place] = min(ways)
    return (len(tokens) - prompt - 1) / left[prompt + 1]


def overheard(engine: Engine, proposer: Proposer, tokens: Sequence[int], prompt: int) -> dict[int, Sequence[int]]:
    """The guesses of a drafter at every place of an answer."""
    heard = Overheard(proposer)

    @dataclass(frozen=True)
    class Overhearing(Method):
        name = "overhearing"

        def recipe(self, info: ModelInfo) -> Recipe:
            return Recipe(Full().recipe(info).plan, heard)

    found = engine.generate(tokens[:prompt], method=Overhearing(), max_new_tokens=len(tokens) - prompt)
    assert [*found.tokens] == tokens[prompt:]
    return heard.said


def agreeing(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """How many guesses in a row are right."""
    pairs = zip(guesses, tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


if __name__ == "__main__":
    main()
