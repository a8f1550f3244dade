"""Medusa's heads and MLP speculators: logits are those of the formulas and of the references; misfits are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import NATIVE, TORCH, Backend, on_one_backend
from drive import decode, prompt
from eagle_part import ECHO, target
from families import HIDDEN, VOCAB, tiny
from part_checks import check_tokens, check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.auto import Auto, Cautious
from shoal.methods.dflash import DFlash
from shoal.methods.mlp_speculator import MLPSpeculator
from shoal.model.runner import ModelRunner
from shoal.speculative.drafters import heads as readers
from shoal.speculative.drafters.state_heads import StateHeads, StateHeadsProposer
from shoal.speculative.growth import Branching
from shoal.types import Sampling
from state_head_drafters import COUNT, HEADS_FORMS, HeadsForm, HeadsReference, drawn, heads_drafter, of_heads, write
from turns import by_turns
from watched import Watched

RECORDED = Path(__file__).parent.parent.parent / "fixtures" / "state_heads.json"


def heads(runner: ModelRunner, folder: str | Path) -> StateHeads:
    found = readers.read(str(folder))(runner)
    assert isinstance(found, StateHeads)
    return found


def logits(made: StateHeads, states: Tensor, tokens: list[list[int]]) -> Tensor:
    """Logits [heads, n, ids] of states [n, D] after the last layer, with the tokens before each head's guess."""
    carried, found = made.begin(states), []
    for head in range(made.count):
        values, carried = made.step(head, carried, tokens[head])
        found.append(values.double())
    return torch.stack(found)


@on_one_backend("form", {name: name for name in HEADS_FORMS}, "llama", "qwen3")
def test_logits_are_those_of_the_formulas(backend: Backend, name: str, form: str) -> None:
    made, slow = heads(backend.runner(name), heads_drafter(form)), of_heads(form, name)
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))
    tokens = [[3, 17, 5, 80], [41, 9, 9, 2], [7, 80, 3, 1]]
    normed = TORCH.runner(name).normed(states.double())
    expected = torch.stack([slow.of_state(state, tokens[0][row], [tokens[1][row], tokens[2][row]])
                            for row, state in enumerate(normed)], 1)
    found = logits(made, states.to(backend.dtype), tokens)
    assert made.count == COUNT and found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_the_logits_are_those_of_the_references() -> None:
    """Recorded: `tests/fixtures/state_heads.py` says how."""
    recorded = json.loads(RECORDED.read_text("utf-8"))
    assert {one["form"] for one in recorded} == {"medusa", "mlp", "mlp, shared"}
    for one in recorded:
        made = heads(engine_for(tiny("llama")).runner, heads_drafter(one["form"]))
        expected = torch.tensor(one["logits"]).double()
        state = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5)).double()
        slow = of_heads(one["form"]).of_state(state, one["tokens"][0], one["tokens"][1:])
        assert float((slow - expected).abs().max()) <= 1e-4
        made._target.normed = lambda x: x  # type: ignore[method-assign]
        found = logits(made, state[None], [[token] for token in one["tokens"]])[:, 0]
        assert float((found - expected).abs().max()) <= 1e-4
        assert found.argmax(-1).tolist() == one["guesses"]


@pytest.mark.parametrize("form", ["medusa", "mlp"])
def test_another_formula_would_be_seen(form: str) -> None:
    """Other states, or other weights, are far from these logits."""
    made, states = heads(TORCH.runner("llama"), heads_drafter(form)), torch.randn(1, HIDDEN).double()
    found = logits(made, states, [[3], [41], [7]])[:, 0]
    for seed, state in ((2, TORCH.runner("llama").normed(states)[0]), (1, states[0])):
        slow = HeadsReference(HEADS_FORMS[form], target("llama").model, seed)
        expected = slow.of_state(state, 3, [41, 7])
        assert float((found - expected).abs().max()) > 1e-2 * float(expected.abs().max())


