"""`shoal models`: named and other files, the Hub's cache; what fits, cards, and broken files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import scan_cache_dir

from gguf_models import write_model
from shoal import catalog
from shoal.cli import main
from shoal.engine.cards import card as cards
from shoal.engine.memory import amounts as memory


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only the models that a test puts here, and a gigabyte of memory."""
    (tmp_path / "models").mkdir()
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("SHOAL_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", partial(scan_cache_dir, tmp_path / "hub"))
    monkeypatch.setattr(memory, "free", lambda _: 10**9)
    known = catalog.Known("Tiny 1", "tiny.gguf", 5, "", "")
    monkeypatch.setattr(catalog, "KNOWN", {"tiny": known, "other": catalog.Known("Other", "other.gguf", 5, "", "")})
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["models", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def in_hub(folder: Path, name: str, files: dict[str, bytes]) -> None:
    repo = folder / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "0a"
    for path, data in files.items():
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).write_bytes(data)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0a")


def test_a_machine_without_models(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no model is on this machine"
    assert lines[1] == (f"not here: tiny. Put tiny.gguf into {machine / 'models'}, or point SHOAL_MODELS at the folder "
                        "that holds it")


def test_no_cache_of_the_hub_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", partial(scan_cache_dir, "/nowhere"))
    assert listed(capsys)["models"] == []


def test_files_are_known_by_their_header(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model("llama", machine / "models" / "tiny.gguf", "Q8_0")
    write_model("qwen2", machine / "models" / "mine.gguf", "Q4_K")
    (machine / "models" / "broken.gguf").write_bytes(b"GGUF")
    found = listed(capsys)
    tiny, broken, mine = found["models"]
    assert (tiny["name"], tiny["title"], tiny["architecture"], tiny["form"][:10]) == (
        "tiny", "Tiny 1", "llama", "GGUF, Q8_0")
    assert tiny["nbytes"] == (machine / "models" / "tiny.gguf").stat().st_size and tiny["fits"] is True
    assert (mine["name"], mine["architecture"], mine["problem"]) == ("mine", "qwen2", "")
    assert broken["name"] == "broken" and "cut off" in broken["problem"]
    assert list(found["absent"]) == ["other"]
    assert main(["models"]) == 0
    assert "broken cannot be loaded: " in capsys.readouterr().out


def test_the_hubs_cache(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 11, "hidden_size": 8, "dtype": "bfloat16"}
    in_hub(machine, "org/whole", {"config.json": json.dumps(config).encode(), "model.safetensors": bytes(100)})
    in_hub(machine, "org/words", {"tokenizer.json": b"{}"})
    in_hub(machine, "org/bare", {"model.safetensors": bytes(10)})
    in_hub(machine, "org/file", {"model.gguf": bytes(10)})
    in_hub(machine, "org/garbled", {"config.json": b"{", "model.safetensors": bytes(10)})
    cards.cached().mkdir(parents=True)
    card = {"model": {"name": "whole", "sizes": {"layers": 3, "vocab": 11, "hidden": 8}}}
    (cards.cached() / "card.json").write_text(json.dumps(card))
    found = {model["name"]: model for model in listed(capsys)["models"]}
    assert set(found) == {"org/whole", "org/bare", "org/file", "org/garbled"}
    whole = found["org/whole"]
    assert (whole["form"], whole["nbytes"], whole["cards"]) == ("safetensors, bfloat16", 100, ["whole"])
    assert [found[f"org/{name}"]["problem"] for name in ("whole", "bare", "file", "garbled")] == [
        "", "it has no config.json", "", "its config.json is no JSON"]


@pytest.mark.parametrize(("room", "answer"), [(100, False), (124, False), (126, True), (None, None)])
def test_what_fits(room: int | None, answer: bool | None, machine: Path, capsys: pytest.CaptureFixture[str],
                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda _: room)
    in_hub(machine, "org/whole", {"config.json": b"{}", "model.safetensors": bytes(100)})
    assert listed(capsys)["models"][0]["fits"] is answer


def test_the_types_that_people_run(capsys: pytest.CaptureFixture[str]) -> None:
    """As committed: a hundred, at least seventy on kernels, at most ten refused, each of these with a reason."""
    assert main(["models", "--supported"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["models", "--supported", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["types"]
    runs = [row["runs"] for row in rows]
    assert len({row["model_type"] for row in rows}) == len(rows) == 100
    assert runs.count("kernels") >= 70 and runs.count("refused") <= 10
    assert lines[0].startswith("100 model types") and len(lines) == 102
    for line, row in zip(lines[2:], rows, strict=True):
        assert line.split()[:2] == [row["model_type"], row["runs"]] and line.endswith(row["why"])
        assert (row["why"] if row["runs"] == "refused" else row["oracles"])
