"""Runs inside a sandbox, without the rest of Shoal: enters namespaces, and runs programs, each in its own fork.

Each line of JSON on stdin asks, and a line on stdout answers. A fork that has run the last test reports the verdict
with a token made for this one run, so a program that ends early has not passed. That guards against accidents, not
against adversaries: a program can find the token in the frames around it.

The namespaces of Linux hide the network and users' files, and make the system read-only. They need Linux 5.12, and the
right to make user namespaces.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import platform
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
_NEW = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # USER, NS, PID, NET, IPC, UTS
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_MOUNT_SETATTR = 442
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE, _DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
_READ_ONLY = 1 | 2
"""MOUNT_ATTR_RDONLY and _NOSUID; the few devices stay usable."""
_NOBODY = 65534
_DEVICES = ("null", "zero", "random", "urandom")


def enter(settings: dict[str, Any]) -> None:
    """Return inside the namespaces, as process 1; the calling process stays outside and waits for its end.

    Args:
        settings: `paths`, the files and folders that stay visible; `home`, an empty folder of `home_bytes`. Sets
            `user` to the uid that programs run as, or None for the present one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    settings["user"] = _unshared(libc)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    _mounted(libc, settings)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def _unshared(libc: Any) -> int | None:
    """Make the namespaces. Root also maps a second user for programs, as no limit counts root's own processes."""
    user, group = os.geteuid(), os.getegid()
    ready, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(_map(os.getppid(), user, group))
    os.close(ready)
    _check(libc.unshare(_NEW))
    os.close(go)
    code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code != 0:
        sys.exit(f"the user could not be mapped ({code})")
    return _NOBODY if user == 0 else None


def _map(process: int, user: int, group: int) -> int:
    """Map users into the namespace, from outside: the caller is user 0 inside."""
    try:
        if user != 0:
            _write(process, "setgroups", "deny")
        for name, number in (("gid_map", group), ("uid_map", user)):
            _write(process, name, f"0 {number} 1\n" + (f"{_NOBODY} {_NOBODY} 1\n" if user == 0 else ""))
    except OSError as error:
        return error.errno or 1
    return 0


def _write(process: int, name: str, text: str) -> None:
    with open(f"/proc/{process}/{name}", "w") as file:
        file.write(text)


def _mounted(libc: Any, settings: dict[str, Any]) -> None:
    """Mount a read-only root that holds only the visible paths, and an empty home."""
    home = settings["home"]
    root = next(path for path in ("/tmp", "/mnt", "/srv", "/var") if os.path.isdir(path)
                and not any(seen.startswith(path + "/") for seen in settings["paths"]))

    def mount(what: str | None, where: str, kind: str | None, flags: int, data: str | None = None) -> None:
        texts = [None if text is None else os.fsencode(text) for text in (what, where, kind, data)]
        _check(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), where)

    mount(None, "/", None, _REC | _PRIVATE)
    mount("shoal", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in settings["paths"]:
        _shown(libc, mount, path, root + path)
    os.makedirs(f"{root}/dev")
    for name in _DEVICES:
        open(f"{root}/dev/{name}", "w").close()
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.makedirs(root + home)
    mount("shoal", root + home, "tmpfs", _NOSUID | _NODEV, f"size={settings['home_bytes']},nr_inodes=4096,mode=1777")
    _read_only(libc, root, 0)
    os.chdir(root)
    _check(libc.syscall(ctypes.c_long(_PIVOT_ROOT[platform.machine()]), b".", b"."), "pivot_root")
    _check(libc.umount2(b".", _DETACH))
    os.chdir("/")


def _shown(libc: Any, mount: Any, path: str, place: str) -> None:
    """Make a file, folder or link of the system visible at `place`."""
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        open(place, "w").close()
    mount(path, place, None, _BIND | _REC)
    _read_only(libc, place, 0x8000)


def _read_only(libc: Any, path: str, flags: int) -> None:
    """Make a mount read-only, and all mounts below it if the flag is AT_RECURSIVE."""
    wish = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _check(libc.syscall(ctypes.c_long(_MOUNT_SETATTR), -100, os.fsencode(path), flags, wish, ctypes.c_size_t(32)), path)


def _check(result: int, what: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


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
