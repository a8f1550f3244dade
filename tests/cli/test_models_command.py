"""`shoal models`: named and other files, the Hub's cache; what fits, cards, and broken files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from gguf_models import write_model
from shoal import catalog
from shoal.cli import main
from shoal.engine.cards import card as cards
from shoal.engine.memory import amounts as memory
from shoal.hub.names import table
from shoal.hub.places import find


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only the models that a test puts here, and a gigabyte of memory."""
    (tmp_path / "models").mkdir()
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("SHOAL_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
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
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/nowhere")
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


def test_folders_of_safetensors_lie_beside_files(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("voice", "bare", "notes"):
        (machine / "models" / name).mkdir()
    (machine / "models" / "voice" / "config.json").write_text('{"model_type": "whisper", "dtype": "float32"}')
    for name in ("voice", "bare"):
        (machine / "models" / name / "model.safetensors").write_bytes(bytes(100))
    (machine / "models" / "notes" / "read.me").write_text("no model")
    bare, voice = listed(capsys)["models"]
    assert (voice["name"], voice["architecture"], voice["form"], voice["nbytes"], voice["problem"]) == (
        "voice", "whisper", "safetensors, float32", 100, "")
    assert catalog.find("voice") == str(machine / "models" / "voice"), "--model takes its name"
    assert (bare["name"], bare["problem"]) == ("bare", "it has no config.json")


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
    assert set(found) == {"org/whole", "org/bare", "org/file:model.gguf", "org/garbled"}
    whole = found["org/whole"]
    assert (whole["form"], whole["nbytes"], whole["cards"]) == ("safetensors, bfloat16", 100, ["whole"])
    assert [found[f"org/{name}"]["problem"] for name in ("whole", "bare", "garbled")] == [
        "", "it has no config.json", "its config.json is no JSON"]
    assert "no sound GGUF file" in found["org/file:model.gguf"]["problem"]


def test_files_of_the_hub_and_of_lm_studio_are_each_a_model(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By names that --model takes: a quantisation, a file where two have one, a short name where the table has it."""
    write_model("llama", machine / "one.gguf", "Q8_0")
    data = (machine / "one.gguf").read_bytes()
    in_hub(machine, "org/many", {"X-Q8_0.gguf": data, "X-Q4_0.gguf": data, "mmproj-F16.gguf": b"", "mtp-X.gguf": b""})
    in_hub(machine, "org/twins", {"A-Q8_0.gguf": data, "B-Q8_0.gguf": data})
    in_hub(machine, "org/parts", {"P-Q8_0-00002-of-00002.gguf": data, "Q-Q8_0-00001-of-00002.gguf": data})
    in_hub(machine, "unsloth/Qwen3-4B-GGUF", {"Qwen3-4B-Q4_K_M.gguf": data})
    studio = machine / ".lmstudio" / "models" / "lab" / "mine"
    studio.mkdir(parents=True)
    (studio / "mine-Q8_0.gguf").write_bytes(data)
    found = listed(capsys)
    names = {"org/many:Q8_0", "org/many:Q4_0", "org/twins:A-Q8_0.gguf", "org/twins:B-Q8_0.gguf", "qwen3:4b",
             "lab/mine:Q8_0"}
    sound = {model["name"]: model for model in found["models"] if not model["problem"]}
    assert set(sound) == names
    assert all(find(name) is not None for name in names)
    assert sound["lab/mine:Q8_0"]["title"] == "mine-Q8_0.gguf of lab/mine, in LM Studio"
    assert [model["problem"] for model in found["models"] if model["problem"]] == [
        "parts are missing; shoal pull brings them"]
    assert "qwen3:4b" not in {row["name"] for row in found["known"]}


def test_files_of_ollama(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose manifest names one file of weights that is there; by its name as Ollama shows it."""
    write_model("llama", machine / "one.gguf", "Q8_0")
    store = machine / "ollama"
    (store / "blobs").mkdir(parents=True)
    (store / "blobs" / "sha256-ab").write_bytes((machine / "one.gguf").read_bytes())
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}
    text = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:cd"}
    manifests = {"registry.ollama.ai/library/qwen3/4b": [layer, text], "hf.co/org/x-GGUF/Q8_0": [layer],
                 "registry.ollama.ai/someone/mine/latest": [layer], "registry.ollama.ai/library/gone/1b": [text],
                 "registry.ollama.ai/library/part/1b": [{**layer, "digest": "sha256:ef"}]}
    for path, layers in manifests.items():
        place = store / "manifests" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"layers": layers}))
    (store / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / "broken").write_text("{")
    names = [model["name"] for model in listed(capsys)["models"]]
    assert names == ["ollama:hf.co/org/x-GGUF:Q8_0", "ollama:qwen3:4b", "ollama:someone/mine:latest"]
    assert {find(name) for name in (*names, "ollama:someone/mine")} == {store / "blobs" / "sha256-ab"}
    with pytest.raises(ValueError, match="Ollama holds none of that name"):
        find("ollama:gone:1b")


def test_what_may_be_pulled(machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda _: 4 * 10**9)
    blobs = machine / "hub" / "models--org--big-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "ab.part").write_bytes(bytes(10**7))
    found = listed(capsys)
    known = {row["name"]: row for row in found["known"]}
    assert set(known) == set(table())
    assert known["qwen3:4b"]["fits"] is True and known["qwen3:14b"]["fits"] is False
    assert known["gemma4:e2b"]["about_bytes"] > known["gemma3:4b"]["about_bytes"]  # Q8_0
    assert known["devstral:small"]["about_bytes"] is None and known["devstral:small"]["fits"] is None
    assert found["unfinished"] == {"org/big-GGUF": 10**7}
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "unfinished: org/big-GGUF, 0.01 GB of it are here; shoal pull goes on\n" in shown
    assert re.search(r"\nqwen3:4b +2.45 +yes +apache-2.0 +chat", shown)


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
