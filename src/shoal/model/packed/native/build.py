"""Compiles the C sources of this folder: for wheels, or once per machine into the user's cache folder.

A build hook loads this file alone, so its top level imports nothing but the standard library. Run as a script, with
Shoal's source folder on PYTHONPATH, it compiles for this processor while packages are still being installed.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_HERE = Path(__file__).parent
_BASE = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fopenmp", "-fno-asynchronous-unwind-tables",
         "-fno-ident", "-fno-ipa-cp-clone", "-falign-functions=1", "-falign-jumps=1", "-falign-labels=1")
"""C has no exceptions: without tables for unwinding a wheel is 20 KB smaller, and by the flags after that 35 KB."""
_AVX512 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi2", "-mavx512vnni")
_VECTORS = {
    # The last one makes a wheel 23 KB smaller. With AMX it was not measured; on AVX-512, whose library goes without,
    # as much costs up to 2 % of a small model's step (lab/reports/checkouts-flags-vectorised.json).
    "amx": (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-fvect-cost-model=very-cheap"),
    "avx512": _AVX512,
    "avx2": ("-march=x86-64-v3",),
    # Scheduling before register allocation spills sums. Fused operations must not depend on the number of tokens.
    "neon": ("-march=armv8.2-a+dotprod", "-fno-schedule-insns", "-ffp-contract=off"),
}
_MACHINES = {"x86_64": ("amx", "avx512", "avx2"), "aarch64": ("neon",)}
"""Vector sets of a processor family, the widest first."""
_AVX512_FEATURES = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512_vbmi2"}
_NEEDED = {"amx": {*_AVX512_FEATURES, "amx_tile", "amx_int8", "amx_bf16"}, "avx512": _AVX512_FEATURES,
           "avx2": set[str](), "neon": {"asimd", "asimddp"}}
"""Features that a vector set needs, by the names of the Linux kernel; the library asks the processor again."""
_UNITS = {"tiles_four.c": True, "tiles_five.c": True, "tiles_six.c": True, "tiles_byte.c": True, "tiles_three.c": True,
          "tiles_table.c": True, "tiles_float.c": True, "tiles_amx.c": True, "pack.c": True, "forward.c": True,
          "recur.c": True, "cpu.c": False, "check.c": False}
"""C files, and whether they are compiled for a vector set; the others run on any processor of the family."""
_SHORT = {
    **dict.fromkeys(("recur.c", "tiles_five.c", "tiles_four.c", "tiles_table.c", "tiles_three.c"), ("-O2",)),
    "check.c": ("-Os",), "pack.c": ("-O2", "-falign-loops=1", "-fno-tree-ch"),
    "forward.c": tuple(f"-fno-{what}" for what in (
        "gcse-after-reload", "split-loops", "split-paths", "tree-loop-distribution", "tree-partial-pre",
        "unswitch-loops", "version-loops-for-strides")),
}
"""Further flags, by which a wheel is 70 KB smaller. pack.c works while a model loads; with Q4_1 and Q4_K_M files on
AVX-512, which alone were compared, the others are as fast (lab/reports/checkouts-flags*.json)."""
_TIMEOUT = 300
PREBUILT = "prebuilt"
"""The folder beside this file in which wheels have libraries."""
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[.\d]*$")
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """Why there is no library."""


def build(vectors: str, linking: Sequence[str] = ()) -> Path:
    """The library for a vector set, compiled if it is not cached; BuildError if there is no compiler, or it failed.

    A line on stderr says that it is compiled, as the start waits for it. If the cache cannot be written, it is compiled
    for this process alone, at every start. Without options for `linking`, whoever loads it has an OpenMP library.
    """
    compiler = _compiler()
    kept = cache_folder() / _fingerprint(compiler, linking, vectors) / "libshoal.so"
    if os.path.isfile(kept):
        return kept
    target = _writable(kept.parent) / kept.name
    print(f"compiling the kernels for this processor ({vectors}): about half a minute on two cores", file=sys.stderr,
          flush=True)
    _compile(compiler, vectors, "native", linking, target)
    return target


def build_ahead(folder: Path) -> list[Path]:
    """Compile a library for each vector set of this processor family.

    They are linked to no OpenMP library, since a process that loads them has torch's already.

    Raises:
        BuildError: there is no compiler, it failed, or there are no kernels for this family.
    """
    compiler = _compiler()
    targets = {vectors: folder / f"libshoal-{vectors}.so" for vectors in _family()}
    for vectors, target in targets.items():
        _compile(compiler, vectors, "generic", ["-Wl,--strip-all"], target)
    return list(targets.values())


def prebuilt(vectors: str) -> Path | None:
    """The library for a vector set that came in a wheel, or None."""
    path = _HERE / PREBUILT / f"libshoal-{vectors}.so"
    return path if path.is_file() else None


def _family() -> tuple[str, ...]:
    """Vector sets of the kernels for this kind of machine."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in _MACHINES:
        raise BuildError(f"the kernels are for Linux on {' and '.join(_MACHINES)}, not {system} on {machine}")
    return _MACHINES[machine]


