"""Engines in environments of their own: lines of JSON, what they convert, and all that can go wrong with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from families import tiny
from shoal.cli import main
from shoal_lab.bench import engines
from shoal_lab.bench.engines import Engine, lines
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.report import shown
from shoal_lab.bench.speed import run as speed
from shoal_lab.bench.speed.cells import Grid
from shoal_lab.bench.system import NotMeasured, Setting

FAKE = '''
import os, sys, time
sys.path.insert(0, {folder!r})
import lines

def prepare(folder, work, bits, threads):
    print("loading", folder)
    os.write(1, b"a library talks\\n")
    {early}
    def running(prompt, new_tokens, seen):
        {late}
        for i in range(new_tokens):
            seen.note((prompt[-1] + i + 1) % 50)
    return running, {{"detail": f"fake of {{threads}}", "bits": bits + 0.5}}

lines.serve("pytest", prepare)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    return str(path)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> Any:
    def make(early: str = "pass", late: str = "pass", quant: str | None = "int8") -> Engine:
        script = tmp_path / "fake.py"
        script.write_text(FAKE.format(folder=str(Path(lines.__file__).parent), early=early, late=late))
        monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "vllm": (str(script), (4, 8, 16))})
        return Engine("vllm", sys.executable, MeasuredModel(model=folder), Setting("float32", quant, threads=2))

    return make


@pytest.mark.parametrize(("quant", "bits"), [("int4", 4.5), ("int8", 8.5), (None, 16.5)])
def test_an_engine_answers_in_lines_whatever_its_libraries_print(fake: Any, quant: str | None, bits: float) -> None:
    engine = fake(quant=quant)
    assert engine.apart() == 0
    about = engine.prepare()
    assert engine.apart() > 1 << 20
    assert about.detail == "fake of 2" and about.extra == {"bits_per_weight": bits}
    assert about.version == pytest.__version__
    run = engine.generate([[3, 7]], 4, None)
    assert run.tokens == (8, 9, 10, 11) and list(run.times) == sorted(run.times) and run.times[0] > 0
    assert engine.generate([[3, 9]], 1, None).tokens == (10,)
    assert engine.expect(8, 1, 4, None).step_bytes > 0
    with pytest.raises(NotMeasured, match="one prompt at a time"):
        engine.generate([[1], [2]], 4, None)
    with pytest.raises(NotMeasured, match="no forward of several positions"):
        engine.forward([1], 2, 1)
    work, process = engine._work, engine._process
    engine.close()
    assert not work.exists() and process.poll() is not None


@pytest.mark.parametrize(("early", "message"), [
    ("import nothing_of_that_name", "No module named 'nothing_of_that_name'; is pytest installed in"),
    ("raise lines.Absent('no such bits')", "vllm: no such bits"),
    ("raise ValueError('a shape')", "vllm: ValueError: a shape"),
    ("print('last word', file=sys.stderr); sys.stderr.flush(); os._exit(3)", "vllm ended with code 3: last word"),
])
def test_what_an_engine_cannot_load_is_said_in_one_line(fake: Any, early: str, message: str) -> None:
    engine = fake(early=early)
    with pytest.raises(NotMeasured) as caught:
        engine.prepare()
    engine.close()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_that_ends_early_or_hangs_is_left_out(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake(late="new_tokens -= 1")
    engine.prepare()
    with pytest.raises(NotMeasured, match="gave 3 tokens in place of 4"):
        engine.generate([[1]], 4, None)
    engine.close()
    slow = fake(early="time.sleep(60)")
    monkeypatch.setattr(engines, "_MINUTES", 0.005)
    with pytest.raises(NotMeasured, match="took more than 0 s to prepare"):
        slow.prepare()
    slow.close()


def test_earlier_transformers_find_what_they_know_and_a_folder_stays_as_it_is(folder: str, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    to = lines.older(Path(folder), tmp_path / "older")
    config = json.loads((to / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] and config["torch_dtype"] == config["dtype"]
    assert {path.name for path in to.iterdir()} == set(before)
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before


def test_a_round_measures_an_engine_beside_shoal(fake: Any, folder: str) -> None:
    fake()
    plan = speed.Plan(1, setting=Setting("float32", threads=1), bandwidth_bytes=1 << 20,
                      engines={"vllm": sys.executable}, start=Here)
    grid = Grid(baselines=["vllm"], contexts=(8,), new_tokens=3, prefills=(5,))
    outcome = speed.run(MeasuredModel(model=folder), grid, plan)
    assert {(one.cell.system, one.cell.job.kind) for one in outcome.measured} == {
        (system, kind) for system in ("shoal", "vllm") for kind in ("generate", "prefill")}
    assert all(skipped.system in engines.ENGINES.keys() | {"sglang", "tensorrt-llm"} for skipped in outcome.absent)


class Here:
    """A system in this process, since the fake is known to it alone."""

    pid, alive = 0, True

    def __init__(self, factory: Any, model: MeasuredModel, setting: Setting) -> None:
        self.system = factory(model, setting)

    def call(self, name: str, *args: Any, timeout: float | None = None) -> Any:
        return getattr(self.system, name)(*args) if hasattr(self.system, name) else None

    def stop(self) -> None:
        self.system.close()


@pytest.mark.parametrize(("peer", "message"), [
    ("vllm", "--peer vllm runs in an environment of its own; write vllm=ENV/bin/python"),
    ("vlm=python", "unknown engine 'vlm'. Did you mean 'vllm'"),
    ("vllm=nowhere/python", "there is no interpreter 'nowhere/python'"),
])
def test_a_peer_that_cannot_be_run_is_refused_before_anything_loads(
    capsys: pytest.CaptureFixture[str], peer: str, message: str
) -> None:
    assert main(["bench", "--shape", "135m", "--peer", peer]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_report_s_command_holds_no_folder_of_an_interpreter() -> None:
    assert shown(["bench", "--peer", "vllm=/home/me/env/bin/python"]) == "bench --peer vllm=python"
