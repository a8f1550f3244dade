"""Tasks on which tokens decided together clash, and the loop on a model that knows their distribution: closed forms."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from masked import MASK, masked_model
from shoal.cli.entry import main
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal_lab.eval import judges, suites
from shoal_lab.eval.items import Item
from shoal_lab.eval.sources import parallel
from shoal_lab.methods.diffusion import Diffusion
from shoal_lab.methods.fast_dllm import FastDLLM

N, PROMPT = 4, [1, 2]
REPLACED = [tuple(9 if place == other else 10 + place for place in range(N)) for other in range(N)]
"""A list in which any one element may be another."""


def shuffled() -> list[tuple[int, ...]]:
    return list(permutations(range(10, 10 + N)))


class Ideal:
    """An engine with all right answers equally probable: their marginals given decided tokens. Ties at random."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Sequence[tuple[int, ...]]) -> None:
        self.answers = torch.tensor(answers)
        self.engine: Engine = engine_for(masked_model(dtype=torch.float32))
        self._random = torch.Generator().manual_seed(1)
        monkeypatch.setattr(self.engine.runner, "forward", self._forward)

    def _forward(self, chunks: Sequence[SequenceChunk], cache: KVCache, *_: Any) -> Tensor:
        lines = []
        for chunk in chunks:
            decided = torch.tensor(list(chunk.tokens))[len(PROMPT) :]
            fits = ((self.answers == decided) | (decided == MASK)).all(1)
            held = self.answers[fits] if fits.any() else self.answers  # if decided tokens clash, any answer counts
            law = torch.nn.functional.one_hot(held, self.engine.runner.vocab_size).float().mean(0)
            lots = 1e-4 * torch.rand(law.shape, generator=self._random)
            lines.append((law.log() + lots)[len(decided) - chunk.wanted :])
        return torch.cat(lines)

    def score(self, method: Method, runs: int = 400, **how: Any) -> float:
        """The share of right answers."""
        right = {tuple(answer) for answer in self.answers.tolist()}
        found = self.engine.generate([PROMPT] * runs, method=method, max_new_tokens=N, seed=3, **how)
        return sum(result.tokens in right for result in found) / runs


def near(expected: float, runs: int = 400) -> Any:
    """Within four standard errors; 0 and 1 exactly."""
    return pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / runs) + 1e-12)


@pytest.mark.parametrize(("steps", "share"), [(4, 1.0), (2, 0.5), (1, 0.0)])
def test_one_word_replaced_somewhere_greedy(monkeypatch: pytest.MonkeyPatch, steps: int, share: float) -> None:
    assert Ideal(monkeypatch, REPLACED).score(Diffusion(steps=steps)) == near(share)


