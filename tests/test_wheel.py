"""A wheel is small and brings its kernels along, so that no compiler is needed; without one it holds the sources."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 5 * 2**20
STUDIES = ("eval", "train", "bench", "calibrate", "reference", "problems", "prune")
"""Folders and files of which the core's wheel holds none."""
pytestmark = pytest.mark.slow

DECODE = """
import torch
from shoal.model.packed import native
from shoal.model.packed.native import build, library
assert native.available(), native.why_not()
path = build.prebuilt(native.vector_set())
assert str(path.parent).startswith({folder!r}), path
weight, x = torch.randn(48, 96), torch.randn(3, 96)
torch.testing.assert_close(native.matmul(x, native.pack(weight, "fp32")), x @ weight.T)
"""


def built(target: Path, **environment: str) -> Path:
    """The wheel of this source tree."""
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
    return wheel


def run(code: str, folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Python with the wheel's content, an empty cache and no compiler."""
    environment = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(cache), "PATH": "/nowhere", "HOME": str(cache)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_a_wheel_decodes_without_a_compiler(tmp_path: Path) -> None:
    wheel = built(tmp_path / "wheel")
    assert wheel.stat().st_size <= MOST_BYTES
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if {*STUDIES} & {part.partition(".")[0] for part in name.split("/")}]
    zipfile.ZipFile(wheel).extractall(tmp_path / "content")
    done = run(DECODE.format(folder=str(tmp_path / "content")), tmp_path / "content", tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("libshoal*"))
    for library in (tmp_path / "content").rglob("libshoal-*.so"):
        library.write_bytes(b"of another machine")
    reason = "from shoal.model.packed import native; print(native.why_not())"
    done = run(reason, tmp_path / "content", tmp_path / "cache")
    assert "no C compiler" in done.stdout, done.stderr


@pytest.mark.parametrize("environment", [{"SHOAL_PREBUILT": "0"}, {"PATH": "/nowhere"}])
def test_a_wheel_without_kernels_is_for_any_machine(environment: dict[str, str], tmp_path: Path) -> None:
    wheel = built(tmp_path, **environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("native/forward.c") for name in names)
    assert not any(name.endswith(".so") for name in names)
