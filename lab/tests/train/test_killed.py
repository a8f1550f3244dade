"""Training in a process that is killed at any moment, or whose disk is full: nothing is lost or half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal_lab.train.loop import CHECKPOINT

TESTS = Path(__file__).resolve().parents[1]
RUN = """
import resource, sys
from pathlib import Path
from shoal_lab.train.eagle import EagleModule
from shoal_lab.train.export import export
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base
from tiny_corpus import made
from trained_parts import target

folder, most = Path(sys.argv[1]), int(sys.argv[2])
corpus = made(folder / "answers")
folder.joinpath("answers-made").touch()
module = EagleModule.fresh(Base(target("llama").runner), corpus, corpus.frequent(60), None, 0)
trainer = Trainer(module, corpus, Training(epochs=12, batch=256, half=False), folder)
if most:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
trainer.train(every=20, keep=0.0)
export(folder, target("llama"), module, "float32")
"""


def begun(folder: Path, most: int = 0) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(TESTS), str(TESTS.parents[1] / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", RUN, str(folder), str(most)], text=True,
                            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})


def ended(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate(timeout=300)
    return err


@pytest.mark.slow
def test_killed_anywhere_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = begun(tmp_path / "whole")
    assert ended(whole) == "" and whole.returncode == 0
    killed = tmp_path / "killed"
    marks = [killed / "answers" / "states-00000.safetensors", killed / "answers-made", killed / CHECKPOINT]
    for mark in marks:
        process = begun(killed)
        until = time.monotonic() + 200
        while not mark.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        ended(process)
        assert mark.exists()
    assert begun_steps(killed) < begun_steps(tmp_path / "whole")
    assert ended(begun(killed)) == ""
    for name, tensor in load_file(tmp_path / "whole" / "part.safetensors").items():
        assert torch.equal(load_file(killed / "part.safetensors")[name], tensor), name


@pytest.mark.slow
def test_a_disk_that_takes_no_more_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    assert ended(begun(tmp_path)) == ""
    checkpoint = (tmp_path / CHECKPOINT).read_bytes()
    for most in (1000, len(checkpoint) // 2, len(checkpoint) - 1):
        process = begun(tmp_path, most)
        assert "cannot be written" in ended(process) and process.returncode == 1
        assert (tmp_path / CHECKPOINT).read_bytes() == checkpoint
        assert not list(tmp_path.glob("*.part"))


def begun_steps(folder: Path) -> int:
    steps: int = torch.load(folder / CHECKPOINT, weights_only=True)["run"]["step"]
    return steps
