"""Facts about a fresh process: what it imports, what it prints where, its exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shoal
from gguf_fixtures import FOLDER
from shoal.cli.entry import COMMANDS


def shoal_process(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shoal", *words], capture_output=True, text=True, input=stdin
    )


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["methods"],
                                   ["plan", "--layers", "32"]])
def test_no_torch_before_it_is_needed(words):
    done = shoal_process(*words)
    assert done.returncode == 0 and done.stdout
    assert not {"torch", "transformers", "numpy"} & imported(done)


def test_help_lists_every_command():
    done = shoal_process("--help")
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_version():
    assert shoal_process("--version").stdout == f"shoal {shoal.__version__}\n"


def test_bad_usage_is_one_line_on_stderr_and_code_2():
    done = subprocess.run([sys.executable, "-m", "shoal", "plan", "--layers", "0"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "shoal plan: error: --layers is 0; it must be >= 1\n"


@pytest.mark.parametrize("file", ["llama-Q4_0.gguf", "gemma3-Q4_K_M.gguf"])
@pytest.mark.quick(1)
def test_a_file_runs_without_the_models_code(file):
    """What transformers needs to define a model takes as long to import as torch."""
    code = (
        "import sys, shoal; engine = shoal.load(sys.argv[1]); print(len(engine.generate([1, 2, 3], max_new_tokens=4, "
        "ignore_eos=True).tokens)); print('transformers.modeling_utils' in sys.modules, type(engine.stack).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER / file)], capture_output=True, text=True)
    tokens, imported = done.stdout.splitlines()
    assert tokens == "4" and imported.startswith("False "), done.stderr
