"""How the tile units are shaped belongs to a thread, not to a library: ours leaves them as it found them."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from native_reference import Case, Token, as_batch, make_reference, storage
from shoal.model.packed import native

pytestmark = [
    pytest.mark.skipif(not native.available() or native.vector_set() != "amx", reason="no tile units here"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

SHAPE = struct.pack("<B15x16H16B", 1, 64, 32, 16, *[0] * 13, 16, 8, 4, *[0] * 13)
"""Of three registers, as nothing of ours shapes them."""
CODE = """
void shape(const char *s) { __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])s)); }
void read_shape(char *s) { __asm__ volatile("sttilecfg %0" : "=m"(*(char(*)[64])s)); }
void release(void) { __asm__ volatile("tilerelease"); }
"""


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("units")
    (folder / "units.c").write_text(CODE)
    path: Path = folder / "units.so"
    words = ["gcc", "-shared", "-fPIC", "-O1", "-mamx-tile", str(folder / "units.c"), "-o", str(path)]
    subprocess.run(words, check=True)
    return ctypes.CDLL(str(path))


def product() -> None:
    native.matmul(torch.randn(16, 128), native.pack(torch.randn(64, 128), "int8"))


def forward() -> None:
    case = Case(kv_dtype=torch.bfloat16)
    slow = make_reference(case)
    keys, values = storage(case, 1, 48)
    tokens = [Token(n, n, 0, n, tuple(range(n + 1))) for n in range(8)]
    active = {layer: [native.ATTENTION | native.MLP] * len(tokens) for layer in range(case.layers)}
    starts = {layer: {0: 0} for layer in range(case.layers)}
    slow.native.forward(as_batch(tokens, {0: 0}, active, starts), slow.native.bind(keys, values), threads=1)


@pytest.mark.parametrize("run", [product, forward])
@pytest.mark.parametrize("shape", [SHAPE, bytes(64)], ids=["shaped", "at rest"])
def test_tile_units_are_left_as_they_were_found(units: ctypes.CDLL, run: Callable[[], None], shape: bytes) -> None:
    found = ctypes.create_string_buffer(64)
    run()  # the library asks for the units
    units.shape(shape) if any(shape) else units.release()
    try:
        run()
        units.read_shape(found)
    finally:
        units.release()
    assert found.raw == shape
