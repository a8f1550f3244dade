"""The one file that needs no Python: how it unpacks itself, around a small program, and how that starts helpers."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from documents import ROOT
from serving import wait

sys.path.insert(0, str(ROOT / "deploy" / "standalone"))
try:
    import build as packing
finally:
    sys.path.pop(0)

ENTRY = ROOT / "deploy" / "standalone" / "entry.py"
SAYS = '#!/bin/sh\necho "$0" "$@"\nexit 7\n'
needs_x86 = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="it is for x86-64")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file whose program says how it was called, and ends with 7."""
    folder = tmp_path / "folder"
    (folder / "_internal").mkdir(parents=True)
    (folder / "shoal").write_text(SAYS, "ascii")
    (folder / "shoal").chmod(0o755)
    (folder / "_internal" / "large").write_bytes(os.urandom(3 << 20))
    return packing.one_file(folder, tmp_path / "with space" / "shoal-1.0-linux-x86_64", "1.0")


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), **more}


def started(file: Path, tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(file), *words], env=environment(tmp_path, **more), capture_output=True, text=True)


def kept(tmp_path: Path) -> list[str]:
    """Names of what lies in the cache."""
    folder = tmp_path / "cache" / "shoal" / "standalone"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@needs_x86
def test_the_first_start_unpacks_and_every_start_runs(file: Path, tmp_path: Path) -> None:
    done = started(file, tmp_path, "generate", "two words", "")
    (name,) = kept(tmp_path)
    folder = tmp_path / "cache" / "shoal" / "standalone" / name
    assert (done.returncode, done.stdout) == (7, f"{folder}/shoal generate two words \n")
    assert done.stderr == f"unpacking Shoal, once, into {folder.parent} (3 MB)\n" and name.startswith("1.0-")
    before = (folder / "shoal").stat()
    done = started(file, tmp_path, "-x", PATH="/nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{folder}/shoal -x\n", "")
    assert (folder / "shoal").stat() == before and before.st_mode & 0o777 == 0o755