@on_one_backend("form", {name: name for name in HEADS_FORMS}, "llama")
def test_guesses_are_those_of_the_formulas(backend: Backend, name: str, form: str) -> None:
    """Through prompts and accepted guesses, in a batch."""
    runner, slow = backend.runner(name), of_heads(form, name)
    proposer = Watched(StateHeadsProposer(heads(runner, heads_drafter(form)), Branching((1,) * COUNT)))
    options = {"runner": runner, "new": 12, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    run = decode(None, [prompt(40, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer), **options)
    check_trees(run, proposer, lambda text, tree: slow.guesses(text, ECHO)[: len(tree) - 1] == [*tree.tokens[1:]])


METHODS: dict[str, dict[str, object]] = {"chain": {}, "tree": {"branching": (3, 2, 1)}, "short": {"length": 2}}


@on_one_backend("form", {name: name for name in HEADS_FORMS if name.startswith("mlp")}, "llama", "qwen3")
def test_no_greedy_token_changes(backend: Backend, name: str, form: str) -> None:
    for kind in METHODS:
        method = MLPSpeculator(part=heads_drafter(form), stop=0.0, **METHODS[kind])  # type: ignore[arg-type]
        check_tokens(backend, name, method, "greedy", Engine(backend.runner(name)))


@by_turns("kind, sampling", METHODS, ["sampled", "penalised"])
def test_no_sample_changes(kind: str, sampling: str) -> None:
    method = MLPSpeculator(part=heads_drafter("mlp, shared"), stop=0.0, **METHODS[kind])  # type: ignore[arg-type]
    check_tokens(NATIVE, "llama", method, sampling, Engine(NATIVE.runner("llama")))


@pytest.mark.parametrize("form", HEADS_FORMS)
def test_auto_tells_the_kind(form: str) -> None:
    engine, method = Engine(TORCH.runner("llama")), Auto(part=heads_drafter(form))
    judge = engine.recipe(method, 16).proposer
    assert isinstance(judge, Cautious) and isinstance(judge.drafter, StateHeadsProposer)
    options = {"max_new_tokens": 24, "logit_bias": dict.fromkeys((5, 8, 11), 12.0)}
    plain, guessed = (engine.generate(prompt(9, 3), method=one, **options) for one in ("full", method))
    assert guessed.tokens == plain.tokens and guessed.stats.drafted > 0


def refused(folder: Path, engine: Engine | None = None, method: Any = None) -> str:
    engine = engine or target("llama")
    with pytest.raises(ValueError) as told:
        engine.generate(prompt(5, 1), method=method or Auto(part=str(folder)), max_new_tokens=8)
    line = str(told.value)
    assert "\n" not in line and str(folder) in line
    return line


def changed(form: str, sizes: dict[str, tuple[int, ...] | None] | None = None, **config: object) -> HeadsForm:
    """A form whose config or tensors were changed; None removes a tensor."""
    old = HEADS_FORMS[form]
    left = {name: size for name, size in {**old.sizes, **(sizes or {})}.items() if size is not None}
    return replace(old, config={**old.config, **config}, sizes=left)


MISFITS: dict[str, tuple[Callable[[], HeadsForm], str]] = {
    "medusa: a block": (lambda: changed("medusa", {"0.0.linear.weight": None}), "its files lack"),
    "medusa: rows": (lambda: changed("medusa", {"1.1.weight": None}), "its files lack '1.1.weight'"),
    "medusa: a size": (lambda: changed("medusa", {"2.0.linear.weight": (3, 4)}), "is [3, 4]; [32, 32] is needed"),
    "medusa: tokens": (lambda: changed("medusa", {f"{head}.1.weight": (151, HIDDEN) for head in range(COUNT)}),
                       "for a model with 151 tokens; this one has 97"),
    "medusa: more": (lambda: changed("medusa", {"markov.weight": (2, 2)}), "it holds 'markov.weight'"),
    "medusa: too few": (lambda: changed("medusa", medusa_num_heads=5), "its files lack '3.0.linear.weight'"),
    "medusa: no number": (lambda: changed("medusa", medusa_num_layers="one"), "medusa_num_layers is 'one'"),
    "medusa: scaled": (lambda: changed("medusa", logit_scale=0.5), "scales logits by 0.5"),
    "mlp: tokens": (lambda: changed("mlp", vocab_size=151), "for a model with 151 tokens; this one has 97"),
    "mlp: states": (lambda: changed("mlp", emb_dim=48), "states of 48 numbers; this one has 32"),
    "mlp: a norm": (lambda: changed("mlp", {"speculator.ln.1.bias": None}), "its files lack 'ln.1.bias'"),
    "mlp: heads": (lambda: changed("mlp", n_predict=4), "its files lack 'emb.3.weight'"),
    "mlp: fewer heads": (lambda: changed("mlp", n_predict=2), "for which Shoal has no place"),
    "mlp: another size": (lambda: changed("mlp", inner_dim=20), "'emb.0.weight' is [97, 24]; [97, 20] is"),
}


@pytest.mark.parametrize("change", MISFITS)
def test_what_does_not_fit_is_told(tmp_path: Path, change: str) -> None:
    made, told = MISFITS[change]
    assert told in refused(write(tmp_path, made()))


def test_tokens_that_the_model_lacks_are_told(tmp_path: Path) -> None:
    form = replace(HEADS_FORMS["medusa of some tokens, vLLM"], kept=(3, VOCAB))
    assert "its 'token_map' must name different tokens of 0 to 96" in refused(write(tmp_path, form))


def test_another_model_and_another_method_are_told() -> None:
    other = engine_for(tiny("llama", hidden_size=16, intermediate_size=24))
    for form in ("medusa", "mlp"):
        folder = Path(heads_drafter(form))
        assert "states of 32 numbers; this one has 16" in refused(folder, other)
        assert f"it is of kind {HEADS_FORMS[form].method!r}" in refused(folder, method=DFlash(part=str(folder)))


def test_half_numbers_and_8_bits_run() -> None:
    for dtype, quant in ((torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.float32, "int8")):
        engine = engine_for(tiny("llama", dtype=dtype), backend="packed", quant=quant)  # type: ignore[arg-type]
        plain, found = (engine.generate(prompt(9, 3), method=one, max_new_tokens=20)
                        for one in ("full", MLPSpeculator(part=heads_drafter("mlp"), stop=0.0)))
        assert found.tokens == plain.tokens and found.stats.drafted > 0


@pytest.mark.parametrize("options, told", [({"length": 0}, "length is 0"), ({"stop": 2.0}, "stop is 2.0"),
                                           ({"branching": ()}, "branching is")])
def test_options_out_of_range_are_told(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MLPSpeculator(**options)  # type: ignore[arg-type]


def test_copies_of_what_heads_share_are_left(tmp_path: Path) -> None:
    """As files have it that were written without regard to what is shared."""
    form = HEADS_FORMS["mlp, shared"]
    more = {f"speculator.{part}.{head}.{kind}": form.sizes[f"speculator.{part}.0.{kind}"] for head in (1, 2)
            for part, kind in (("emb", "weight"), ("head", "weight"), ("ln", "weight"), ("ln", "bias"))}
    more["speculator.proj.2.weight"] = form.sizes["speculator.proj.1.weight"]
    copied = write(tmp_path, replace(form, sizes={**form.sizes, **more}))
    assert len(drawn(form)) < len(drawn(replace(form, sizes={**form.sizes, **more})))
    runner, states = TORCH.runner("llama"), torch.randn(1, HIDDEN).double()
    both = copied, heads_drafter("mlp, shared")
    found, expected = (logits(heads(runner, one), states, [[3], [41], [7]]) for one in both)
    assert torch.equal(found, expected)
