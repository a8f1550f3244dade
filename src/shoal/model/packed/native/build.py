"""Compiling the C sources of this folder, once per machine, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_BASE = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fopenmp")
_VECTOR = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mtune=native")
_UNITS = {"cpu.c": (), "check.c": (), "pack.c": _VECTOR, "forward.c": _VECTOR}
_TIMEOUT = 300
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[.\d]*$")


class BuildError(Exception):
    """Why there is no library."""


def build() -> Path:
    """The compiled library; it is made if the cache does not hold it.

    Raises:
        BuildError: no compiler, another processor family, or the compiler failed.
    """
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"the kernels are for Linux on x86-64, not {platform.system()} on {platform.machine()}")
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise BuildError("no C compiler (gcc, cc or clang) is on the PATH")
    runtime = openmp_runtime()
    target = cache_folder() / _fingerprint(compiler, runtime) / "libshoal.so"
    if not target.exists():
        _compile(compiler, runtime, target)
    return target


def cache_folder() -> Path:
    """Where libraries are kept: `shoal` in XDG_CACHE_HOME, by default in ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "shoal" / "native"


def openmp_runtime() -> str | None:
    """The OpenMP library that torch runs on, by its path in this process.

    Linked by path, ours resolves to the same one: two runtimes would be two pools of threads that spin against
    each other.
    """
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)}
    return min(paths, default=None)


def _sources() -> list[Path]:
    return sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])


def _fingerprint(compiler: str, runtime: str | None) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [version, str(runtime), repr((_BASE, _UNITS)), _processor()]
    parts += [path.name + path.read_text() for path in _sources()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """The processor's name: the code is tuned for it, and a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "model\t", "cpu family"))))


def _compile(compiler: str, runtime: str | None, target: Path) -> None:
    """Into a folder of its own, then renamed: a reader sees all of the library or none of it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            folder = Path(name)
            with ThreadPoolExecutor() as pool:
                objects = list(pool.map(lambda unit: _object(compiler, unit, folder), _UNITS))
            library = folder / target.name
            openmp = [runtime] if runtime else ["-fopenmp"]
            _run([compiler, "-shared", "-Wl,--no-undefined", "-o", str(library), *objects, *openmp, "-lm"])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(f"the library cannot be written below {cache_folder()}: {error}") from error


def _object(compiler: str, unit: str, folder: Path) -> str:
    output = str(folder / f"{unit}.o")
    _run([compiler, *_BASE, *_UNITS[unit], "-c", str(_HERE / unit), "-o", output])
    return output


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler took more than {_TIMEOUT} seconds") from error
    if done.returncode:
        raise BuildError(f"`{' '.join(command[:1])}` failed: {done.stderr.strip()[-1000:]}")
