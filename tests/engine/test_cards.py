"""Cards of known models: found by fingerprint, by norm vectors with a word about it, in the cache; broken ones."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from families import tiny
from shoal.engine.cards import card as cards
from shoal.engine.cards.card import FILE, Card, read_card
from shoal.engine.cards.quick import Effort, measure_card
from shoal.engine.loading.load import engine_for

SCORES = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shoal" / "cards"


def engine(family: str = "llama", scale: float = 1.0, backend: str = "hf") -> Any:
    model = copy.deepcopy(tiny(family)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.linspace(0.01, 0.3, len(weight)).to(torch.bfloat16))
            elif scale != 1 and weight.dim() > 1:
                weight.mul_(scale)
    return engine_for(model, backend=backend)


def made(one: Any, **more: Any) -> dict[str, Any]:
    card = {"format": 2, "model": cards.identity(one, "Q4_1"), "order": [1, 3, 4, 2, 0, 5],
            "layer_scores": {"leave_one_out": SCORES}, "bears": {"kl": 0.1, "mean_layers": 5.5}}
    return {**card, **more}


def test_an_unknown_model_has_an_empty_card() -> None:
    assert engine().card.empty and engine().card == Card()


def test_found_by_fingerprint_and_used_without_a_further_step() -> None:
    cards.keep(made(engine()))
    known = engine()
    assert known.card.order == (1, 3, 4, 2, 0, 5) and not known.card.borrowed
    assert "in your cache" in known.card.origin
    dropped = [set(range(6)) - set(layers) for layers in known.plan(shoal.D3(mean=0.9, core=2), max_new_tokens=64)]
    assert dropped[-1] and dropped[-1] <= {1, 3, 4, 2} and 1 in dropped[-1]


@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_found_by_the_norms_of_other_weights_which_is_said(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    cards.keep(made(engine()))
    with caplog.at_level(logging.INFO, "shoal"):
        other = engine(scale=1.01, backend=backend)
        assert other.fingerprint != engine().fingerprint
        assert other.card.borrowed and other.card.order == (1, 3, 4, 2, 0, 5)
        assert other.card is other.card
    assert [record.message for record in caplog.records if "calibrated on Q4_1" in record.message]
    assert "calibrated on Q4_1" in other.card.origin


def test_models_whose_norms_are_stored_as_one_plus_w_have_a_common_key() -> None:
    """GGUF stores Gemma's w as 1 + w, in float32."""
    plain, stored = engine(), engine()
    for runner, shift in ((plain.runner, 0.0), (stored.runner, 1.0)):
        for layer in range(runner.num_layers):
            for module in runner.parts.layers[layer].modules():
                if "norm" in type(module).__name__.lower():
                    module.weight.data.sub_(1.0).add_(shift)
    assert set(cards.norm_keys(plain.runner)) & set(cards.norm_keys(stored.runner))


def test_other_norms_or_sizes_do_not_match() -> None:
    cards.keep(made(engine()))
    other = engine()
    other.runner.parts.layers[2].input_layernorm.weight.data[3] += 0.1
    other.__dict__["fingerprint"] = "0" * 16
    assert other.card.empty
    assert engine_for(tiny("llama", layers=4)).card.empty


def test_a_card_that_ships_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "SHIPPED", tmp_path)
    (tmp_path / "some.json").write_text(json.dumps(made(engine())), "utf-8")
    assert "ships with Shoal" in engine().card.origin


def test_a_card_beside_the_model_goes_first(tmp_path: Path) -> None:
    cards.keep(made(engine()))
    folder = tmp_path / "model"
    copy.deepcopy(tiny("llama")).float().save_pretrained(folder)
    (folder / FILE).write_text(json.dumps({"order": "low_first"}), "utf-8")
    assert shoal.load(str(folder)).card.order == "low_first"


def test_a_broken_card_in_the_cache_is_named_and_left(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = cards.keep(made(engine()))
    bad = cache / "bad.json"
    bad.write_text('{"model": ', "utf-8")
    assert engine().card.order is not None
    assert "bad.json" in caplog.text and "remove it" in caplog.text
    assert bad.exists() and good.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[1]", "holds no JSON object"),
        ('{"layer_scores": {"influence": [1, 2]}}', "holds 2 scores of kind 'influence', but the model has 6 layers"),
        ('{"layer_scores": 3}', "is no calibration card"),
        ('{"bears": {"mean_layers": 9}}', "bears 9 layers"),
        ('{"skips": {"attention": [1]}}', "is no calibration card"),
    ],
)
def test_a_broken_card_beside_the_model_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / FILE).write_text(text, "utf-8")
    with pytest.raises(ValueError, match=words):
        read_card(tmp_path, 6)


def test_keeping_writes_whole_files_only(cache: Path) -> None:
    path = cards.keep(made(engine()))
    assert path.parent == cache and [one.name for one in cache.iterdir()] == [path.name]
    with pytest.raises(ValueError, match="neither a fingerprint nor norm"):
        cards.keep({"model": {"fingerprints": [], "norms": []}})


def test_d3_takes_the_depth_that_the_model_bears(caplog: pytest.LogCaptureFixture) -> None:
    unknown = engine()
    first = unknown.recipe("d3", 64).plan.mean_depth(64)
    unknown.recipe("d3", 64)
    assert first == pytest.approx(0.85 * 6, abs=0.1)
    assert caplog.text.count("leaves layers out by their position") == 1 and "quick_card" in caplog.text
    caplog.clear()
    cards.keep(made(engine()))
    known = engine()
    assert known.recipe("d3", 64).plan.mean_depth(64) == pytest.approx(5.5, abs=0.1)
    assert known.recipe("full", 64).plan.mean_depth(64) == 6 and not caplog.text


def test_cards_that_ship_are_small_and_of_the_form_that_is_read() -> None:
    for path in cards.SHIPPED.glob("*.json"):
        data = json.loads(path.read_text("utf-8"))
        card = Card.from_dict(data, data["model"]["sizes"]["layers"])
        assert path.stat().st_size < 8192 and not card.empty and card.bears is not None
        assert data["model"]["fingerprints"] and data["model"]["norms"] and data["model"]["weights"]
        assert data["measured"]["tokens"] >= 96 and data["measured"]["machine"]


def test_a_card_of_a_hybrid_says_what_each_kind_of_layer_is_worth() -> None:
    engine = engine_for(tiny("qwen3_5"))
    data = measure_card(engine, [([1, 2, 3], [4, 5, 6, 7])], Effort(None))
    attends = [kind == "full_attention" for kind in engine.model.config.layer_types]
    scores = data["layer_scores"]["leave_one_out"]
    for kind, wanted in (("attention", True), ("recurrent", False)):
        layers = [layer for layer, own in enumerate(attends) if own == wanted]
        assert layers and data["by_kind"][kind]["layers"] == layers
        mean = sum(scores[layer] for layer in layers) / len(layers)
        assert data["by_kind"][kind]["leave_one_out"] == pytest.approx(mean, abs=1e-5)
    assert data["model"]["sizes"]["attention"] == sum(attends)
    assert "by_kind" not in measure_card(engine_for(tiny("llama")), [([1, 2, 3], [4, 5, 6, 7])], Effort(None))
