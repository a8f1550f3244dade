"""Lockstep decoding against transformers' uncached forward with hooks, and against the engine."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from families import VOCAB, tiny
from oracle import decoder_layers, prefix_counts, prefix_oracle
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.eval.layer_table import LayerTable
from shoal.eval.lockstep import Lockstep
from shoal.methods.d3 import D3
from shoal.model.packed.build import build
from shoal.model.packed.source import ModelSource

PLANS = {
    "full": DepthPlan.full(6),
    "d3": DepthPlan.whole_layers((NEVER, 9, 2, 4, 6, NEVER)),
    "at once": DepthPlan.whole_layers((NEVER, 1, 1, 1, NEVER, NEVER)),
    "sublayers": DepthPlan((NEVER, 3, 5, NEVER, 2, NEVER), (NEVER, 6, 1, 4, NEVER, 3)),
}


def ids(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama", "mistral", "granite", "gemma2", "gemma3"])
def test_losses_are_those_of_an_uncached_pass(name: str, family: str) -> None:
    model, plan = tiny(family), PLANS[name]
    stack = build(model.config, ModelSource(model), torch.float64, torch.device("cpu"), kernels=False)
    prompts, answers = ids(3, 11, 6), ids(9, 1, 12)
    (found,) = Lockstep(stack).losses(prompts, answers, [LayerTable.of(plan)])
    for prompt, answer, values in zip(prompts, answers, found, strict=True):
        text = [*prompt, *answer[:-1]]
        counts = [prefix_counts(drops, len(prompt), len(text)) for drops in (plan.attention, plan.mlp)]
        logits = prefix_oracle(model, torch.tensor([text]), *counts)[len(prompt) - 1 :]
        expected = cross_entropy(logits, torch.tensor(answer), reduction="none")
        assert torch.allclose(values.double(), expected, atol=1e-5), name


def test_tables_share_a_prompt_without_touching_each_other(tiny_engine: Engine) -> None:
    lockstep = Lockstep(tiny_engine.stack)
    prompts, answers = ids(4, 8), ids(10, 7)
    tables = [LayerTable.of(plan) for plan in PLANS.values()]
    together = lockstep.losses(prompts, answers, tables)
    for table, found in zip(tables, together, strict=True):
        (alone,) = lockstep.losses(prompts, answers, [table])
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


@pytest.mark.parametrize("method", ["full", D3(alpha=0.85, core=2), D3(alpha=0.7, start=3, core=3)])
def test_answers_are_the_engine_s(tiny_engine: Engine, method: Any) -> None:
    prompts = ids(5, 1, 9, 14, 3, 7, 2, 8)
    table = LayerTable.of(tiny_engine.recipe(method, 24).plan)
    found = Lockstep(tiny_engine.stack).generate(prompts, table, 24, tiny_engine.eos_token_ids)
    expected = tiny_engine.generate(prompts, method=method, max_new_tokens=24)
    assert found == [list(result.tokens) for result in expected]
    assert len({len(row) for row in found}) > 2, "rows must end at different steps"
    for row, result in zip(found, expected, strict=True):
        assert table.layer_tokens(len(row)) == pytest.approx(result.stats.layer_tokens)


class Passing:
    """Greedy decoding with transformers' cache: each layer runs in full, and its output is put away where it is
    skipped, so that its keys and values come from the stream that passes by."""

    def __init__(self, model: Any, table: LayerTable) -> None:
        self.model, self.table, self.step = model, table, 0

    def generate(self, prompt: list[int], count: int) -> list[int]:
        past, tokens, new = None, list(prompt), list(prompt)
        with ExitStack() as stack, torch.no_grad():
            for index, layer in enumerate(decoder_layers(self.model)):
                handle = layer.register_forward_hook(self._keep(index), with_kwargs=True)
                stack.callback(handle.remove)
            for self.step in range(count):
                out = self.model(torch.tensor([new]), past_key_values=past, use_cache=True)
                past, new = out.past_key_values, [int(out.logits[0, -1].argmax())]
                tokens += new
        return tokens[len(prompt) :]

    def _keep(self, index: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            runs = self.step == 0 or self.table.runs(index, self.step, 1)[0][0]
            return output if runs else before

        return hook


def test_a_rising_table_propagates_the_passing_stream(tiny_model: Any, tiny_engine: Engine) -> None:
    table = LayerTable.rising([6, 3, 3, 4, 3, 5, 6, 4, 6], (2, 3, 1), 6)
    prompts = ids(6, 3)
    found = Lockstep(tiny_engine.stack).generate(prompts, table, 14, frozenset())
    twin = Passing(tiny_model, table)
    assert found == [twin.generate(prompt, 14) for prompt in prompts]
    assert found != Lockstep(tiny_engine.stack).generate(prompts, LayerTable.full(6), 14, frozenset())


def test_scoring_a_rising_table_agrees_with_decoding_it(tiny_engine: Engine) -> None:
    table = LayerTable.rising([6, 3, 4, 6, 3, 5], (2, 3, 1), 6)
    lockstep, prompts = Lockstep(tiny_engine.stack), ids(6, 3)
    answers = lockstep.generate(prompts, table, 10, frozenset())
    (own,) = lockstep.losses(prompts, answers, [table])
    changed = [[*row[:-1], (row[-1] + 1) % VOCAB] for row in answers]
    (other,) = lockstep.losses(prompts, changed, [table])
    for mine, theirs in zip(own, other, strict=True):
        assert torch.allclose(mine[:-1], theirs[:-1]) and mine[-1] < theirs[-1]


def test_a_table_is_checked() -> None:
    with pytest.raises(ValueError, match="2 layers at step 1; it must be 4..6"):
        LayerTable.rising([6, 2], (2, 3), 6)
    with pytest.raises(ValueError, match="at least one step"):
        LayerTable.rising([], (2, 3), 6)
