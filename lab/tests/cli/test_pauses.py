"""The threshold from reference solutions: a known one is recovered, and entropies are those of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shoal
from shoal.cli import main
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.calibrated import Calibrated
from shoal_lab.calibrate import pauses
from shoal_lab.eval import suites
from shoal_lab.eval.items import encode
from shoal_lab.methods.adadec import AdaDec
from word_problems import write


def synthetic(weight: float, bias: float, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropies in (0, 4), right with probability sigmoid(weight h + bias)."""
    dice = torch.Generator().manual_seed(seed)
    entropies = 4 * torch.rand(count, generator=dice)
    return entropies, torch.rand(count, generator=dice) < (weight * entropies + bias).sigmoid()


def likelihood(values: list[float], labels: list[float], weight: float, bias: float) -> float:
    logits = [weight * value + bias for value in values]
    return sum(math.log(1 / (1 + math.exp(-logit if label else logit)))
               for logit, label in zip(logits, labels, strict=True))


def test_the_regression_is_at_the_top_of_the_likelihood() -> None:
    entropies, right = synthetic(-1.5, 2.0, 300, 0)
    values, labels = entropies.tolist(), right.double().tolist()
    weight, bias = pauses.regression(values, labels, ridge=0.0)
    best = likelihood(values, labels, weight, bias)
    for by in (-1e-3, 1e-3):
        assert likelihood(values, labels, weight + by, bias) < best > likelihood(values, labels, weight, bias + by)
    assert weight == pytest.approx(-1.5, abs=0.5) and bias == pytest.approx(2.0, abs=0.8)


@pytest.mark.parametrize("boundary", [1.2, 2.0, 2.6])
def test_a_known_threshold_is_recovered(boundary: float) -> None:
    """With balanced classes it lies where right and wrong are equally dense, not where probabilities are equal."""
    entropies, right = synthetic(-6.0, 6.0 * boundary, 40_000, 1)
    found = pauses.learn(entropies, right)
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 1000
    chance = (-6.0 * grid + 6.0 * boundary).sigmoid()
    shares = chance / chance.sum() - (1 - chance) / (1 - chance).sum()
    dense = float(grid[int((shares < 0).nonzero()[0])])
    assert found.threshold == pytest.approx(dense, abs=0.12)
    assert found.accuracy > 0.85 and found.weight < 0
    assert found.pauses == pytest.approx(float((entropies >= found.threshold).double().mean()))


def test_the_seed_alone_decides() -> None:
    entropies, right = synthetic(-2.0, 3.0, 2000, 3)
    assert pauses.learn(entropies, right, 5) == pauses.learn(entropies, right, 5)
    assert pauses.learn(entropies, right, 5) != pauses.learn(entropies, right, 6)


@pytest.mark.parametrize(
    ("right", "message"), [(torch.ones(500), "only 0 of their tokens are wrong"), (None, "no less often right")]
)
def test_nothing_to_learn(right: torch.Tensor | None, message: str) -> None:
    entropies, labels = synthetic(2.0, -4.0, 500, 0)
    with pytest.raises(Unsupported, match=message):
        pauses.learn(entropies, labels if right is None else right > 0)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: Any) -> str:
    return str(write(tmp_path_factory.mktemp("problems"), variants=2))


@torch.no_grad()
def test_what_is_observed_is_what_transformers_says(tiny_folder: str, problems: str) -> None:
    engine = shoal.load(tiny_folder, dtype="float32")
    items = suites.get(problems).items(None, "calibration", 6, 0)
    found, right = pauses.observe(engine, items, batch=4)
    slow = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    expected: list[tuple[float, bool]] = []
    for sample in encode(items, engine.tokenizer, min(engine.eos_token_ids, default=None), engine.runner.max_positions):
        text = [*sample.prompt, *sample.reference]
        logits = slow(torch.tensor([text])).logits[0, len(sample.prompt) - 1 : -1].double()
        for line, token in zip(logits, sample.reference, strict=True):
            nats = -float((line.softmax(-1) * line.log_softmax(-1)).sum())
            expected.append((nats, int(line.argmax()) == token))
    assert found.tolist() == pytest.approx([nats for nats, _ in expected], abs=1e-4)
    assert right.tolist() == [same for _, same in expected]


def test_the_command_writes_a_card_that_is_a_method(
    capsys: Any, tiny_folder: str, problems: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "_LEAST", 1)
    seen = synthetic(-2.0, 3.0, 2000, 3)
    path = tmp_path / "adadec.json"
    argv = ["calibrate", "--for", "adadec", "--model", tiny_folder, "--suite", problems, "--loss-n", "6", "--dtype",
             "float32", "--json", "--out", str(path)]
    observe = pauses.observe
    shapes = []

    def planted(*args: Any) -> Any:
        shapes.append(observe(*args)[0].shape)
        return seen

    monkeypatch.setattr(pauses, "observe", planted)
    assert main(argv) == 0
    made = json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text()) == made and shapes[0][0] > 6
    method = make(str(path))
    threshold = pauses.learn(*seen).threshold
    assert isinstance(method, Calibrated) and method.inner == AdaDec(threshold=round(threshold, 4))
    engine = shoal.load(tiny_folder, dtype="float32")
    assert engine.generate([5, 17, 80], method=method, max_new_tokens=6).stats.target_forwards > 6
    method.recipe(engine.info())
    with pytest.raises(Unsupported, match="as calibrated for model"):
        Calibrated(AdaDec(), "another").recipe(engine.info())


def test_texts_have_no_solutions(capsys: Any, tmp_path: Path) -> None:
    assert main(["calibrate", "--for", "adadec", "--suite", "wikitext2", "--data", str(tmp_path)]) != 0
    assert "suite wikitext2 has no reference solutions" in capsys.readouterr().err
