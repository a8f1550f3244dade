"""Drive the loop by hand: sequences with recipes of one's own, and the logits behind every emitted token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from families import VOCAB
from oracle import prefix_counts, prefix_oracle
from shoal.decode.batch import Batch, begin, run
from shoal.decode.recipe import Recipe
from shoal.decode.running_sequence import RunningSequence
from shoal.decode.text.stop import StopRules, StopState
from shoal.depth.plan import DepthPlan
from shoal.model.hf import HFRunner
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal.types import Sampling, Step

SHORT = [[5, 17, 80, 3, 41], [60, 2, 33, 9, 71, 12, 28, 90, 14], [8]]
"""Prompts of different lengths around the tiny models' window of 8."""


_GREEDY = Sampling()


@functools.cache
def stack_of(model: PreTrainedModel) -> HFRunner:
    """The model's runner, made once, its checks done."""
    runner = HFRunner(model)
    assert runner.can_split in (True, False)
    return runner


def prompt(length: int, seed: int = 0, vocabulary: int = VOCAB) -> list[int]:
    """Random token ids."""
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Seen:
    """A logits processor that changes nothing and keeps what it is shown: one row of logits per emitted token."""

    logits: list[Tensor] = field(default_factory=list)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores[0].clone())
        return scores


@dataclass
class Run:
    """What came out: the sequences, in the order of their prompts, and each one's logits [tokens, V]."""

    seqs: list[RunningSequence]
    seen: list[Seen]
    cache: KVCache
    batch: Batch
    chunk: int

    def steps(self) -> Generator[list[Step], None, None]:
        """See `shoal.decode.batch.run`."""
        return run(self.batch, self.batch.runner.prefill_chunk, self.chunk)

    @property
    def tokens(self) -> list[list[int]]:
        """Generated tokens of each sequence."""
        return [seq.tokens[seq.prompt_length :] for seq in self.seqs]

    def logits(self, seq: int) -> Tensor:
        """Logits behind each of the sequence's tokens."""
        return torch.stack(self.seen[seq].logits)


def make_run(
    model: PreTrainedModel | Any,
    prompts: Sequence[Sequence[int]],
    recipes: Recipe | DepthPlan | Sequence[Recipe | DepthPlan],
    new: int | Sequence[int] = 12,
    *,
    runner: Any = None,
    rules: Callable[[int], StopRules] | None = None,
    sampling: Sampling = _GREEDY,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    tokenizer: Any = None,
    chunk: int = 2048,
    release: bool = True,
    watch: bool = True,
) -> Run:
    """Sequences ready to decode.

    Args:
        model: a transformers model, or None with `runner`.
        prompts: token ids of each sequence.
        recipes: of every sequence, or one for all; a plan stands for the recipe that has only that.
        new: max_new_tokens of every sequence, or one for all.
        rules: the stop rules of sequence number i, instead of `new`.
        numbers: the sequences' numbers, which key their random numbers.
        chunk, release: as in `shoal.decode.batch`.
        watch: whether to keep the logits, which makes the loop treat each sequence's history apart.
    """
    runner = runner or stack_of(model)
    each = [recipes] * len(prompts) if isinstance(recipes, Recipe | DepthPlan) else list(recipes)
    news = [new] * len(prompts) if isinstance(new, int) else list(new)
    limits = rules or (lambda i: StopRules(max_new_tokens=news[i]))
    seen = [Seen() for _ in prompts]
    made = [Recipe(recipe) if isinstance(recipe, DepthPlan) else recipe for recipe in each]
    seqs = [
        RunningSequence(
            number=i if numbers is None else numbers[i],
            seq_id=i,
            tokens=list(tokens),
            prompt_length=len(tokens),
            stop=StopState(limits(i), tokenizer, tokens),
            plan=recipe.plan,
            recipe=recipe,
            sampling=sampling,
            processors=(seen[i],) if watch else (),
            seed=seed,
        )
        for i, (tokens, recipe) in enumerate(zip(prompts, made, strict=True))
    ]
    special = getattr(runner, "sources", ()) or getattr(runner, "state_bytes", ())  # such layers need it
    cache = runner.new_cache(len(seqs)) if special else KVCache(runner.windows, len(seqs))
    return Run(seqs, seen, cache, begin(seqs[0].recipe.loop, runner, cache, seqs, release=release), chunk)


def decode(*args: Any, **options: Any) -> Run:
    """`make_run`, decoded to the end."""
    run = make_run(*args, **options)
    for _ in run.steps():
        pass
    return run


def breaks_at_times(run: Run) -> None:
    """Decode to the end, though every third judgement of a tree fails, and its step is taken again."""
    batch, count = run.batch, 0
    judge = batch.judge

    def breaking(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise RuntimeError("a rule broke")
        return judge(*args)

    batch.judge = breaking  # type: ignore[method-assign]
    while batch.seqs:
        try:
            batch.step(64)
        except RuntimeError:
            batch.rollback()
    assert count > 6


def oracle_logits(model: PreTrainedModel, ids: Sequence[int], plan: DepthPlan, tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), V] before each of `tokens`, which follow the prompt: one uncached pass of the oracle."""
    whole = [*ids, *tokens[:-1]]
    counts = [prefix_counts(drops, len(ids), len(whole)) for drops in (plan.attention, plan.mlp)]
    return prefix_oracle(model, torch.tensor([whole]), *counts)[len(ids) - 1 :]


def gap(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference."""
    assert left.shape == right.shape, (left.shape, right.shape)
    return (left - right).abs().max().item()


def banning(tokens: Iterable[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """A logits processor that leaves these tokens no chance at all."""
    ids = torch.tensor(list(tokens))
    return lambda _, scores: scores.index_fill(-1, ids, -torch.inf)


def path_to(chunk: SequenceChunk, node: int) -> list[int]:
    """The nodes from 0 to `node`."""
    if chunk.parents is None:
        return [*range(node + 1)]
    path = [node]
    while path[0]:
        path.insert(0, chunk.parents[path[0]])
    return path
