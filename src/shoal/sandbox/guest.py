"""Runs programs one after the other, each in its own fork. Runs inside a sandbox, without the rest of Shoal.

Each line of JSON on stdin asks, and a line on stdout answers. A fork that has run the last test reports the verdict
with a token made for this one run, so a program that ends early has not passed. That guards against accidents, not
against adversaries: a program can find the token in the frames around it.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from typing import Any

MESSAGE_BYTES = 256
_USUAL = ("bisect", "cmath", "collections", "collections.abc", "copy", "datetime", "decimal", "fractions", "functools",
          "hashlib", "heapq", "itertools", "math", "operator", "queue", "random", "re", "statistics", "string", "time",
          "typing")
"""Modules that programs import often; imported once, before the forks."""
_SECURE_BITS = 0x2F
"""User 0 gains no capabilities, and this cannot be undone."""


def serve(settings: dict[str, Any]) -> None:
    """Answer until stdin ends.

    Args:
        settings: `memory`, `file_bytes`, `processes`, `files`, `home`, `confined`, and `user` (a uid or None).
    """
    for name in _USUAL:
        __import__(name)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: programs cannot look into this process
    asked, answered = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    for line in asked:
        verdict = _tried(json.loads(line), settings, libc)
        answered.write(json.dumps({"verdict": verdict, "clean": _wiped(settings["home"])}).encode() + b"\n")
        answered.flush()


def _tried(job: dict[str, Any], settings: dict[str, Any], libc: Any) -> str:
    """Run one program in a fork, to its end or the deadline, then kill everything that it started."""
    token = os.urandom(16).hex()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        _run(job, settings, libc, token, into)
    os.close(into)
    said = _listen(out, child, time.monotonic() + job["seconds"])
    os.close(out)
    _end(child)
    if said is None:
        return "timeout"
    found, _, verdict = said.partition(" ")
    return verdict if found == token else "error" if found == "killed" else "failed"


def _listen(out: int, child: int, deadline: float) -> str | None:
    """The first line that a program writes; "" or "killed" if it ended without one, None after the deadline."""
    said = b""
    while b"\n" not in said and len(said) < MESSAGE_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if select.select([out], [], [], min(left, 0.1))[0]:
            part = os.read(out, MESSAGE_BYTES)
            if part:
                said += part
                continue
            left = 0.0
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | (os.WNOHANG if left else 0))
        if ended is not None:
            return "" if ended.si_code == os.CLD_EXITED else "killed"
    return said.split(b"\n")[0].decode("ascii", "replace")


def _end(child: int) -> None:
    """Kill the program and everything it started; for process 1 of a namespace, that is every other process."""
    everyone = os.getpid() == 1
    try:
        if everyone:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        while everyone or not os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT):
            os.waitpid(-1, 0)
        os.waitpid(child, 0)
    except ChildProcessError:
        pass


def _wiped(home: str) -> bool:
    """Empty the home folder; False if that fails."""
    try:
        for entry in os.scandir(home):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return True


def _run(job: dict[str, Any], settings: dict[str, Any], libc: Any, token: str, into: int) -> None:
    """In the fork: give up all rights, run the program, report the verdict, exit. Never returns."""
    write, leave = os.write, os._exit  # the program may replace them
    said = {verdict: f"{token} {verdict}\n".encode() for verdict in ("passed", "failed", "error", "syntax")}
    verdict = "error"
    try:
        os.setsid()
        os.closerange(3, into)
        os.closerange(into + 1, 256)
        _give_up(settings, libc, int(job["seconds"]) + 1)
        os.chdir(settings["home"])
        verdict = _verdict(job["code"], job["tests"], job["entry"])
    except BaseException:
        verdict = "error"
    try:
        write(into, said[verdict])
    finally:
        leave(0)


def _give_up(settings: dict[str, Any], libc: Any, seconds: int) -> None:
    """Set limits, then drop every right that could lift them."""
    for what, limit in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, settings["memory"]), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]), (resource.RLIMIT_NOFILE, settings["files"]),
        (resource.RLIMIT_NPROC, settings["processes"]),
    ):
        if limit is not None:
            resource.setrlimit(what, (limit, limit))
    if settings["confined"]:
        for capability in range(64):
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
        libc.prctl(28, _SECURE_BITS, 0, 0, 0)  # PR_SET_SECUREBITS
        if settings["user"] is not None:
            os.setgroups([])
            os.setresgid(*[settings["user"]] * 3)
            os.setresuid(*[settings["user"]] * 3)
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if libc.capset(header, none) != 0:
            raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS


def _verdict(code: str, tests: str, entry: str) -> str:
    """The verdict of a program's tests."""
    pristine = dict(vars(builtins))
    modules = [(sys.modules[name], dict(vars(sys.modules[name]))) for name in _USUAL]
    run = exec
    try:
        program = compile(code, "program", "exec")
        checks = compile(tests, "tests", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "syntax"
    names: dict[str, Any] = {"__name__": "program"}
    try:
        run(program, names)
        for module, before in modules:
            sys.modules[module.__name__] = module
            vars(module).update(before)
        kept = {name: value for name, value in names.items() if name not in pristine or name == entry}
        run(checks, {**kept, "__builtins__": pristine, "__name__": "tests"})
    except (AssertionError, SystemExit):
        return "failed"
    except BaseException:
        return "error"
    return "passed"
