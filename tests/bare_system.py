"""A system that has a shell, what unpacks an archive and the C library: no Python, no compiler, no files of a user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PROGRAMS = ("sh", "cut", "df", "find", "getconf", "gzip", "head", "id", "mkdir", "mktemp", "mv", "rm", "sync", "tail",
            "tar", "uname", "wc")
LIBRARIES = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libz.so.1")
"""Of glibc, and zlib, which PyInstaller's start needs; the others are those that the programs need."""
_USED = re.compile(r"(/\S+) \(0x")
_ENTER = """
root=$1; shift
mount --rbind /proc "$root/proc" && mount --rbind /dev "$root/dev" || exit 125
for path in $BOUND; do mount --bind "$path" "$root$path" || exit 125; done
exec env -i HOME=/home/user PATH=/bin "$(PATH=$PATH:/usr/sbin:/sbin command -v chroot)" "$root" "$@"
"""


def enterable() -> bool:
    """Whether this user may make a system of its own folders."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


def made(root: Path, bound: Iterable[Path]) -> Path:
    """Fill a folder with the system, and with a place for each file or folder that is to be seen in it."""
    for name in ("bin", "dev", "home/user", "lib64", "proc", "tmp"):
        (root / name).mkdir(parents=True)
    for program in PROGRAMS:
        path = shutil.which(program)
        assert path is not None, program
        shutil.copy(path, root / "bin" / program)
        told = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        _copied(root, map(Path, _USED.findall(told)))
    _copied(root, (place.parent / name for place in _places(root) for name in LIBRARIES))
    for path in bound:
        place = root / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir() if path.is_dir() else place.touch()
    return root


def _places(root: Path) -> list[Path]:
    """Where this system has its C library, as the copies tell."""
    return [Path("/") / path.relative_to(root) for path in root.rglob("libc.so.6")]


def _copied(root: Path, files: Iterable[Path]) -> None:
    for file in filter(Path.exists, files):
        place = root / file.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)


def entering(root: Path, words: Sequence[str], bound: Iterable[Path]) -> tuple[list[str], Mapping[str, str]]:
    """The command that runs words there, and its environment."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _ENTER, "sh", str(root), *words]
    return command, {"PATH": os.environ["PATH"], "BOUND": " ".join(map(str, bound))}