def test_one_word_replaced_somewhere_sampled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1 - 1/n) to the power n - 1; one after another is always right."""
    ideal = Ideal(monkeypatch, REPLACED)
    assert ideal.score(Diffusion(steps=1), temperature=1.0) == near((1 - 1 / N) ** (N - 1))
    assert ideal.score(Diffusion(remasking="random"), temperature=1.0, runs=200) == 1


def test_a_threshold_above_the_likeliest_word_decides_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ideal = Ideal(monkeypatch, REPLACED)
    assert ideal.score(FastDLLM(threshold=(N - 1) / N + 0.01, reuse="none"), runs=200) == 1
    assert ideal.score(FastDLLM(threshold=(N - 1) / N - 0.01, reuse="none"), runs=200) == 0


@pytest.mark.parametrize(("steps", "share"), [(4, 1.0), (2, 3 / 8), (1, math.factorial(N) / N**N)])
def test_words_in_any_order_greedy(monkeypatch: pytest.MonkeyPatch, steps: int, share: float) -> None:
    """(n - 1)!! / n!! in pairs and n! / n^n at once, with random ties."""
    assert Ideal(monkeypatch, shuffled()).score(Diffusion(steps=steps)) == near(share)


def test_sampled_one_by_one_all_orders_are_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    ideal, runs = Ideal(monkeypatch, shuffled()), 720
    found = ideal.engine.generate([PROMPT] * runs, method=Diffusion(), max_new_tokens=N, temperature=1.0, seed=5)
    counts = torch.tensor([[result.tokens for result in found].count(answer) for answer in shuffled()]).double()
    expected = runs / math.factorial(N)
    assert counts.sum() == runs
    assert float(((counts - expected) ** 2 / expected).sum()) < 49.7  # chi-square, 23 degrees of freedom, p = 0.001


def test_total_correlations_are_the_closed_forms() -> None:
    random = Random(0)
    for task in ("copy", "reverse", "replace_index", "sum"):
        assert parallel.total_correlation(parallel.TASKS[task](random)[1]) == pytest.approx(0, abs=1e-12)
    replaced = (N - 1) * (math.log2(N) - math.log2(N - 1))
    assert parallel.total_correlation(parallel.replace_random(random)[1]) == pytest.approx(replaced)
    orders = N * math.log2(N) - math.log2(math.factorial(N))
    assert parallel.total_correlation(parallel.shuffle(random)[1]) == pytest.approx(orders)
    assert parallel.total_correlation(parallel.latin(random)[1]) == pytest.approx(9 * math.log2(3) - math.log2(12))
    assert len(parallel.latin(random)[1]) == 12


def test_prompts_of_the_parts_differ_and_answers_use_known_words() -> None:
    suite, known = suites.get("parallel"), set(parallel.vocabulary())
    evaluation, calibration = (suite.items(None, part) for part in ("evaluation", "calibration"))
    assert not {item.prompt for item in evaluation} & {item.prompt for item in calibration}
    assert evaluation == suite.items(None) and {item.group for item in evaluation} == set(parallel.TASKS)
    for item in evaluation:
        assert all(set(text.split(" ")) <= known for text in (item.prompt, *item.golds))
        assert judges.get(item.judge)(f" {item.golds[-1]} ", item) == {"right": True}


@pytest.mark.parametrize(("text", "right"), [
    ("a b\nc", True), ("a b \n c", True), ("b a c", True), ("a b", False), ("a b c d", False), ("", False),
])
def test_a_listed_answer_is_one_of_them_and_nothing_else(text: str, right: bool) -> None:
    item = Item("x", "p", "a b c", "a b c", golds=("a b c", "b a c"))
    assert judges.get("listed")(text, item) == {"right": right}


def test_an_evaluation_compares_with_one_word_a_forward(capsys: pytest.CaptureFixture[str]) -> None:
    canvas = str(Path(__file__).parents[3] / "hub" / "shoal-canvas")
    argv = ["eval", "--model", canvas, "--dtype", "float32", "--suite", "parallel", "--n", "24"]
    argv += ["--max-new-tokens", "12"]
    assert main([*argv, "--measure", "answers", "--methods", "fast_dllm:reuse=none,diffusion:steps=2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["suites"][0]["answers"]
    assert [row["label"] for row in rows] == ["diffusion", "fast_dllm:reuse=none", "diffusion:steps=2"]
    plain, sure, hasty = (row["accuracy"] for row in rows)
    assert plain >= 0.8 and sure >= 0.7 and hasty < plain
    assert rows[2]["ideal_speedup"] > rows[1]["ideal_speedup"] > 1 >= rows[0]["ideal_speedup"] > 0.4
    assert main([*argv, "--measure", "answers,loss"]) == 2
    assert "a loss or log-likelihood under diffusion" in capsys.readouterr().err


def test_the_model_that_ships_shows_the_closed_forms() -> None:
    """One token after another is right; of two decided together half clash, of all none fits."""
    engine = shoal.load(str(Path(__file__).parents[3] / "hub" / "shoal-canvas"), dtype="float32")
    items = [item for item in suites.get("parallel").items(None) if item.group == "replace_random"][:60]

    def score(method: Method) -> float:
        found = engine.generate([item.prompt for item in items], method=method, max_new_tokens=5)
        return sum(judges.get("listed")(one.text, item)["right"] for one, item in zip(found, items, strict=True)) / 60

    assert score(Diffusion()) >= 0.95 and score(FastDLLM(threshold=0.9, reuse="none")) >= 0.95
    assert score(Diffusion(steps=1)) <= 0.2
    assert 0 < score(FastDLLM(threshold=0.6, reuse="none")) < 0.95
