"""What only a GPU can show: captured steps, compiled kernels. `tests/model/packed/cuda` runs both in Python."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch

from drive import SHORT, prompt
from families import tiny
from method_matrix import MATRIX
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.cards.card import Card
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv.cache import KVCache
from shoal.model.packed.build import build
from shoal.model.packed.cuda.form import ForwardForm
from shoal.model.packed.cuda.graphs import OFTEN
from shoal.model.packed.cuda.products import multiplied
from shoal.model.packed.linear import Dense, Quantised
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import ModelSource
from shoal.model.runner import SequenceChunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]
FAMILIES = ("llama", "gemma2", "granite", "hybrid")

CUDA = torch.device("cuda")
SCORES = {"influence": (9.0, 0.3, 0.1, 0.2, 0.4, 8.0), "leave_one_out": (9.0, 0.4, 0.3, 0.1, 0.2, 8.0)}
D3 = DepthPlan.whole_layers([NEVER, 14, 5, 3, 9, NEVER])
GAPS = {torch.float32: 2e-3, torch.bfloat16: 3.0}
"""How far logits of up to 20 may lie from the flat forward's, whose sublayers round to the narrow type in between."""


def stack_on_gpu(name: str, dtype: torch.dtype, quant: Any = None) -> PackedRunner:
    model = tiny(name, dtype=dtype)
    return build(model.config, ModelSource(model), dtype, CUDA, quant)


def filled(runner: PackedRunner, seqs: list[list[int]]) -> KVCache:
    """A cache that holds the sequences' tokens at full depth."""
    cache = KVCache(runner.windows, len(seqs), [64] * runner.num_layers)
    plan = DepthPlan.full(runner.num_layers)
    for seq, ids in enumerate(seqs):
        runner.forward([SequenceChunk(seq, ids, [0] * len(ids), plan)], cache)
        cache.commit(seq, range(len(ids)))
    return cache


