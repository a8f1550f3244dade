"""The kernels under valgrind: nothing decides that was never written, and no access goes beyond what there is."""

from __future__ import annotations

import shutil

import pytest

import emulated
from shoal.model.packed import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.available() or native.vector_set() == "neon", reason="needs the kernels for x86-64"),
]
VALGRIND = ["valgrind", "--quiet", "--exit-on-first-error=yes", "--error-exitcode=1",
            "--vex-guest-max-insns=25", "--vex-guest-chase=no"]
"""The last two because unrolled loops are longer than what valgrind translates at once."""


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """For vectors of AVX2; valgrind knows none of AVX-512."""
    missing = [name for name in ("gcc", "valgrind") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"there is no {missing[0]} here; install it", pytrace=False)
    return [*VALGRIND, *emulated.built(tmp_path_factory.mktemp("valgrind"), "gcc", "avx2", "-g")]


@pytest.mark.parametrize(("file", "some"), [
    ("test_native.py", emulated.WITHOUT_LOADING),
    ("test_native_blocks.py", ""),
    ("test_native_forward.py", "not number_of_threads"),
    ("test_native_chain.py", "plain and not number"),
    ("test_native_argmax.py", "most or equals"),
])
def test_what_is_read_was_written(file: str, some: str, command: list[str]) -> None:
    emulated.passes(file, some, command)
