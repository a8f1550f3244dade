"""Loading: the condition of a sample, what is compared with what, and what a process counts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import bench_file
from bench_systems import MODEL, Local
from shoal.compat import installed_version
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.speed import startup, startup_table
from shoal_lab.bench.speed.starters import HFStarter, LlamaStarter, ShoalStarter
from shoal_lab.bench.speed.startup import CONDITIONS, StartupConfig, measure
from shoal_lab.bench.system import NotMeasured, Setting

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'shoal-lab[bench]'")
SECONDS = {"shoal": (4.0, 1.0, 8.0, 2.0), "llama.cpp": (3.0, 5.0), "hf": (20.0,)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MeasuredModel:
    return MeasuredModel(model=str(bench_file.write(tmp_path_factory.mktemp("file") / "tiny.gguf")))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of made-up starters: load n of a system takes `SECONDS[system][n % conditions]`."""
    entries: list[tuple[Any, ...]] = []

    def starter(name: str) -> type[Any]:
        class Made:
            def __init__(self, model: MeasuredModel, setting: Setting) -> None:
                pass

            def begin(self, cache: str) -> None:
                self.full = any(Path(cache).iterdir())
                (Path(cache) / "weights").write_bytes(b"w")
                entries.append((name, "full" if self.full else "empty"))

            def start(self, prompt: Sequence[int], new_tokens: int) -> dict[str, float]:
                if name == "broken":
                    raise NotMeasured("not today")
                number = sum(1 for entry in entries if entry[0] == name) - 1
                seconds = SECONDS[name][number % len(SECONDS[name])]
                return {"load_seconds": seconds, "first_token_seconds": seconds + 1, "peak_bytes": 100 * seconds,
                        "pss_bytes": 10.0, "disk_bytes": 5.0}

            def close(self) -> None:
                pass

        return Made

    monkeypatch.setattr(startup, "STARTERS", {name: starter(name) for name in (*CONDITIONS, "broken")})
    monkeypatch.setattr(startup, "CONDITIONS", {**CONDITIONS, "broken": ("warm",)})
    monkeypatch.setattr(startup, "drop", lambda path: entries.append(("drop", path.name)))
    monkeypatch.setattr(startup, "warm", lambda path: entries.append(("warm", path.name)))
    monkeypatch.setattr(startup.bandwidth, "read_bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(startup.idle, "watch", lambda *_: 0.0)
    return entries


def measured(model: MeasuredModel, baselines: Sequence[str], rounds: int = 2) -> dict[str, Any]:
    return measure(model, Setting("float32"), StartupConfig(baselines, rounds, start=Local))


def test_every_condition_finds_the_cache_and_the_disk_that_it_names(
    log: list[tuple[Any, ...]], model: MeasuredModel
) -> None:
    measured(model, ["llama.cpp"], rounds=1)
    file, cache = "tiny.gguf", "weights"
    assert log == [
        ("shoal", "empty"), ("warm", file), ("warm", cache), ("shoal", "full"), ("warm", file), ("warm", cache),
        ("shoal", "empty"), ("drop", file), ("drop", cache), ("shoal", "full"), ("drop", file), ("drop", cache),
        ("llama.cpp", "empty"), ("warm", file), ("warm", cache), ("llama.cpp", "full"), ("drop", file), ("drop", cache),
    ]


def test_ratios_are_taken_between_fitting_conditions(log: list[tuple[Any, ...]], model: MeasuredModel) -> None:
    found = measured(model, ["llama.cpp", "hf"])
    ratios = {row["condition"]: row["ratios"] for row in found["results"] if row["system"] == "shoal"}
    medians = {name: {key: value["median"] for key, value in one.items()} for name, one in ratios.items()}
    assert medians["first"] == {"llama.cpp load_seconds": 0.75, "llama.cpp peak_bytes": 0.75, "hf load_seconds": 5.0,
                                "hf peak_bytes": 5.0}
    assert medians["cached"]["llama.cpp load_seconds"] == 3.0 and medians["cached"]["hf load_seconds"] == 20.0
    assert medians["cold"] == {"llama.cpp load_seconds": 2.5, "llama.cpp peak_bytes": 2.5}
    assert all(not row["ratios"] for row in found["results"] if row["system"] != "shoal")
    assert found["rounds"]["done"] == 2 and found["model_bytes"] == Path(str(model.model)).stat().st_size
    assert "2 rounds show no spread" in found["warnings"][0]
    table = startup_table.text(found)
    assert "llama.cpp 0.75" in table and "transformers 20.00" in table


def test_a_peer_that_cannot_is_named(log: list[tuple[Any, ...]], model: MeasuredModel) -> None:
    found = measured(model, ["broken"], rounds=1)
    assert [one["reason"] for one in found["not_measured"]] == ["not today"]
    assert {row["system"] for row in found["results"]} == {"shoal"}
    with pytest.raises(ValueError, match="'vllm'"):
        StartupConfig(["vllm"])
    with pytest.raises(ValueError, match="rounds is 0"):
        StartupConfig(rounds=0)
    with pytest.raises(ValueError, match="no local file"):
        measured(MODEL, [])


def test_dropping_and_warming_leave_a_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"some bytes")
    startup.drop(tmp_path / "a")
    startup.warm(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"some bytes" and startup.files(tmp_path) == [tmp_path / "a"]


@pytest.mark.parametrize("kind", [ShoalStarter, HFStarter, LlamaStarter])
def test_a_start_counts_seconds_and_bytes(
    kind: type[Any], model: MeasuredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is LlamaStarter and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed: pip install 'shoal-lab[bench]'")
    monkeypatch.setenv("XDG_CACHE_HOME", "overwritten")
    monkeypatch.setenv("SHOAL_WEIGHTS", "overwritten")
    starter = kind(model, Setting("float32", FILE))
    starter.begin(str(tmp_path))
    if kind is HFStarter and installed_version("transformers") == "5.0.0":  # it cannot read this file's tokenizer
        with pytest.raises(NotMeasured, match="transformers cannot read the tokenizer"):
            starter.start([1, 2, 3], 4)
        return
    found = starter.start([1, 2, 3], 4)
    assert 0 < found["load_seconds"] < found["first_token_seconds"] < found["decode_seconds"]
    assert found["peak_bytes"] >= 0 and found["disk_bytes"] >= 0
    assert {"loaded_bytes", "pss_bytes", "private_bytes", "shared_bytes"} <= set(found)
