"""Puts this process into Linux namespaces: no network, a read-only system without users' files, an empty home.

Runs before the guest, without the rest of Shoal. Needs Linux 5.12, and the right to make user namespaces.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from typing import Any

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
        words = [None if word is None else os.fsencode(word) for word in (what, where, kind, data)]
        _check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), where)

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
