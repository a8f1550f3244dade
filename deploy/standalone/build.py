#!/usr/bin/env python3
"""Pack Shoal, its Python and its libraries into one file for Linux on x86-64; `make standalone` runs this.

    python deploy/standalone/build.py --build build/standalone --dist dist

It runs in the environment that is packed, where PyInstaller is too. The file is a shell script, stub.sh, and below it a
compressed folder, which the script unpacks once: PyInstaller's own single file would do so at every start.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNUSED = ("libcudart*", "torch/bin/*", "torch/include", "torch/lib/*_test.so", "torch/share", "torch/test")
"""What torch brings to compile against it and to test it, all but `USED`, and asks for where there is CUDA."""
USED = "torch_shm_manager"
SYMBOLS = ("libpython*.so*", "torch/lib/libtorch_cpu.so")
"""Libraries with tables for debuggers."""
PACKERS = ("altgraph", "pip", "pyinstaller", "pyinstaller-hooks-contrib", "setuptools")
"""Distributions that pack and are not packed."""
SCRIPT_BYTES = 4096
"""Of the file, before the folder; the script is padded to them."""
_GLIBC = re.compile(rb"\0GLIBC_2\.(\d+)")
_LICENCE = re.compile(r"licen[cs]e|copying|notice", re.I)


def main(argv: Sequence[str] | None = None) -> int:
    """Pack, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="a folder for what lies between")
    parser.add_argument("--dist", type=Path, required=True, help="the folder of the file")
    args = parser.parse_args(argv)
    check()
    folder = packed(args.build)
    before = size(folder)
    leave_out(folder / "_internal")
    (folder / "NOTICES.txt").write_text("\n".join([*notices(), *libraries(folder / "_internal")]), "utf-8")
    after = size(folder)
    target = one_file(folder, args.dist / f"shoal-{version('shoal')}-linux-x86_64", version("shoal"))
    print(f"{target}: {target.stat().st_size / 1e6:.0f} MB, unpacked {after / 1e6:.0f} MB of "
          f"{before / 1e6:.0f} that PyInstaller found")
    return 0


def check() -> None:
    """SystemExit where the file would be of no use."""
    import torch

    from shoal.model.packed.native import build

    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit(f"the file is for Linux on x86_64, not {sys.platform} on {platform.machine()}")
    if torch.version.cuda:
        raise SystemExit("torch came with CUDA: name its builds for CPUs by PIP_EXTRA_INDEX_URL")
    if build.prebuilt("avx2") is None:
        raise SystemExit("the installed Shoal has no compiled kernels: install gcc, and Shoal again")


def packed(build: Path) -> Path:
    """The folder that PyInstaller makes."""
    words = ["--noconfirm", "--log-level", "ERROR", "--distpath", str(build), "--workpath", str(build / "work")]
    subprocess.run([sys.executable, "-m", "PyInstaller", *words, str(HERE / "shoal.spec")], check=True)
    return build / "shoal"


def leave_out(libraries: Path) -> None:
    """Remove what no start needs."""
    for path in (path for pattern in UNUSED for path in libraries.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != USED:
            path.unlink()
    for path in (path for pattern in SYMBOLS for path in libraries.glob(pattern)):
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def notices() -> Iterator[str]:
    """The licence of each packed distribution and of Python."""
    yield "This file holds the following software, each part under its own licence.\n"
    for one in sorted(distributions(), key=lambda one: one.metadata["Name"].lower()):
        if one.metadata["Name"] not in PACKERS:
            yield from notice(one)
    yield f"== Python {platform.python_version()}\n"
    yield (Path(sysconfig.get_path("stdlib")) / "LICENSE.txt").read_text("utf-8")


def notice(one: Distribution) -> Iterator[str]:
    """A distribution's name, version and licence, and the texts that it brings, those of libraries in it too."""
    said = one.metadata.get("License-Expression") or (one.metadata.get("License") or "").partition("\n")[0]
    classified = [line.rpartition(" :: ")[2] for line in one.metadata.get_all("Classifier") or []
                  if line.startswith("License ::")]
    yield f"== {one.metadata['Name']} {one.version}: {said or ', '.join(classified) or 'as below'}\n"
    for file in one.files or ():
        if ".dist-info" in file.parts[0] and _LICENCE.search(file.name) and file.suffix not in (".py", ".pyc"):
            yield Path(str(file.locate())).read_text("utf-8", errors="replace")


def libraries(folder: Path) -> Iterator[str]:
    """The libraries that wheels bring in folders of their own, and those of this system with Debian's word on them."""
    for path in sorted(folder.glob("*.libs")):
        yield f"== Libraries in {path.name}: {', '.join(sorted(file.name for file in path.iterdir()))}\n"
    yield "FFmpeg's libraries (libav*, libsw*) are under the LGPL, version 3, and libx264 and libx265 under the GPL.\n"
    for file in sorted(file for file in folder.glob("lib*.so*") if not file.is_symlink()):
        yield f"== {file.name}, of the system that packed this file\n"
        yield copyright_of(file.name)


def copyright_of(library: str) -> str:
    """What a system of Debian's kind says of a library's licence; empty on others."""
    if shutil.which("dpkg") is None:
        return ""
    owner = subprocess.run(["dpkg", "-S", f"*/{library}"], capture_output=True, text=True).stdout.partition(":")[0]
    place = Path("/usr/share/doc") / owner / "copyright"
    return place.read_text("utf-8", errors="replace") if owner and place.is_file() else ""


def one_file(folder: Path, target: Path, release: str) -> Path:
    """The script with the folder below it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    content, part = target.with_suffix(".content"), target.with_suffix(".part")
    archive(folder, content)
    name = f"{release}-{hashlib.sha256(content.read_bytes()).hexdigest()[:16]}"
    script = stub(name=name, bytes=SCRIPT_BYTES + content.stat().st_size, offset=SCRIPT_BYTES + 1,
                  megabytes=size(folder) // 10**6, glibc=newest_glibc(folder))
    with part.open("wb") as out, content.open("rb") as file:
        out.write(script)
        shutil.copyfileobj(file, out)
    content.unlink()
    part.chmod(0o755)
    return part.replace(target)


def archive(folder: Path, target: Path) -> None:
    """Write the folder as a compressed tar; the same folder gives the same bytes.

    Every Linux has gzip; what packs closer needs packages that small systems lack.
    """
    with target.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as stream, \
            tarfile.open(fileobj=stream, mode="w|") as tar:
        tar.add(folder, ".", filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def stub(**values: object) -> bytes:
    """The script with its values, padded to `SCRIPT_BYTES`."""
    text = (HERE / "stub.sh").read_text("utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name.upper()}@", str(value))
    script = text.encode()
    if len(script) > SCRIPT_BYTES:
        raise SystemExit(f"stub.sh has {len(script)} bytes; SCRIPT_BYTES is {SCRIPT_BYTES}")
    return script.ljust(SCRIPT_BYTES, b"\n")


def newest_glibc(folder: Path) -> int:
    """The 36 of the newest GLIBC_2.36 that a library in the folder asks for."""
    files = (path.read_bytes() for path in folder.rglob("*.so*") if path.is_file() and not path.is_symlink())
    return max((int(found) for content in files for found in _GLIBC.findall(content)), default=0)


def size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    sys.exit(main())
