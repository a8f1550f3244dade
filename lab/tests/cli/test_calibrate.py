"""`shoal calibrate` on a tiny random model: the same card twice, a card that runs everywhere, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import long_texts
import shoal
from shoal.cli import main
from shoal.engine.cards import card as cards
from shoal.errors import Unsupported
from shoal.integrations.transformers import attach
from shoal.methods import make
from shoal.methods.tidal import Tidal
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal_lab.calibrate import skips
from shoal_lab.calibrate.reselection import OTHER_SEEDS
from word_problems import write

SMALL = ["--max-new-tokens", "16", "--trials", "60", "--loss-n", "12", "--answer-n", "12", "--dtype", "float32",
         "--json"]


def calibrated(capsys: Any, *argv: str) -> dict[str, Any]:
    assert main(["calibrate", *argv]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    card: dict[str, Any] = json.loads(out)
    return card


@pytest.fixture(scope="module")
def problems(tmp_path_factory: Any) -> str:
    return str(write(tmp_path_factory.mktemp("problems"), variants=2))


@pytest.fixture
def argv(tiny_folder: str, problems: str, tmp_path: Path) -> list[str]:
    return ["--model", tiny_folder, "--suite", problems, "--core", "2", "--out", str(tmp_path / "card.json"), *SMALL]


@pytest.mark.slow
def test_two_runs_with_one_seed_give_the_same_card(capsys, argv, tmp_path):
    aim = ["--metric", "agreement", "--max-drop", "0.6"]
    first = calibrated(capsys, *argv, *aim, "--force")
    assert json.loads((tmp_path / "card.json").read_text()) == first
    second = calibrated(capsys, *argv, *aim, "--force")
    assert first.pop("measured")["predicted_speedup"] > 0 and second.pop("measured")
    assert first == second
    other = calibrated(capsys, *argv, *aim, "--no-timing", "--seed", "1")
    assert other["data"]["hash"] != first["data"]["hash"]


def test_sublayers_for_drafts(capsys, tiny_folder, problems, tmp_path, monkeypatch):
    """The card runs on its model, and the model's own card is filled; another model's is refused."""
    out, own = tmp_path / "skips.json", tmp_path / "shoal.json"
    argv = ["--for", "draft_and_verify", "--model", tiny_folder, "--suite", problems, "--out", str(out), "--texts", "2",
            "--trials", "3", "--dtype", "float32"]
    made = calibrated(capsys, *argv, "--json")
    assert json.loads(out.read_text()) == made and made["data"]["items"] == 2 and made["found"]["rounds"] == 4
    assert made["found"]["costs"] == "measured times"
    engine = shoal.load(tiny_folder, dtype="float32")
    method = make(str(out))
    assert method.inner.name == "draft_and_verify"
    plain = engine.generate("Tom has 15 cups.", max_new_tokens=6).tokens
    assert engine.generate("Tom has 15 cups.", method=method, max_new_tokens=6).tokens == plain
    own.write_text(json.dumps({"model": cards.identity(engine), "skips": None, "order": "influence"}))
    monkeypatch.setattr(skips, "measure_sublayers", None)  # bytes count, not this machine's times
    made = calibrated(capsys, *argv, "--into", str(own), "--json")
    filled = json.loads(own.read_text())
    assert filled["order"] == "influence" and filled["skips"]["rounds"] == 4 and made["found"]["costs"] == "bytes"
    sets = made["method"]["inner"]["method_args"]
    found = cards.Card.from_dict(filled, 6).skips
    assert found == (tuple(sets["skip_attention"]), tuple(sets["skip_mlp"]))
    before = own.write_text(json.dumps({**filled, "model": {**filled["model"], "norms": ["another"]}}))
    assert main(["calibrate", *argv, "--into", str(own)]) == 2 and len(own.read_text()) == before
    assert "give the card of this model" in capsys.readouterr().err
    assert main(["calibrate", *argv, "--texts", "0"]) == 2
    monkeypatch.undo()
    main(["calibrate", *argv])
    assert "4 sets" in capsys.readouterr().out


def test_channels_of_keys(capsys, tiny_folder, problems, tmp_path):
    """The card is the method's own, runs unchanged, and is bound to its model."""
    out = tmp_path / "channels.json"
    argv = ["--model", tiny_folder, "--suite", problems, "--out", str(out), "--loss-n", "3", "--dtype", "float32"]
    made = calibrated(capsys, "--for", "double_sparsity", *argv, "--json")
    assert json.loads(out.read_text()) == made and made["data"]["items"] == 3
    again = calibrated(capsys, "--for", "double_sparsity", *argv, "--json", "--seed", "1")
    assert again["data"]["hash"] != made["data"]["hash"]
    engine = shoal.load(tiny_folder, dtype="float32")
    method = make(str(out))
    assert engine.generate("Tom has 15 cups.", method=method, max_new_tokens=4).stats.new_tokens == 4
    inner = method.inner
    assert [sorted(head) for layer in inner.channels for head in layer] == [[*range(8)]] * 12
    few = make({**inner.to_dict(), "method_args": {**inner.to_dict()["method_args"], "k": 2, "first": 0}})
    assert engine.recipe(few, 4).components == ("select",)
    main(["calibrate", "--for", "double_sparsity", *argv])
    assert f"ranked on 3 texts; it is run by --method {out}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_layer_that_selects_anew(capsys, tiny_folder, tmp_path):
    """The layer with the highest mean agreement, which an evaluation of the same contexts confirms."""
    out, data = tmp_path / "tidal.json", long_texts.write(tmp_path)
    argv = ["--model", tiny_folder, "--suite", "needle,novels", "--context", "600", "--contexts", "1",
             "--questions", "3", "--data", str(data), "--dtype", "float32"]
    ours = ["--for", "tidal", *argv, "--k", "40", "--out", str(out)]
    made = calibrated(capsys, *ours, "--json")
    assert json.loads(out.read_text()) == made
    layers = shoal.load(tiny_folder).runner.num_layers
    assert [*made["agreement"]] == [str(layer) for layer in range(2, layers - 1)] + [str(layers)]
    means = {int(layer): sum(shares) for layer, shares in made["agreement"].items()}
    assert made["reselect"] == max(means, key=means.get) and made["default"] == 2 and len(set(means.values())) > 1
    method = make(str(out))
    assert method.inner == Tidal(40, reselect=made["reselect"])
    assert main(["eval", *argv, "--scored", "64", "--seed", str(OTHER_SEEDS), "--methods", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [round(part["rows"][1]["agreement"], 4) for part in report["suites"]] == made["agreement"][
        str(made["reselect"])]
    main(["calibrate", *ours])
    assert f"selects anew, 2 without this card; the number of layers: none does. It is run by --method {out}" in (
        capsys.readouterr().out)


def test_the_aim_is_met_by_the_shallowest_schedule_of_the_curve(capsys, argv):
    card = calibrated(capsys, *argv, "--metric", "perplexity", "--max-drop", "0.5", "--no-timing")
    good = [point for point in card["curve"] if math.exp(point["loss_rise"]) - 1 <= 0.5]
    assert good and card["chosen"] == min(good, key=lambda point: point["mean_layers"])
    depths = [point["mean_layers"] for point in card["curve"]]
    assert depths == sorted(depths, reverse=True)
    assert card["trials"]["used"] <= 60 and not card["trials"]["cut_short"]
    assert len(card["layer_scores"]["influence"]) == len(card["layer_scores"]["leave_one_out"]) == 6
    assert sorted(card["order"]) == [1, 2, 3, 4]


def test_the_losses_are_those_of_the_engine(capsys, argv, tiny_folder, problems):
    card = calibrated(capsys, *argv, "--metric", "perplexity", "--max-drop", "0.5", "--no-timing")
    engine = shoal.load(tiny_folder, dtype="float32")
    from shoal_lab.eval import suites
    from shoal_lab.eval.items import encode

    items = suites.get(problems).items(None, "calibration", 12, 0)
    samples = encode(items, engine.tokenizer, None, engine.runner.max_positions)

    def loss(method: Any) -> float:
        plan = engine.recipe(method, 64).plan
        values = []
        for sample in samples:  # one forward each
            steps = [0] * len(sample.prompt) + list(range(1, len(sample.reference)))
            tokens = [*sample.prompt, *sample.reference[:-1]]
            cache, wanted = KVCache(engine.runner.windows, seqs=1), len(sample.reference)
            logits = engine.runner.forward([SequenceChunk(0, tokens, steps, plan, wanted=wanted)], cache)
            values.append(cross_entropy(logits, torch.tensor(sample.reference), reduction="none"))
        return float(torch.cat(values).mean())

    assert card["full_loss"] == pytest.approx(loss("full"), abs=1e-4)
    assert card["chosen"]["loss_rise"] == pytest.approx(loss(make(card["method"])) - loss("full"), abs=1e-4)


def test_a_card_runs_and_travels_in_a_generation_config(capsys, argv, tiny_folder, tmp_path):
    card = calibrated(capsys, *argv, "--metric", "perplexity", "--max-drop", "0.9", "--no-timing")
    path = str(tmp_path / "card.json")
    assert main(["plan", "--model", tiny_folder, "--method", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_layers"] < 6
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    config = attach(GenerationConfig(max_new_tokens=12, do_sample=False), make(path))
    config.save_pretrained(tmp_path / "saved")
    again = GenerationConfig.from_pretrained(tmp_path / "saved")
    ids = tokenizer("Ada has 3", return_tensors="pt")["input_ids"]
    from shoal.integrations.transformers import method_from

    out = model.generate(ids, generation_config=again, custom_generate=method_from(again))
    expected = shoal.load(model, tokenizer).generate(ids[0].tolist(), method=path, max_new_tokens=12)
    assert out[0, ids.shape[1] :].tolist() == list(expected.tokens)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    model.config._name_or_path = ""
    with pytest.raises(Unsupported, match="calibrated for model"):
        shoal.load(model, tokenizer).generate(ids[0].tolist(), method=card["method"], max_new_tokens=4)


def test_a_card_beside_the_weights_gives_the_order(capsys, argv, tiny_folder, tmp_path):
    card = calibrated(capsys, *argv, "--metric", "perplexity", "--max-drop", "0.5", "--no-timing")
    from shoal.engine.cards.card import Card

    read = Card.from_dict(card, 6)
    assert list(read.order) == card["order"] and read.layer_scores["influence"]


def test_where_nothing_meets_the_aim_all_layers_run(capsys, argv):
    card = calibrated(capsys, *argv, "--metric", "perplexity", "--max-drop", "0", "--no-timing")
    if card["chosen"] is None:
        assert not card["worth_it"] and card["method"]["inner"]["method_args"] == {"order": [], "steps": []}
    else:
        assert card["chosen"]["loss_rise"] <= 0


def test_time_only_cuts_short(capsys, argv):
    card = calibrated(capsys, *argv, "--metric", "perplexity", "--no-timing", "--minutes", "0.0000001")
    assert card["trials"]["cut_short"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-drop", "1.5"], "--max-drop is 1.5; it must be in [0, 1)"),
        (["--trials", "3", "--no-timing"], "trials is 3; a model of 6 layers needs at least 12"),
        (["--out", "no/such/folder/card.json"], "there is no folder"),
        (["--minutes", "-1"], "minutes is -1"),
        (["--suite", "nothing"], "unknown suite"),
        (["--for", "tidal"], "has no long contexts; with --for tidal there are needle, multi_needle"),
        (["--for", "tidal", "--suite", "needle", "--k", "0"], "--k is 0; it must be at least 1"),
        (["--for", "tidal", "--suite", "needle", "--context", "9x"], "9x"),
    ],
)
def test_refusals(capsys, argv, extra, message):
    assert main(["calibrate", *argv, *extra]) == 2
    assert message in capsys.readouterr().err
