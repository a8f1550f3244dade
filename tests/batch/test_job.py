"""Whatever a kill leaves behind, the job ends with every line once; and no other job's file is touched."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_files import SETTINGS, echo, records, write_lines
from shoal.batch import job
from shoal.batch.journal import Journal
from turns import by_turns

WORDS = ["Ähre", "b", "\u2028", "d" * 50, "", "f", "\U0001f41f", "h", "i"]
WHOLE = {number: word for number, word in enumerate(WORDS, start=1)}


def made(folder: Path) -> tuple[Path, Path]:
    return write_lines(folder / "in.jsonl", ({"prompt": word} for word in WORDS)), folder / "out.jsonl"


def run(source: Path, target: Path, settings: Any = SETTINGS) -> job.Report:
    return job.run(source, target, settings, lambda: echo)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def said(path: Path) -> dict[int, str]:
    """What each line got; every line is in the file once at most."""
    found = records_of(path)
    assert len({record["line"] for record in found}) == len(found)
    return {record["line"]: record["text"] for record in found}


def records_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in lines_of(path)]


@given(cut=st.integers(0, 10_000), again=st.integers(0, 10_000))
@settings(max_examples=60)
def test_a_file_that_was_cut_anywhere_is_completed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, again: int
) -> None:
    source, target = made(tmp_path_factory.mktemp("job"))
    with mock.patch("os.fsync"):  # a disk is slow, and nothing is killed here
        cut_and_complete(source, target, cut, again)


def cut_and_complete(source: Path, target: Path, cut: int, again: int) -> None:
    run(source, target)
    for where in (cut, again):
        kept = target.read_bytes()[: where % (target.stat().st_size + 1)]
        target.write_bytes(kept)
        report = run(source, target)
        whole = kept[: kept.rfind(b"\n") + 1]
        assert target.read_bytes().startswith(whole), "what was written before has changed"
        assert report.before == whole.count(b"\n")
        assert report.before + report.written == report.lines == len(WORDS)
        assert said(target) == WHOLE


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@by_turns("seed", range(2))
def test_a_job_that_is_killed_while_it_writes_is_completed(tmp_path: Path, seed: int) -> None:
    source, target = made(tmp_path)
    draw, kills, codes = random.Random(seed), 0, []
    while not codes or codes[-1]:
        words = [sys.executable, str(Path(__file__).parents[1] / "batch_files.py"), source, target]
        codes.append(subprocess.run([*words, str(draw.randint(1, 400))], env=os.environ, timeout=60).returncode)
        assert codes[-1] in (0, -signal.SIGKILL)
        kills += codes[-1] != 0
        assert len(codes) < 60
    assert kills >= 1
    assert said(target) == WHOLE


def test_a_kill_before_the_first_line(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    target.touch()
    run(source, target)
    target.unlink()  # the note of the job is written before the first record
    assert run(source, target).written == len(WORDS)
    (tmp_path / "out.jsonl.job.part").write_text('{"opt')
    assert run(source, target).written == 0


def test_a_finished_job_asks_nobody(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    run(source, target)
    before = target.read_bytes()
    report = job.run(source, target, SETTINGS, lambda: pytest.fail("somebody was asked"))
    assert (report.before, report.written) == (len(WORDS), 0)
    assert target.read_bytes() == before


def refused(source: Path, target: Path, settings: Any = SETTINGS) -> str:
    before = target.read_bytes()
    with pytest.raises(ValueError) as caught:
        run(source, target, settings)
    assert target.read_bytes() == before, "a file that was refused has changed"
    return str(caught.value)


def test_a_file_of_another_job_is_left_alone(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    run(source, target)
    assert "option seed was 3 and now is 4" in refused(source, target, {"option": {"method": "full", "seed": 4}})
    assert "option more was None" in refused(source, target, {"option": {**SETTINGS["option"], "more": 1}})
    write_lines(source, [{"prompt": "other"}])
    assert "input hash was" in refused(source, target)


def test_a_file_of_no_job_is_left_alone(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    target.write_text("a letter\n")
    assert "no job has written" in refused(source, target)
    assert "is the input" in refused(source, source)
    target.unlink()
    run(source, target)
    (tmp_path / "out.jsonl.job").write_text("[]")
    assert "does not say" in refused(source, target)
    with pytest.raises(ValueError, match="no regular file"):
        run(source, tmp_path)
    with pytest.raises(ValueError, match="cannot write"):
        run(source, tmp_path / "none" / "out.jsonl")


@pytest.mark.parametrize(
    ("line", "why"), [(b"{}\n", "no record"), (b"\0\0\n", "no record"), (b'{"line": 99}\n', "none of the input's"),
                      (b'{"line": 2}\n', "twice"), (b'{"line": true}\n', "answers line True")]
)
def test_a_damaged_file_is_left_alone(tmp_path: Path, line: bytes, why: str) -> None:
    source, target = made(tmp_path)
    run(source, target)
    first, second, *rest = lines_of(target)
    assert b'"line": 2' in first
    target.write_bytes(b"\n".join([first, second, line[:-1], *rest[1:], b""]))
    assert why in refused(source, target)


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    source, target = made(tmp_path)
    with Journal(target, SETTINGS, 9), pytest.raises(ValueError, match="another process"):
        run(source, target)


def test_an_answer_that_comes_twice_is_written_once(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    report = job.run(source, target, SETTINGS, lambda: lambda lines: (one for one in echo(lines) for _ in range(2)))
    assert report.written == len(WORDS)
    assert said(target) == WHOLE


def test_errors_are_counted_over_all_runs(tmp_path: Path) -> None:
    source, target = made(tmp_path)

    def answer(lines: Any) -> Any:
        for line in lines:
            yield {"line": line.number, "error": "no"}
            if line.number == 4:
                return

    assert job.run(source, target, SETTINGS, lambda: answer).errors == 4
    assert run(source, target).errors == 4
    assert len(records(target)) == len(WORDS)
