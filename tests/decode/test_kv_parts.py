"""The parts that decide what is kept of the KV, in what form, and what is read of it, on every executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, reading_model
from backends import NATIVE, Backend, on_backends, reference
from drive import SHORT, Run, decode, gap, oracle_logits, prompt
from shoal.depth.plan import DepthPlan
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.topk_oracle import TopKOracle
from shoal.types import ModelInfo

NEW, LAYERS = 24, 6
PROMPTS = [*SHORT, prompt(37, 3)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW, shows_queries=True)
D3_PLAN = D3(alpha=0.9, core=2).recipe(INFO).plan
FAMILIES = ("llama", "qwen3", "gemma2", "hybrid", "olmo2")
PARTS = ("keep", "store", "select")


@dataclass(frozen=True)
class Ends(Reading):
    """StreamingLLM, from positions alone: what a query sees of a text that was cut at each multiple of `every`."""

    knobs: StreamingLLM
    sliding: tuple[int, ...]

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        window, sinks, every = self.knobs.window, self.knobs.sinks, self.knobs.every
        if layer in self.sliding or window is None:
            return seen
        query, key = torch.arange(len(seen))[:, None], torch.arange(len(seen))
        cut = query // every * every
        return (cut <= sinks + window) | (key < sinks) | (key >= cut - window)


@dataclass(frozen=True)
class Top(Reading):
    """The k largest scores, by sorting them all; from position `begin` on."""

    knobs: TopKOracle
    begin: int

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        if layer < self.knobs.first:
            return seen
        best = scores.amax(1)
        best.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        rank = best.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True).argsort(dim=-1)
        late = torch.arange(len(seen))[:, None] >= self.begin
        return (rank < self.knobs.k) | ~late


@dataclass(frozen=True)
class Rounded(Reading):
    """Each head's key and value at each position, in steps of a 127th of its largest number."""

    first: int

    def found(self, layer: int, values: Tensor) -> Tensor:
        if layer < self.first:
            return values
        step = values.float().abs().amax(-1, keepdim=True) / 127
        return ((values.float() / step).round() * step).to(values.dtype)


def sliding(name: str) -> tuple[int, ...]:
    kinds = getattr(reference(name).config, "layer_types", None) or ["full_attention"] * LAYERS
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def check(run: Run, readings: Sequence[Reading], name: str, most: float) -> None:
    """Each row's logits are those of the model that reads so."""
    for number, (row, reading) in enumerate(zip(run.rows, readings, strict=True)):
        model = reading_model(reference(name), reading)
        ids, tokens = row.tokens[: row.prompt_length], row.tokens[row.prompt_length :]
        expected = oracle_logits(model, ids, row.recipe.plan, tokens)
        assert gap(run.logits(number).to(expected.dtype), expected) <= most, number


def run_of(backend: Backend, name: str, recipes: Any, **options: Any) -> Run:
    return decode(None, PROMPTS, recipes, NEW, stack=backend.stack(name), **options)


plans = pytest.mark.parametrize("plan", [DepthPlan.full(LAYERS), D3_PLAN], ids=["full", "d3"])


@plans
@on_backends(*FAMILIES)
def test_what_is_kept_is_what_positions_say(backend: Backend, name: str, plan: DepthPlan) -> None:
    method = StreamingLLM(window=9, sinks=2, every=5)
    recipe = replace(method.recipe(INFO), plan=plan)
    run = run_of(backend, name, recipe)
    check(run, [Ends(method, sliding(name))] * len(PROMPTS), name, backend.exact)
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.1, "the window was too wide to matter"


@plans
@on_backends(*FAMILIES)
def test_what_is_read_is_what_scores_most(backend: Backend, name: str, plan: DepthPlan) -> None:
    method = TopKOracle(k=6, first=1)
    recipe = replace(method.recipe(INFO), plan=plan)
    run = run_of(backend, name, recipe)
    check(run, [Top(method, len(ids)) for ids in PROMPTS], name, backend.exact)
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.1, "k was too large to matter"


@plans
@on_backends(*FAMILIES)
def test_what_is_stored_is_rounded(backend: Backend, name: str, plan: DepthPlan) -> None:
    """A number that lies between two steps may round the other way where it was computed in another order."""
    recipe = replace(KVInt8(first=1).recipe(INFO), plan=plan)
    run = run_of(backend, name, recipe)
    check(run, [Rounded(1)] * len(PROMPTS), name, max(backend.exact, 1e-10) if backend != NATIVE else 0.2)
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 1e-3, "rounding was too fine to matter"
