"""The C code under the compiler's sanitizers: no access beyond what there is, no undefined arithmetic, no race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.model.packed import native
from shoal.model.packed.native import build

HERE = Path(__file__).parent
SOURCES = Path(build.__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.available() or shutil.which("gcc") is None, reason="needs the kernels and gcc"),
]


def runtime(name: str) -> str:
    """The path of a sanitizer's library."""
    words = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("file", "some"), [
    ("test_native.py", ""),
    ("test_native_forward.py", ""),
    ("test_native_chain.py", ""),
    ("test_native_argmax.py", ""),
    ("test_native_long.py", "ragged or half or seven"),
    ("test_native_choice.py", "not again"),
    ("test_native_trees.py", "not many"),
    ("test_native_blocks.py", "1280 or ragged"),
    ("test_experts.py", "rows_and or other_experts or stand_for"),
    ("test_native_encode.py", ""),
    ("test_cross_attention.py", "cut_anywhere or of_their_own or are_those_of"),
    ("test_encoder_decoders.py", "cut_anywhere or of_its_path"),
    ("test_native_recurrent.py", "recurrent_gemma or unit or shows"),
    ("test_recurrent_gemma.py", "of_the_kernels"),
    ("test_sambay_native.py", "of_the_formulas_however or random_schedules and not long"),
])
def test_memory_and_arithmetic(file: str, some: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "sanitized"  # compiled for the first of these tests
    environment = {
        **os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "2",
        "SHOAL_NATIVE_FLAGS": "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1",
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}", "ASAN_OPTIONS": "detect_leaks=0",
    }
    words = [sys.executable, "-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k", some, str(HERE / file)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_piece_of_work_is_done_once(threads: int, tmp_path: Path) -> None:
    program = tmp_path / "team_phases"
    vectors = native.vector_set()
    march = [f"-DSHOAL_{vectors.upper()}", *build._VECTORS[vectors]]
    flags = ["-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-pthread", *march, f"-I{SOURCES}"]
    subprocess.run(["gcc", *flags, "-o", str(program), str(HERE / "team_phases.c"), "-lm"], check=True)
    done = subprocess.run([str(program), str(threads)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "each piece once\n"), done.stdout + done.stderr[-4000:]
