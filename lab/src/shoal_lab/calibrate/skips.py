"""Search for the sublayers that Draft & Verify skips while it drafts (arXiv 2309.08168)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tqdm import tqdm

from shoal.depth.plan import DepthPlan
from shoal.engine.cards import card as cards
from shoal.engine.engine import Engine
from shoal.engine.request import prompt_ids
from shoal.errors import Unsupported
from shoal.methods.calibrated import Calibrated
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import SequenceChunk
from shoal_lab.calibrate.calibration import data_hash
from shoal_lab.components.rewind import earliest, rewound
from shoal_lab.drafts.agreement import agreements
from shoal_lab.drafts.skip_search import SkipSearch
from shoal_lab.drafts.skips import Skips, sublayers
from shoal_lab.eval.items import Item
from shoal_lab.eval.study import model_name
from shoal_lab.methods.draft_and_verify import DraftAndVerify

_START = 0.35
_REPEATS = 7


@dataclass(frozen=True)
class SublayerCosts:
    """Cost of one attention, of one MLP, and of everything outside the layers in a one-token forward, in any unit."""

    attention: float
    mlp: float
    rest: float

    def forward(self, num_layers: int, skips: Skips) -> float:
        """Cost of a forward without some sublayers."""
        kept = (num_layers - len(skips.attention)) * self.attention + (num_layers - len(skips.mlp)) * self.mlp
        return kept + self.rest


@dataclass(frozen=True)
class SkipCard:
    """The result of a search.

    Attributes:
        skips: the sublayers to skip.
        rate: share of the texts' tokens that the model predicts without them.
        length: the draft length with most tokens per second at that rate.
        speedup: tokens per second with such drafts over plain decoding, by the costs; without sampling.
        rounds: sets tried.
    """

    skips: Skips
    rate: float
    length: int
    speedup: float
    rounds: int

    def method(self) -> DraftAndVerify:
        """The method with these sublayers."""
        return DraftAndVerify(self.skips.attention, self.skips.mlp)

    def entry(self) -> dict[str, Any]:
        """What a model's card says of a search whose costs were `byte_costs`."""
        return {"attention": list(self.skips.attention), "mlp": list(self.skips.mlp), "rate": round(self.rate, 3),
                "length": self.length, "by_bytes": round(self.speedup, 3), "rounds": self.rounds}


def method_card(
    engine: Engine, found: SkipCard, *, suite: str, items: Sequence[Item], seed: int, costs: str,
    versions: dict[str, str],
) -> dict[str, Any]:
    """The result as JSON, which `methods.make` reads as a method that is bound to the model.

    Args:
        engine: the model.
        found: the result.
        suite, items, seed: the texts, and the seed of their choice and of the search.
        costs: what the sets were judged by, in words.
        versions: of the libraries.
    """
    return {
        "format": 1,
        "method": Calibrated(found.method(), engine.fingerprint).to_dict(),
        "model": {"name": model_name(engine), "fingerprint": engine.fingerprint,
                  "num_layers": engine.runner.num_layers, "dtype": str(engine.runner.dtype).removeprefix("torch.")},
        "data": {"suite": suite, "items": len(items), "hash": data_hash(items), "seed": seed},
        "found": {"rate": found.rate, "length": found.length, "speedup": found.speedup, "rounds": found.rounds,
                  "costs": costs},
        "versions": versions,
    }


def filled(data: dict[str, Any], engine: Engine, found: SkipCard) -> dict[str, Any]:
    """A model's card with these sublayers in place of its own; ValueError if it is another model's."""
    own, here = data.get("model"), cards.identity(engine)
    if not isinstance(own, dict) or own.get("sizes") != here["sizes"] or not set(own.get("norms", ())) & set(
            here["norms"]):
        name = own.get("name") if isinstance(own, dict) else None
        raise ValueError(f"the card is of {name!r}, and its norms or sizes are not those of {here['name']!r}; give the "
                         "card of this model")
    return {**data, "skips": found.entry()}


def search_skips(
    engine: Engine,
    prompts: Sequence[str] | Sequence[list[int]],
    *,
    seconds: float = 60.0,
    rounds: int | None = None,
    seed: int = 0,
    new_tokens: int = 48,
    block: int = 8,
    costs: SublayerCosts | None = None,
    progress: bool | None = None,
) -> SkipCard:
    """Find sublayers that can be skipped while drafting, judged by expected tokens per second.

    The model answers the prompts greedily. A set is judged by the share of the answers' tokens that it predicts, block
    by block in parallel, with the tokens before a block at full depth, as in decoding. The paper measures decoding
    times instead. With a seed, `rounds` and `costs` the search is repeatable.

    Args:
        engine: the model, on the machine and at the precision of later use.
        prompts: texts like those of later use; the paper takes 8.
        seconds: time limit of the search.
        rounds: most sets to try; None for no limit.
        seed: of the random choices.
        new_tokens: tokens of an answer.
        block: tokens drafted in a row when a set is judged.
        costs: of the sublayers; None measures them.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.

    Raises:
        ValueError: there are no prompts, or the answers are too short to judge.
        Unsupported: the model's sublayers cannot be told apart.
    """
    _check(engine, prompts, new_tokens, block)
    judge = _SkipJudge(engine, prompts, new_tokens, block, costs or measure_sublayers(engine))
    layers = engine.runner.num_layers
    start = Skips.spread(layers, min(round(_START * 2 * layers), len(sublayers(layers))))
    search = SkipSearch(layers, start, seed, fixed=False, bayes_every=5)
    search.tell(Skips(), judge.value(Skips()))
    until = time.perf_counter() + seconds
    for done in tqdm(count(1), desc="skips", disable=None if progress is None else not progress):
        skips = start if done == 1 else search.ask()
        search.tell(skips, judge.value(skips))
        if done == rounds or time.perf_counter() > until:
            break
    rate = judge.rate(search.best)
    length, speedup = judge.best_length(search.best, rate)
    return SkipCard(search.best, rate, length, speedup, search.tried)


