"""RAPID: a draft that reads less of the prompt; the output stays the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafts import draft_of
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.speculative.model import ModelDrafter
from shoal_lab.methods.rapid import Rapid

PROMPTS = [[(7 * i * i + 3 * i) % 90 + 1 for i in range(60)], [5, 6, 7], [(11 * i) % 89 + 2 for i in range(41)]]
SHORT: dict[str, Any] = {"context": 16, "chunk": 4, "begin": 2, "end": 4, "length": 3}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_for(tiny("llama", dtype=torch.float64))


@pytest.mark.parametrize("draft", [None, draft_of("llama")], ids=["itself", "a second model"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_the_output_is_that_of_plain_decoding(engine: Engine, draft: Any, options: dict[str, Any]) -> None:
    plain = engine.generate(PROMPTS, max_new_tokens=14, **options)
    found = engine.generate(PROMPTS, method=Rapid(draft, **SHORT), max_new_tokens=14, **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(one.stats.drafted > 0 for one in found)


def test_a_model_that_reads_the_whole_prompt_guesses_itself(engine: Engine) -> None:
    found = engine.generate(PROMPTS[0], method=Rapid(length=4), max_new_tokens=15)
    assert found.stats.accepted == found.stats.drafted > 0
    less = engine.generate(PROMPTS[0], method=Rapid(**{**SHORT, "length": 4}), max_new_tokens=15)
    assert less.stats.accepted < less.stats.drafted


def test_the_draft_keeps_the_kv_of_its_view_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    real = ModelDrafter.propose

    def propose(self: ModelDrafter, *args: Any) -> Any:
        trees = real(self, *args)
        seen.append(list(self._cache.positions))
        return trees

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    engine.generate(PROMPTS, method=Rapid(**SHORT), max_new_tokens=10)
    assert max(max(lengths) for lengths in seen) <= SHORT["context"] + 10 < len(PROMPTS[2])


def test_eta_moves_sampled_rows_and_leaves_greedy_ones(engine: Engine) -> None:
    method = Rapid(draft_of("llama", 0.5), eta=20.0, **SHORT)
    plain = engine.generate(PROMPTS, max_new_tokens=10)
    assert [one.tokens for one in engine.generate(PROMPTS, method=method, max_new_tokens=10)] == [
        one.tokens for one in plain]
    assert method.recipe(engine.info()).exact_to == "none"
    assert Rapid(**SHORT).recipe(engine.info()).exact_to == "full"


@pytest.mark.parametrize(("options", "message"), [
    ({"length": 0}, "length is 0"), ({"eta": -1.0}, "eta is -1.0; it must be 0"),
    ({"eta": 1.0, "rule": "rejection"}, "eta is 1.0 beside rule='rejection'"),
    ({"likeness": "bm25"}, "likeness is 'bm25'; it must be a function"), ({"context": 100}, "context is 100"),
])
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rapid(**options)


def test_a_function_has_no_json_form() -> None:
    with pytest.raises(Unsupported, match="a function cannot be written down"):
        Rapid(likeness=lambda pieces, query: [0.0] * len(pieces)).to_dict()
