"""Packing from files needs little more memory than what it packs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import load_peak
from shoal.model.packed import native

HIDDEN, FFN, LAYERS, VOCAB = 1024, 4096, 8, 4000
PARAMETERS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN
"""Of a layer: 34 MB in bf16; the whole model takes 280 MB."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small and a large model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    small = load_peak.write(folder / "small", 64, 96, 2, 128)
    return small, load_peak.write(folder / "large", HIDDEN, FFN, LAYERS, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize(
    ("dtype", "quant"),
    [
        ("bfloat16", "int4"),
        pytest.param("bfloat16", "int8", marks=pytest.mark.slow),
        pytest.param("bfloat16", "none", marks=pytest.mark.slow),
        pytest.param("float32", "int4", marks=pytest.mark.slow),
        pytest.param("float32", "int8", marks=pytest.mark.slow),
        pytest.param("float32", "none", marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_little_more_than_the_result(
    checkpoints: tuple[Path, Path], dtype: str, quant: str, executor: str
) -> None:
    if executor == "native" and not native.available():
        pytest.skip(f"the native kernels do not run here: {native.why_not()}")
    command = [sys.executable, load_peak.__file__, *map(str, checkpoints), dtype, quant, executor]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == load_peak.UNKNOWN:
        pytest.skip("this system does not restart the count of a process's peak")
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert sizes["stack"] == ("PackedRunner" if executor == "torch" else "NativeRunner")
    layer = PARAMETERS * (4 if dtype == "float32" else 2)
    assert sizes["packed"] > LAYERS * PARAMETERS / 2
    assert sizes["peak"] < 1.3 * sizes["packed"] + layer
    assert sizes["after"] < 1.2 * sizes["packed"] + 0.5 * layer
