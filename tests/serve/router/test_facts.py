"""What is told of models that are not in memory: the same as of loaded ones, from their files, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import hearers
from families import tiny
from gguf_models import write_model
from gguf_words import TEMPLATE, spoken
from real_models import real_model
from serving import Routed, routing_files
from shoal import load
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.serve.facts import ModelFacts

MARKS = {"tokenizer.ggml.eot_token_id": 7, "general.sampling.temp": 0.25, "general.file_type": 7}
LOADED = ("total_slots", "card")
"""Fields of `/props` that only a model in memory has."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(spoken(tmp_path, **MARKS))


def of_files(source: str) -> ModelFacts:
    return ModelFacts.of_files(Checkpoint(source, None, False))


def test_files_say_what_a_loaded_model_does(file: str, tiny_folder: str, tmp_path: Path) -> None:
    write_model("gemma3", tmp_path / "mute.gguf", ["Q4_0", "F16"])
    tiny("gpt2").save_pretrained(tmp_path / "mute")
    for source in (file, tiny_folder, str(tmp_path / "mute.gguf"), str(tmp_path / "mute")):
        found = of_files(source)
        assert found == ModelFacts.of_engine(load(source, dtype="float32", backend="hf")), source
        assert found.form.parameters > 1000
    said = of_files(file)
    assert said.template == TEMPLATE and {2, 7} <= {*said.ends} and said.sampling == {"temperature": 0.25}
    assert (said.family, said.form.format, said.form.rounding) == ("llama", "gguf", "Q8_0")
    assert (of_files(tiny_folder).form.format, of_files(tiny_folder).form.rounding) == ("safetensors", "F32")
    assert of_files(str(tmp_path / "mute.gguf")).form.rounding in ("Q4_0", "F16"), "no type is named, so the usual one"


@pytest.mark.parametrize("kind", hearers.KINDS)
def test_files_say_that_a_model_hears(kind: str, tmp_path: Path) -> None:
    hearers.write(tmp_path, kind)
    found = of_files(str(tmp_path))
    assert found == ModelFacts.of_engine(load(str(tmp_path), dtype="float32"))
    assert found.props("x")["modalities"] == {"vision": False, "audio": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen05"])
def test_published_files_say_what_a_loaded_model_does(name: str) -> None:
    found = of_files(real_model(name))
    assert found == ModelFacts.of_engine(load(real_model(name)))
    assert found.form.rounding in ("Q4_1", "Q4_K_M") and found.form.size.endswith("M")
    assert found.fills == (name == "qwen05") and found.positions in (8192, 32768)


def told(server: Routed, name: str) -> tuple[Any, Any]:
    props = httpx.get(f"{server.url}/props", params={"model": name}, timeout=60)
    shown = httpx.post(f"{server.url}/api/show", json={"model": name}, timeout=60)
    return props.raise_for_status().json(), shown.raise_for_status().json()


def test_a_server_tells_of_models_without_loading_them(
    file: str, tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[str]()
    own = ModelFacts.of_files
    monkeypatch.setattr(ModelFacts, "of_files", lambda files: (reads.append(files.name), own(files))[1])
    with routing_files("--model", file, "--alias", f"other={tiny_folder}", "--dtype", "float32") as server:
        for name in ("spoken", "spoken:latest", "other"):
            before = told(server, name)
        assert reads == [file, tiny_folder], "each is read once"
        assert [one.state for one in server.shelf.models] == ["unloaded"] * 2
        listed = httpx.get(f"{server.url}/api/tags", timeout=60).json()["models"]
        assert [one["details"]["quantization_level"] for one in listed] == ["Q8_0", "F32"]
        before = told(server, "spoken")
        assert [before[0][name] for name in LOADED] == [None, None] and before[0]["chat_template"] == TEMPLATE
        assert before[1]["capabilities"] == ["completion"] and before[1]["model_info"]["llama.context_length"] > 0
        httpx.post(f"{server.url}/models/load", json={"model": "spoken"}, timeout=60).raise_for_status()
        after = told(server, "spoken")
        assert after[1] == before[1] and [after[0][name] is None for name in LOADED] == [False, False]
        assert all(after[0][name] == value for name, value in before[0].items() if name not in LOADED)
        stat = Path(file).stat()
        Path(file).write_bytes(Path(file).read_bytes().replace(b"im_start|>assistant", b"im_start|>Assistant"))
        assert Path(file).stat().st_size == stat.st_size
        httpx.post(f"{server.url}/models/unload", json={"model": "spoken"}, timeout=60).raise_for_status()
        assert "Assistant" in told(server, "spoken")[1]["template"], "a changed file is read again"


def test_files_that_cannot_be_read_are_told(tmp_path: Path, tiny_folder: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, and no more")
    with routing_files("--model", tiny_folder, "--model", str(tmp_path / "bad.gguf")) as server:
        for answer in (httpx.get(f"{server.url}/props?model=bad", timeout=60),
                       httpx.post(f"{server.url}/api/show", json={"model": "bad"}, timeout=60)):
            assert answer.status_code == 500 and "bad cannot be loaded: the GGUF file 'bad.gguf'" in answer.text
        assert httpx.get(f"{server.url}/props?model=none", timeout=60).status_code == 404