@pytest.mark.parametrize("dtype", GAPS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_are_the_flat_forward(name: str, dtype: torch.dtype) -> None:
    flat, runner = stack_on_gpu(name, dtype), stack_on_gpu(name, dtype)
    flat.graphs = None
    caches = [filled(flat, SHORT), filled(runner, SHORT)]
    assert runner.graphs is not None
    turns = [(1, DepthPlan.full(6)), (1, D3), (3, D3), *[(1, D3)] * (OFTEN + 3)]
    for turn, (queries, plan) in enumerate(turns):
        step = 1 if turn == 0 else 3
        chunks = [SequenceChunk(r, prompt(queries, r), [step] * queries, plan, wanted=queries) for r in range(3)]
        expected, logits = flat.forward(chunks, caches[0]), runner.forward(chunks, caches[1])
        assert float((expected - logits).abs().max()) <= GAPS[dtype], (turn, queries)
        for cache in caches:
            for seq in range(3):
                cache.commit(seq, range(queries))
    assert ForwardForm(3, 1, True) in runner.graphs.forms and ForwardForm(3, 3, True) in runner.graphs.forms


def test_rows_of_several_kinds_are_the_flat_forward() -> None:
    """A sequence that decodes at a smaller depth, and pieces of prompts, one of which ends later."""
    flat, runner = stack_on_gpu("llama", torch.float32), stack_on_gpu("llama", torch.float32)
    flat.graphs = None
    kinds = [(0, 1, 3, 1, D3), (1, 9, 0, 0, DepthPlan.full(6)), (2, 2, 0, 1, DepthPlan.full(6))]
    chunks = [SequenceChunk(seq, prompt(size, seq), [step] * size, plan, wanted=wanted)
              for seq, size, step, wanted, plan in kinds]  # fmt: skip
    expected, logits = (one.forward(chunks, filled(one, SHORT)) for one in (flat, runner))
    assert len(logits) == 2 and float((expected - logits).abs().max()) <= GAPS[torch.float32]
    assert runner.graphs is not None and ForwardForm(1, 1, True) in runner.graphs.forms


@functools.cache
def engine_on(device: str, name: str = "llama", dtype: torch.dtype = torch.float32) -> Engine:
    model = tiny(name, dtype=dtype)
    return engine_for(model if device == "cpu" else _moved(name, dtype), card=Card(SCORES), backend="packed")


def _moved(name: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(tiny(name, dtype=dtype)).to(CUDA)


@pytest.mark.parametrize("method", MATRIX, ids=lambda method: type(method).__name__)
def test_every_method_says_on_a_gpu_what_it_says_on_a_cpu(method: Method) -> None:
    expected = engine_on("cpu").generate(SHORT, method=method, max_new_tokens=12)
    found = engine_on("cuda").generate(SHORT, method=_on_gpu(method), max_new_tokens=12)
    assert [r.tokens for r in found] == [r.tokens for r in expected]


def _on_gpu(method: Method) -> Method:
    """The method with its draft model on the GPU."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if isinstance(value, torch.nn.Module):
            changes[field.name] = copy.deepcopy(value).to(CUDA)
        elif isinstance(value, Method):
            changes[field.name] = _on_gpu(value)
    return dataclasses.replace(method, **changes) if changes else method  # type: ignore[type-var]


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("count", [2, 5, 16, 32])
def test_a_token_gets_the_same_bits_in_any_company(quant: Any, count: int) -> None:
    """So verification of a draft says what plain decoding would have said."""
    torch.manual_seed(0)
    weight = torch.randn(640, 1024, device=CUDA, dtype=torch.bfloat16) / 32
    matrix = Dense(weight) if quant is None else Quantised(weight, quant)
    x = torch.randn(count, 1024, device=CUDA, dtype=torch.bfloat16)
    together = matrix(x) if quant == "int4" else multiplied(x, matrix)
    assert together is not None
    for seq in range(count):
        one = x[seq : seq + 1]
        alone = matrix(one) if quant == "int4" else multiplied(one, matrix)
        assert alone is not None and torch.equal(alone[0], together[seq])
    true = x.double() @ (weight if quant is None else matrix.dequantised()).double().t()
    assert float((together - true).norm() / true.norm()) < 4e-3


def test_guesses_change_no_bit_in_bfloat16() -> None:
    runner = stack_on_gpu("llama", torch.bfloat16)
    ids, tokens = prompt(9, 4), prompt(6, 5)
    caches = [filled(runner, [ids]), filled(runner, [ids])]
    plan = DepthPlan.full(6)
    together = runner.forward([SequenceChunk(0, tokens, [1] * 6, plan, wanted=6)], caches[0])
    for number, token in enumerate(tokens):
        alone = runner.forward([SequenceChunk(0, [token], [1], plan)], caches[1])
        caches[1].commit(0, [0])
        assert torch.equal(alone[0], together[number])


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_models_decode(quant: Any) -> None:
    engine = Engine(stack_on_gpu("llama", torch.bfloat16, quant))
    first = engine.generate(SHORT[:1], max_new_tokens=12)
    again = engine.generate(SHORT[:1], max_new_tokens=12, method=PromptLookup(min_ngram=1))
    assert [r.tokens for r in first] == [r.tokens for r in again]


def test_a_long_text_and_new_storage_use_the_same_graphs() -> None:
    runner = stack_on_gpu("llama", torch.float32)
    engine = Engine(runner)
    long = [prompt(200, 9), prompt(3, 2)]
    assert runner.graphs is not None
    first = [r.tokens for r in engine.generate(long, max_new_tokens=100)]
    forms = runner.graphs.forms
    cpu = engine_on("cpu").generate(long, max_new_tokens=100)
    assert first == [r.tokens for r in cpu]
    assert [r.tokens for r in engine.generate(long, max_new_tokens=100)] == first
    assert runner.graphs.forms == forms
