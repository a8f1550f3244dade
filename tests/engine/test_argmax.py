"""Who is content with the largest logit of each token, and that nobody else gets less than all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from gguf_models import write_model
from own_loop import Repeating
from real_models import real_model
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.model.packed import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
IDS = [3, 41, 5, 92, 66, 53, 58, 9]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model("llama", path, "Q8_0")
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each forward that gives logits: of how many rows, and whether only argmax tokens were asked for."""
    found: list[tuple[int, bool]] = []
    run = native.NativeModel.run

    def note(self: Any, struct: Any, argmax: Any = None, *rest: Any, **more: Any) -> Any:
        if struct.wanted_count:
            found.append((len(set(struct.numbers[2 * struct.tokens : 3 * struct.tokens])), argmax is not None))
        return run(self, struct, argmax, *rest, **more)

    monkeypatch.setattr(native.NativeModel, "run", note)
    return found


def loud(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


WISHES: dict[str, tuple[dict[str, Any], bool]] = {
    "greedy": ({}, True),
    "drafts": ({"method": "prompt_lookup"}, True),
    "a plan": ({"method": {"method": "unified_layer_skipping", "method_args": {"speedup": 1.3}}}, True),
    "sampled": ({"temperature": 0.7, "seed": 1}, False),
    "logprobs": ({"logprobs": 2}, False),
    "penalty": ({"repetition_penalty": 1.1}, False),
    "bias": ({"logit_bias": {3: 1.0}}, False),
    "processor": ({"logits_processor": [loud]}, False),
    "search": ({"method": {"method": "best_of", "method_args": {"n": 2}}}, False),
    "loop": ({"method": Repeating(2)}, False),
    "rule": ({"method": {"method": "prompt_lookup", "method_args": {"rule": "lenient", "margin": 2.0}}}, False),
}


@pytest.mark.parametrize("name", WISHES)
def test_who_asks(file: Path, asked: list[tuple[int, bool]], name: str) -> None:
    engine: Any = shoal.load(file)
    wish, alone = WISHES[name]
    engine.generate([IDS * 8], max_new_tokens=6, **wish)
    assert asked and {argmax for _, argmax in asked} == {alone}
    assert (engine.runner.bound_bytes == 0) == alone, "bounds are made for those who ask, and for nobody else"


def test_who_shares_a_forward_with_one_who_asks_for_all_gets_all(file: Path, asked: list[tuple[int, bool]]) -> None:
    engine = shoal.load(file)
    wishes: list[dict[str, Any]] = [{"max_new_tokens": 24, "ignore_eos": True}]
    wishes.append({**wishes[0], "temperature": 0.7, "seed": 1})
    alone = [engine.generate(IDS, **wish).tokens for wish in wishes]
    assert {(1, True), (1, False)} == set(asked)
    with Scheduler(engine) as scheduler:
        handles = [scheduler.submit(IDS, **wish) for wish in wishes]
        assert [tuple(step.token for step in handle) for handle in handles] == alone
    assert (2, False) in asked and (2, True) not in asked


def test_a_limit_on_memory_has_no_room_for_bounds(file: Path, asked: list[tuple[int, bool]]) -> None:
    engine: Any = shoal.load(file, memory="64GiB")
    engine.generate([IDS], max_new_tokens=6)
    assert (1, True) in asked and not engine.runner.bounds_logits and engine.runner.bound_bytes == 0
    assert native.as_packed(engine.runner.weights.head).upper_bytes, "no bounds were made"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen05"])
def test_a_real_model_says_the_same(name: str) -> None:
    engine: Any = shoal.load(real_model(name))
    ids = engine.tokenizer("The harbour was quiet that morning, and the fishermen")["input_ids"]
    prompts = [ids, ids[3:], ids[:5]]
    found = [one.tokens for one in engine.generate(prompts, max_new_tokens=48)]
    assert engine.runner.bound_bytes == 0, "no bounds were made"
    engine.runner.bounds_logits = False
    assert found == [one.tokens for one in engine.generate(prompts, max_new_tokens=48)]


@pytest.mark.parametrize("wish", [{}, {"stop_token_ids": "found"}, {"method": "d3"}])
def test_steps_in_one_call_give_the_texts_of_steps_one_by_one(
    file: Path, monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any]
) -> None:
    """Where a text ends, so does the call: its steps are counted, and none is run in vain."""
    engine, counts, run = shoal.load(file), list[int](), native.NativeModel.run
    prompts, new = [IDS, IDS * 2, IDS[3:]], [40, 23, 31]

    def note(self: Any, *given: Any, steps: Any = None) -> Any:
        found = run(self, *given, steps=steps)
        counts.append(0 if steps is None else steps.done)
        return found

    def answers(most: int) -> list[tuple[Any, ...]]:
        monkeypatch.setattr("shoal.decode.batch._MOST_STEPS", most)
        monkeypatch.setattr("shoal.decode.batch._MOST_SECONDS", 60.0)
        with Scheduler(engine, start=False) as scheduler:
            handles = [scheduler.submit(ids, max_new_tokens=count, ignore_eos=True, **wish)
                       for ids, count in zip(prompts, new, strict=True)]
            while scheduler.running or scheduler.waiting:
                scheduler.turn()
        return [(list(one.entries[0].seq.tokens), one.entries[0].seq.finish_reason, one.entries[0].seq.ledger)
                for one in handles]

    if "stop_token_ids" in wish:
        tokens = engine.generate([IDS], max_new_tokens=40, ignore_eos=True)[0].tokens
        wish = {"stop_token_ids": [tokens[17]]}
    monkeypatch.setattr(native.NativeModel, "run", note)
    expected = answers(1)
    assert set(counts) <= {0, 1}
    assert answers(8) == expected
    assert max(counts) == 8