def byte_costs(engine: Engine) -> SublayerCosts:
    """Bytes of an attention or recurrence, an MLP and the LM head in layers: what no machine changes."""
    if not isinstance(engine.runner, PackedRunner):
        return SublayerCosts(0.25, 0.75, engine.runner.head_layers)
    layers = engine.runner.weights.layers
    mixers = sum(matrix.nbytes for layer in layers for matrix in (layer.qkv, layer.out, *layer.of_mixer))
    share = mixers / sum(layer.nbytes for layer in layers)
    return SublayerCosts(share, 1 - share, engine.runner.head_layers)


def measure_sublayers(engine: Engine) -> SublayerCosts:
    """Seconds of the parts of a one-token forward, from forwards with all and with half of the sublayers."""
    layers = engine.runner.num_layers
    half = tuple(range(0, layers, 2))
    whole, no_attention, no_mlp = (
        _seconds(engine, skips.plan(layers)) for skips in (Skips(), Skips(half), Skips((), half))
    )
    attention, mlp = (max(0.0, whole - part) / len(half) for part in (no_attention, no_mlp))
    return SublayerCosts(attention, mlp, max(0.0, whole - layers * (attention + mlp)))


def _seconds(engine: Engine, plan: DepthPlan) -> float:
    runner, cache, times = engine.runner, engine.runner.new_cache(1), list[float]()
    runner.forward([SequenceChunk(0, [0], [0], DepthPlan.full(runner.num_layers))], cache)
    cache.commit(0, [0])
    for _ in range(_REPEATS):
        start = time.perf_counter()
        runner.forward([SequenceChunk(0, [0], [1], plan)], cache)
        times.append(time.perf_counter() - start)
        cache.rollback(0)
    return statistics.median(times[1:])


def _check(engine: Engine, prompts: Sequence[Any], new_tokens: int, block: int) -> None:
    if not engine.runner.can_split:
        raise Unsupported(
            "a search for sublayers", "attention and MLP cannot be told apart in this architecture", "Use d3_spec"
        )
    if not prompts:
        raise ValueError("there are no prompts; give some texts of the kind at hand")
    if not 1 <= block < new_tokens:
        raise ValueError(f"block is {block} and new_tokens {new_tokens}; both must be at least 1, block the smaller")


class _SkipJudge:
    """Answers at full depth, in a cache, and the value of a set on them."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Any], new_tokens: int, block: int, costs: SublayerCosts
    ) -> None:
        self._runner, self._block, self._costs = engine.runner, block, costs
        runner = self._runner
        ids = [prompt_ids(one, engine.tokenizer, runner.vocab_size, runner.max_positions) for one in prompts]
        answers = engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True)
        self._texts = [[*one, *answer.tokens] for one, answer in zip(ids, answers, strict=True)]
        self._cache = self._runner.new_cache(len(self._texts))
        for row, tokens in enumerate(self._texts):
            self._fill(row, tokens[:-1])
        self._places = [
            (row, end)
            for row, (tokens, answer) in enumerate(zip(self._texts, answers, strict=True))
            for end in range(len(tokens), len(tokens) - len(answer.tokens) + block, -block)
            if end - 1 - block >= earliest(self._cache, row)
        ]
        if not self._places:
            raise ValueError(f"no answer has {block + 1} tokens to judge by; give shorter prompts or a smaller block")

    def _fill(self, row: int, tokens: Sequence[int]) -> None:
        plan = DepthPlan.full(self._runner.num_layers)
        for first in range(0, len(tokens), self._runner.prefill_chunk):
            part = tokens[first : first + self._runner.prefill_chunk]
            self._runner.forward([SequenceChunk(row, part, [0] * len(part), plan)], self._cache)
            self._cache.commit(row, range(len(part)))

    def rate(self, skips: Skips) -> float:
        """Share of the answers' tokens that the model predicts without these sublayers."""
        plan = skips.plan(self._runner.num_layers, self._runner.sources)
        return statistics.fmean(self._share(row, end, plan) for row, end in self._places)

    def _share(self, row: int, end: int, plan: DepthPlan) -> float:
        """The share in the block of row `row` that ends at token `end`."""
        with rewound(self._cache, row, end - 1):
            return agreements(self._runner, self._cache, [(row, self._texts[row][:end], self._block, plan)])[0]

    def value(self, skips: Skips) -> float:
        """The expected speed-up."""
        return self.best_length(skips, self.rate(skips))[1]

    def best_length(self, skips: Skips, rate: float, longest: int = 12) -> tuple[int, float]:
        """The draft length with most tokens per cost, and its speed-up over plain decoding."""
        layers, costs = self._runner.num_layers, self._costs
        whole, draft = costs.forward(layers, Skips()), costs.forward(layers, skips)
        values = [sum(rate**j for j in range(n + 1)) * whole / (whole + n * draft) for n in range(longest + 1)]
        best = max(range(longest + 1), key=lambda length: (round(values[length], 9), -length))  # sums differ by little
        return best, values[best]
