"""What is recommended follows from the ends of intervals, not from what looked best."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from families import tiny
from shoal.cli.entry import main
from shoal.cli.recommend import Costs, Evidence, Lossless, Lossy, advise, growth, ungrown, unknown
from shoal.engine.cards import card as cards
from shoal.engine.loading.load import engine_for
from shoal.speculative import draft_head_file
from shoal.speculative.cost.laws import TrainedDrafter

STEADY = Lossless("chat", "auto", 1.2, 1.1, 10)
WILD = Lossless("chat", "swift", 1.6, 0.8, 3)
GENTLE = Lossy("chat", "squad", "d3:mean=29", 1.05, 1.3, 0.5, 0.004, 0.012, 4961)
STEEP = Lossy("chat", "squad", "d3:mean=25", 1.2, 1.5, 0.5, 0.01, 0.03, 4961)
ALL = Evidence((STEADY, WILD), (GENTLE, STEEP), "a machine")


@pytest.mark.parametrize(("max_drop", "method", "exact"), [(0.0, "auto", True), (0.01, "auto", True),
                                                           (0.012, "d3:mean=29", False), (0.05, "d3:mean=25", False)])
def test_the_fastest_that_is_shown_to_lose_no_more(max_drop: float, method: str, exact: bool) -> None:
    found = advise(ALL, "chat", max_drop)
    assert (found["method"], found["exact"]) == (method, exact)


def test_a_lossy_method_that_is_slower_than_an_exact_one_is_not_recommended() -> None:
    found = advise(replace(ALL, lossy=(replace(GENTLE, time=1.15),)), "chat", 0.05)
    assert found["method"] == "auto"


def test_plain_decoding_where_no_draft_is_shown_to_gain() -> None:
    found = advise(Evidence((WILD,)), "chat", 0.0)
    assert (found["method"], found["speedup"]) == ("full", 1.0)
    assert "swift" in found["why"] and "0.80x" in found["why"]
    assert advise(Evidence((replace(STEADY, speedup=0.99, low=0.98),)), "chat", 0.0)["method"] == "full"


def test_what_is_not_known_is_said() -> None:
    (_, nearest) = unknown(ALL, ["chat"], 0.01)
    assert "d3:mean=29 at 1.05x, may lose 1.2 points" in nearest
    words = " ".join(unknown(ALL, ["chat", "code", "verse"], 0.05))
    assert "fewer layers lose on code, verse:" in words and "drafts bring on code, verse:" in words
    assert len(unknown(ALL, ["chat"], 0.05)) == 1


def test_evidence_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Evidence.from_dict({"lossless": [{"task": "chat"}]})
    written = {"lossless": [asdict(STEADY), asdict(WILD)], "lossy": [asdict(GENTLE), asdict(STEEP)],
               "machine": "a machine"}
    assert Evidence.from_dict(json.loads(json.dumps(written))) == ALL


def trained(slope: float, noise: float = 0.0) -> list[TrainedDrafter]:
    """Heads by tokens of training, every other one a little off the law."""
    return [TrainedDrafter("eagle", 1e5 * 2**n, 1.8 + slope * n + noise * (-1) ** n) for n in range(5)]


def test_more_training_is_recommended_where_the_law_is_sure_that_it_pays() -> None:
    (sure,) = growth(trained(0.2), Costs(30, 10))
    assert sure["pays"] and sure["accepted"] == pytest.approx(2.8) and sure["tokens"] == 3.2e6
    assert "twice the training, 3.2 million tokens, promises 2.80" in sure["why"] and "train more" in sure["why"]
    (unsure,) = growth(trained(0.2, 0.2), Costs(30, 10))
    assert not unsure["pays"] and unsure["low"] < unsure["accepted"] and "not shown to pay" in unsure["why"]
    (flat,) = growth(trained(0.0), Costs(30, 10))
    assert not flat["pays"]


def test_the_recommended_layers_are_those_with_most_tokens_per_time() -> None:
    rows = [TrainedDrafter("eagle", 1e6, 2.0 + layers**0.5 / 10, layers) for layers in (1, 2, 4)]
    (cheap,) = growth(rows, Costs(1000, 0))
    (dear,) = growth(rows, Costs(10, 0))
    assert (cheap["layers"], dear["layers"]) == (4, 1)
    assert dear["speedup"] == pytest.approx(dear["accepted"] / 1.3)


def test_too_few_drafters_are_not_known() -> None:
    assert growth(trained(0.2)[:2], Costs(30, 10)) == []
    (said,) = ungrown(trained(0.2)[:2])
    assert said.startswith("what more training of eagle brings: 2 of 3 different amounts were tried")
    assert ungrown(trained(0.2)) == ungrown([]) == []


def report(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["recommend", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_reads_the_card_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model = tiny("llama")
    model.save_pretrained(folder)
    words = ["--model", str(folder)]
    assert report(capsys, *words)["advice"] == []
    assert main(["recommend", *words]) == 0
    assert "--method auto, which is exact" in capsys.readouterr().out
    evidence = {"lossless": [asdict(STEADY)], "lossy": [asdict(GENTLE)], "machine": "a machine"}
    cards.keep({"model": cards.identity(engine_for(model)), "evidence": evidence})
    (advice,) = report(capsys, *words, "--max-drop", "0.02")["advice"]
    assert advice["method"] == "d3:mean=29"
    assert main(["recommend", *words, "--task", "verse"]) == 2
    assert "'verse'; of this model chat were measured" in capsys.readouterr().err
    assert main(["recommend", *words, "--max-drop", "2"]) == 2
    assert "must be in [0, 1)" in capsys.readouterr().err


def test_the_command_reads_the_cards_of_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--dtype", "float64"]
    own = engine_for(model).fingerprint

    def part(place: Path, tokens: float, accepted: float, fingerprint: str = own) -> str:
        place.mkdir(parents=True)
        card = {"format": draft_head_file.FORMAT, "part": "eagle", "fingerprints": [fingerprint], "vocabulary": None,
                "shape": {}, "training_tokens": tokens, "tokens_per_forward": accepted, "acceptance": [0.5, 0.3, 0.2]}
        (place / draft_head_file.CARD).write_text(json.dumps(card))
        return str(place)

    part(tmp_path / "cache" / "shoal" / "parts" / "one", 1e6, 2.0)
    assert "1 of 3 different amounts" in report(capsys, *words)["not_known"][-1]
    more = [part(tmp_path / f"part{tokens}", tokens, accepted) for tokens, accepted in ((1e5, 1.5), (1e7, 2.5))]
    (found,) = report(capsys, *words, "--parts", ",".join(more))["drafters"]
    assert found["pays"] and found["slope"] == pytest.approx(0.5) and found["drafters"] == 3
    assert main(["recommend", *words, "--parts", ",".join(more)]) == 0
    assert "eagle: twice the training, 20 million tokens, promises 2.65" in capsys.readouterr().out
    other = part(tmp_path / "other", 1e6, 2.0, "another")
    assert main(["recommend", *words, "--parts", other]) == 2
    assert "is of another model" in capsys.readouterr().err
