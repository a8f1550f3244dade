"""Errors where Ray is not installed, and how the machine is divided."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli import main
from shoal.errors import Unsupported
from shoal.integrations import local_ray


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "_ENVIRONMENT", {})


@pytest.mark.parametrize("words", [["serve", "--port", "0", "--replicas", "2"],
                                   ["batch", "IN", "OUT", "--ray", "2"]])
def test_without_ray_the_extra_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "IN").write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert main([str(tmp_path / word) if word.isupper() else word for word in words]) == 2
    said = capsys.readouterr().err
    assert "ray is not installed" in said and "'shoal[ray]'" in said
    assert " ".join(words[-2:]) in said


@pytest.mark.parametrize(("words", "said"), [(["serve", "--replicas", "0"], "--replicas is 0"),
                                             (["batch", "IN", "OUT", "--ray", "0"], "--ray is 0")])
def test_nobody_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "IN").write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert main([str(tmp_path / word) if word.isupper() else word for word in words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize(("actors", "gpus", "device", "share"), [
    (2, 0, None, 0), (2, 2, None, 1), (2, 8, "cuda", 1), (3, 2, None, 0.5), (5, 2, None, 1 / 3), (2, 2, "cpu", 0),
])
def test_gpus_are_shared_so_that_all_find_a_place(
    actors: int, gpus: int, device: str | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert local_ray.actor_options(actors, device) == {"num_cpus": 1, "num_gpus": share}


class Moody:
    """A stand-in for Ray that fails as it does on a busy machine."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, []

    def init(self, **options: Any) -> None:
        self.calls.append("init")
        assert options["address"] == "local"  # never somebody else's cluster
        if self.calls.count("init") <= self.failures:
            raise Exception("The current node timed out during startup.")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_slow_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Moody(failures=2)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", "data")
    with local_ray.running("shoal batch", "data", 2) as module:
        assert module == "data" and ray.calls == ["init", "shutdown"] * 2 + ["init"]
    assert ray.calls[-1] == "shutdown"
    monkeypatch.setitem(sys.modules, "ray", Moody(failures=3))
    with pytest.raises(TimeoutError, match="3 tries.*timed out during startup"), \
            local_ray.running("shoal batch", "data", 2):
        pass


def test_a_gpu_by_its_number_is_refused() -> None:
    with pytest.raises(Unsupported, match="--device cuda"):
        local_ray.actor_options(2, "cuda:1")


@pytest.mark.parametrize(("cores", "actors", "each"), [(8, 2, 4), (8, 3, 2), (2, 5, 1)])
def test_threads_are_shared_out(cores: int, actors: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert local_ray.threads(actors) == each
