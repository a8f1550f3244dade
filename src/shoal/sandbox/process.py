"""Starts sandboxes and sends them programs. A sandbox is a process that runs one program after the other."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.errors import Unsupported
from shoal.sandbox.helper import end, timed

Kind = Literal["bubblewrap", "namespaces", "none"]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_START = """import json, sys
exec(compile(sys.argv[1], "sandbox", "exec"))
settings = json.loads(sys.argv[2])
"""
_HARMLESS = "import math, os\ndef f():\n    return os.listdir('.')\n"
_HOME = "/home/guest"
_GRACE = 20.0
"""Seconds beyond a program's own after which the sandbox counts as lost."""
LIMITS = {"memory": 512 << 20, "file_bytes": 16 << 20, "home_bytes": 64 << 20, "processes": 8, "files": 64}
"""Bytes of address space per process, of one file, and of all files; processes and threads at once; open files."""


@dataclass(frozen=True)
class Program:
    """A module to judge, the tests that run after it, with its names, and the function that they call."""

    code: str
    tests: str
    entry: str


class Sandbox:
    """Runs one program at a time, isolated by what `find` has chosen. Not thread-safe."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._home = tempfile.mkdtemp(prefix="shoal-") if kind == "none" else _HOME
        self._process: subprocess.Popen[str] | None = None

    def run(self, program: Program, seconds: float) -> str:
        """Run a program; returns passed, failed, error, timeout or syntax.

        A program that ends before its tests are through has failed. One that kills the sandbox is an error, and the
        next one gets a new sandbox.
        """
        process = self._started()
        line, _ = timed(process, json.dumps({**asdict(program), "seconds": seconds}) + "\n", seconds + _GRACE)
        if not line.endswith("\n"):
            self._stop()
            return "error"
        answer = json.loads(line)
        if not answer["clean"]:
            self._stop()
        return str(answer["verdict"])

    def close(self) -> None:
        """End the process and everything that runs in it."""
        self._stop()
        if self.kind == "none":
            shutil.rmtree(self._home, ignore_errors=True)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                _command(self.kind, self._home), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, encoding="utf-8", errors="replace",
                env={"PATH": "/usr/bin:/bin", "HOME": self._home, "LC_ALL": "C.UTF-8"},
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end(process)

    def why_not(self) -> str | None:
        """Try the sandbox with a harmless program; says what goes wrong, or None."""
        verdict = self.run(Program(_HARMLESS, "assert f() == []\n", "f"), 10.0)
        if verdict == "passed":
            return None
        process = self._started()
        process.kill()
        _, said = process.communicate()
        return (said.strip().splitlines() or [f"a harmless program ended as {verdict}"])[-1]


@functools.cache
def find(unsafe: bool = False) -> Kind:
    """The best kind of sandbox that works here; where none works, "none" if `unsafe` allows it, else Unsupported.

    Root gets namespaces, because limits on the number of processes do not hold for root's own. Other users get
    bubblewrap if it is installed.
    """
    root = sys.platform == "linux" and os.geteuid() == 0
    order: Sequence[Kind] = ("namespaces",) if root else ("bubblewrap", "namespaces")
    reasons = []
    for kind in order if sys.platform == "linux" else ():
        sandbox = Sandbox(kind)
        try:
            why = sandbox.why_not()
        except OSError as error:
            why = str(error)
        finally:
            sandbox.close()
        if why is None:
            return kind
        reasons.append(f"{kind}: {why}")
    if unsafe:
        return "none"
    raise Unsupported("running code that a model wrote", "; ".join(reasons) or "there is a sandbox on Linux only",
                      "Install bubblewrap or allow user namespaces, or give --unsafe where the whole machine may be "
                      "lost")


def _command(kind: Kind, home: str) -> list[str]:
    """The command that starts a sandbox. Inside it runs this Python, with the standard library alone."""
    python = os.path.realpath(sys.executable)
    paths = list(_visible(python))
    settings: dict[str, Any] = {**LIMITS, "home": home, "paths": paths, "user": None, "confined": kind != "none"}
    if kind == "none":
        settings["processes"] = None  # the limit would count the user's other processes
    start = _START + ("enter(settings)\n" if kind == "namespaces" else "") + "serve(settings)\n"
    guest = Path(__file__).with_name("guest.py").read_text("utf-8")
    inside = [python, "-I", "-S", "-B", "-c", start, guest, json.dumps(settings)]
    return [*_bubblewrap(paths, home), *inside] if kind == "bubblewrap" else inside


def _bubblewrap(paths: Iterable[str], home: str) -> list[str]:
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
            "--as-pid-1", "--cap-drop", "ALL"]
    for path in paths:
        argv += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    return [*argv, "--dev", "/dev", "--proc", "/proc", "--size", str(LIMITS["home_bytes"]), "--tmpfs", home,
            "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", home]


def _visible(python: str) -> Iterable[str]:
    """The folders of the system and of this Python that exist, without those that lie in another one."""
    own = [os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, os.path.dirname(python))]
    seen: list[str] = []
    for path in [*_SYSTEM, *own]:
        if os.path.exists(path) and not any(f"{path}/".startswith(f"{before}/") for before in seen):
            seen.append(path)
    return seen