def _compiler() -> str:
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise BuildError("no C compiler (gcc, cc or clang) is on the PATH")
    return compiler


def vector_sets() -> list[str]:
    """The vector sets that this processor has, the best first; SHOAL_NATIVE in the environment chooses one.

    They are "amx" (AVX-512 and the tile units), "avx512", "avx2" and "neon".

    Raises:
        BuildError: the variable names something else, the processor has none, or there are no kernels for its family.
    """
    family, features, chosen = _family(), _features(), os.environ.get("SHOAL_NATIVE")
    if chosen and chosen not in family:
        raise BuildError(f"SHOAL_NATIVE is {chosen!r}; it must be {' or '.join(family)}, or not be set")
    fitting = [chosen] if chosen else [vectors for vectors in family if features >= _NEEDED[vectors]]
    if not fitting:
        raise BuildError(f"the processor lacks {' and '.join(sorted(_NEEDED[family[-1]] - features))}")
    return fitting


def _features() -> set[str]:
    """Features of the processor, by the names of the Linux kernel; empty if it does not say."""
    return next((set(line.split()) for line in _cpuinfo() if line.startswith(("flags", "Features"))), set())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def cache_folder() -> Path:
    """Where libraries are cached: `native` in the user's cache folder."""
    from shoal import user_cache

    return user_cache.cache_folder() / "native"


def _writable(folder: Path) -> Path:
    """The folder, created; if it cannot be written, a temporary one that is removed when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            return folder
    except OSError:
        own = tempfile.mkdtemp(prefix="shoal-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        _log.warning("the kernels are compiled for this process alone, since nothing can be kept in a cache folder: "
                     "point XDG_CACHE_HOME at a folder that this user may write to")
        return Path(own)


def openmp_runtime() -> str | None:
    """The path of the OpenMP library that torch uses in this process; two would have two pools of spinning threads."""
    import torch

    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)}
    return min(paths, default=None)


def layout_version() -> str:
    """A hash that changes whenever the layout of matrices may have changed."""
    parts = [(_HERE / name).read_bytes() for name in ("shoal.h", "layout.h", "lookup.h", "blocks.h", "pack.c")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _fingerprint(compiler: str, linking: Sequence[str], vectors: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = repr((_BASE, _more_flags(), _UNITS, _SHORT, _VECTORS[vectors]))
    parts = [version, *linking, vectors, flags, _processor()]
    parts += [path.name + path.read_text() for path in sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """The processor's name; code is tuned for it, and machines may share a cache folder."""
    telling = ("model name", "model\t", "cpu family", "CPU implementer", "CPU part")
    return "".join(dict.fromkeys(line for line in _cpuinfo() if line.startswith(telling))) or platform.processor()


def _compile(compiler: str, vectors: str, tune: str, linking: Sequence[str], target: Path) -> None:
    """Compile in a temporary folder, then rename, so that readers never see a partial library."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            folder = Path(name)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                begun = {unit: pool.submit(_object, compiler, unit, vectors, tune, folder)
                         for unit in sorted(_UNITS, key="forward.c".__ne__)}  # it takes nearly half of all the time
            objects = [begun[unit].result() for unit in _UNITS]
            library = folder / target.name
            _run([compiler, "-shared", *_more_flags(), "-o", str(library), *objects, *linking, "-lm"])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(f"the library cannot be written below {target.parents[1]}: {error}") from error


def _object(compiler: str, unit: str, vectors: str, tune: str, folder: Path) -> str:
    output = str(folder / f"{unit}.o")
    options = [f"-DSHOAL_{vectors.upper()}", *((*_VECTORS[vectors], f"-mtune={tune}") if _UNITS[unit] else ())]
    _run([compiler, *_BASE, *_SHORT.get(unit, ()), *_more_flags(), *options, "-c", str(_HERE / unit), "-o", output])
    return output


def _more_flags() -> list[str]:
    """More compiler flags, from SHOAL_NATIVE_FLAGS, for sanitizers and the like."""
    return os.environ.get("SHOAL_NATIVE_FLAGS", "").split()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler took more than {_TIMEOUT} seconds") from error
    if done.returncode:
        raise BuildError(f"`{' '.join(command[:1])}` failed: {done.stderr.strip()[-1000:]}")


if __name__ == "__main__":
    with suppress(BuildError):  # the first load says why
        build(vector_sets()[0])
