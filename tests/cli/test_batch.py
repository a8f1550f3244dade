"""`shoal batch` as a process that is killed repeatedly, and its options."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batch_files import records, write_lines
from shared_models import REFERENCE, model_path
from shoal.cli import main

LINES = [{"id": f"n{number}", "prompt": "word " * (number % 7 + 1), "max_new_tokens": 5 + number % 11,
          **({"method": "d3", "method_args": {"alpha": 0.9, "core": 2}} if number % 3 else {})} for number in range(40)]


def words(folder: str, source: Path, target: Path) -> list[str]:
    return ["batch", str(source), str(target), "--model", folder, "--dtype", "float64", "--max-rows", "4"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 25])
def test_a_killed_job_neither_loses_nor_repeats_a_line(tiny_folder: str, tmp_path: Path, kills: int) -> None:
    lines = LINES * (1 + kills // 5)
    source, target, plain = write_lines(tmp_path / "in", lines), tmp_path / "out", tmp_path / "plain"
    draw = random.Random(kills)
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-m", "shoal", *words(tiny_folder, source, target)],
                                   stderr=subprocess.DEVNULL)
        had = target.stat().st_size if target.exists() else 0
        until = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < until:
            if target.exists() and target.stat().st_size > had:
                break
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.wait()
    assert 0 < len(target.read_bytes().splitlines()) < len(lines), "the kills came too late"
    assert main(words(tiny_folder, source, target)) == 0
    assert main(words(tiny_folder, source, plain)) == 0
    assert by_line(target) == by_line(plain)
    assert len(records(target)) == len(lines)


def test_a_constraint_holds_for_all_lines_and_belongs_to_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b", "guided_choice": ["x", "yy"]}]
    source, target = write_lines(tmp_path / "in", lines), tmp_path / "out"
    command = [*words(str(model_path(REFERENCE)), source, target), "--max-new-tokens", "9"]
    assert main([*command, "--regex", "[0-9]{3}"]) == 0
    assert re.fullmatch("[0-9]{3}", by_line(target)[1][1]) and by_line(target)[2][1] in ("x", "yy")
    assert main([*command, "--regex", "[0-8]{3}"]) == 2
    assert "constraint" in capsys.readouterr().err


def by_line(path: Path) -> dict[int, tuple[str, str]]:
    return {record["line"]: (record["id"], record["text"]) for record in records(path)}


def test_errors_are_told_and_figures_end_as_json(
    tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "a"}, "nonsense\n", {"prompt": "b", "max_new_tokens": 2}])
    given = [*words(tiny_folder, source, tmp_path / "out"), "--max-new-tokens", "3", "--json"]
    assert main(given) == 1
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    assert (report["lines"], report["written"], report["errors"], report["new_tokens"]) == (3, 3, 1, 5)
    assert report["mean_layers"] == 6
    assert "1 in error" in err
    assert main(given) == 1
    assert "all 3 lines were done before" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "said"), [(["--method", "d3", "--alpha", "0.9"], "option method"),
                                            (["--quant", "int8"], "model quant"), (["--seed", "1"], "option seed")])
def test_other_settings_are_another_job(
    tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    source = write_lines(tmp_path / "in", ["nonsense\n"])
    assert main(words(tiny_folder, source, tmp_path / "out")) == 1
    assert main([*words(tiny_folder, source, tmp_path / "out"), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_method_that_cannot_run_is_no_matter_of_lines(
    tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "a"}])
    given = [*words(tiny_folder, source, tmp_path / "out"), "--method", "early_exit", "--exit-layer", "60"]
    assert main(given) == 2
    assert "60" in capsys.readouterr().err