@needs_x86
def test_without_variables_it_unpacks_too(file: Path, tmp_path: Path) -> None:
    done = subprocess.run([str(file)], env={"HOME": str(tmp_path), "PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout.startswith(f"{tmp_path}/.cache/shoal/standalone/1.0-")


@needs_x86
def test_another_release_lies_beside(file: Path, tmp_path: Path) -> None:
    started(file, tmp_path)
    (tmp_path / "folder" / "more").write_text("more", "ascii")
    other = packing.one_file(tmp_path / "folder", tmp_path / "other", "1.0")
    assert started(other, tmp_path).returncode == 7 and len(kept(tmp_path)) == 2
    again = packing.one_file(tmp_path / "folder", tmp_path / "again", "1.0")
    assert again.read_bytes() == other.read_bytes()


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("unpacking ")]
    assert done.returncode == 2 and done.stdout == "" and len(lines) == 1, done
    return lines[0].removeprefix("shoal: error: ")


@needs_x86
def test_a_file_that_is_not_whole_is_refused_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    assert re.search(r"has \d+ bytes and should have \d+; fetch it again", refused(started(file, tmp_path)))
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    assert "cannot be unpacked" in refused(started(file, tmp_path)) and kept(tmp_path) == []
    file.write_bytes(whole)
    assert started(file, tmp_path).returncode == 7


@needs_x86
def test_a_cache_that_cannot_be_written_is_told(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", "ascii")
    said = refused(started(file, tmp_path))
    assert said.startswith(f"nothing can be written to {tmp_path}/cache/shoal/standalone; set XDG_CACHE_HOME")


@needs_x86
@pytest.mark.parametrize(("options", "why"), [
    ("size=1m", "has 1 MB free and needs 3; make room"), ("noexec", "programs may not run from")])
def test_a_full_disk_and_one_without_programs_are_told(file: Path, tmp_path: Path, options: str, why: str) -> None:
    (tmp_path / "cache").mkdir()
    line = f'mount -t tmpfs -o {options} none "$0" && "$1"; code=$?; ls "$0/shoal/standalone" >&2; exit $code'
    words = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"]).returncode:
        pytest.skip("this user may not mount anything")
    done = subprocess.run([*words, "sh", "-c", line, str(tmp_path / "cache"), str(file)], capture_output=True,
                          text=True, env=environment(tmp_path, PATH=os.environ["PATH"]))
    said, *left = [line for line in done.stderr.splitlines() if not line.startswith("unpacking ")]
    assert done.returncode == 2 and why in said, done.stderr
    assert [name[:4] for name in left] == (["1.0-"] if options == "noexec" else [])


@needs_x86
def test_an_old_glibc_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(packing, "newest_glibc", lambda folder: 99)
    file = packing.one_file(tmp_path / "folder", tmp_path / "shoal", "1.0")
    assert refused(started(file, tmp_path)).startswith("this file needs glibc 2.99 or newer, and this system has 2.")


def test_the_newest_glibc_of_the_libraries_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(b"\0GLIBC_2.9\0GLIBC_2.17\0")
    (tmp_path / "b.so.1").write_bytes(b"\0GLIBC_2.3.4\0GLIBCXX_3.4.30\0")
    assert packing.newest_glibc(tmp_path) == 17


@needs_x86
def test_two_starts_at_once_both_run(file: Path, tmp_path: Path) -> None:
    both = [subprocess.Popen([str(file)], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(4)]
    assert [process.communicate()[0] and process.returncode for process in both] == [7] * 4
    (name,) = kept(tmp_path)
    folder = tmp_path / "cache" / "shoal" / "standalone" / name
    assert sorted(path.name for path in folder.iterdir()) == ["_internal", "shoal"]


@pytest.fixture
def slow_tar(tmp_path: Path) -> str:
    """A PATH with a tar that waits."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "tar").write_text(f"#!/bin/sh\n: >'{folder}/begun'\nexec sleep 60\n", "ascii")
    (folder / "tar").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def interrupted(file: Path, tmp_path: Path, slow_tar: str) -> Iterator[subprocess.Popen[bytes]]:
    """A first start that waits, in a group of processes of its own."""
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which whoever runs the tests may ignore
    process = subprocess.Popen([str(file)], env=environment(tmp_path, PATH=slow_tar), start_new_session=True,
                               preexec_fn=heed)
    wait(lambda: (tmp_path / "slow" / "begun").exists())
    yield process
    process.wait(30)


@needs_x86
def test_a_start_that_is_interrupted_leaves_nothing(
    interrupted: subprocess.Popen[bytes], file: Path, tmp_path: Path
) -> None:
    os.killpg(interrupted.pid, signal.SIGINT)
    interrupted.wait(30)
    wait(lambda: kept(tmp_path) == [])
    assert started(file, tmp_path).returncode == 7 and len(kept(tmp_path)) == 1


@needs_x86
def test_what_a_killed_start_left_is_cleared_away_by_a_later_one(
    interrupted: subprocess.Popen[bytes], file: Path, tmp_path: Path
) -> None:
    os.killpg(interrupted.pid, signal.SIGKILL)
    (part,) = kept(tmp_path)
    old = time.time() - 2 * 3600
    os.utime(tmp_path / "cache" / "shoal" / "standalone" / part, (old, old))
    assert started(file, tmp_path).returncode == 7
    (name,) = kept(tmp_path)
    assert name.startswith("1.0-")


def asked(*words: str, **environment: str) -> str:
    """What the packed program's code prints for words, run by this Python."""
    done = subprocess.run([sys.executable, str(ENTRY), *words], env={**os.environ, **environment}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_runs_code_as_python_does() -> None:
    code = "import json, os, sys; print(json.dumps([sys.argv, __name__, os.environ.get('LD_LIBRARY_PATH')]))"
    assert asked("-c", "import os; print(os.environ['PYINSTALLER_RESET_ENVIRONMENT'])") == "1\n"
    assert json.loads(asked("-I", "-B", "-c", code, "a b", "-c")) == [["-c", "a b", "-c"], "__main__", None]
    own = asked("-c", code, LD_LIBRARY_PATH="/packed", LD_LIBRARY_PATH_ORIG="/own")
    assert json.loads(own) == [["-c"], "__main__", "/own"]


def test_a_sandbox_has_the_standard_library_alone() -> None:
    code = "import decimal, statistics\ntry:\n    import yaml\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert asked("-I", "-S", "-B", "-c", code) == "No module named 'yaml'\n"


def test_other_words_are_those_of_the_command_line() -> None:
    assert asked("--version").startswith("shoal ")


def test_what_cannot_be_added_to_the_one_file_says_so() -> None:
    code = ("import sys; sys.frozen = True; from shoal import catalog, errors; print(errors.LAB_INSTALL);"
            "print(errors.pip_install('shoal[ray]')); print(catalog.remedy(catalog.DEFAULT))")
    lab, ray, model = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()
    where = ", in a Python of your own: this one file takes no packages"
    assert (lab, ray) == (f"pip install shoal-lab{where}", f"pip install 'shoal[ray]'{where}")
    assert "shoal pull NAME" in model and "pip" not in model
