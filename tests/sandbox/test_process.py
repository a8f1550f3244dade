"""Programs that misbehave: what they can reach, how they end, and that the next one runs normally."""

from __future__ import annotations

import getpass
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from shoal.errors import Unsupported
from shoal.sandbox import process
from shoal.sandbox.process import LIMITS, Kind, Program, Sandbox, find

GOOD = Program("def f():\n    return 1\n", "assert f() == 1\n", "f")
FOUND = "def f():\n    return 1\n"
SECONDS = 3.0


@pytest.fixture(scope="module", params=["namespaces", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made = Sandbox(request.param)
    try:
        why = made.why_not()
    except OSError as error:
        why = str(error)
    if why is not None:
        made.close()
        pytest.skip(f"no sandbox of {request.param} works here: {why}")
    yield made
    made.close()


def tried(sandbox: Sandbox, code: str, tests: str = GOOD.tests, seconds: float = SECONDS) -> str:
    """The verdict of a program; the next one must pass."""
    verdict = sandbox.run(Program(code, tests, "f"), seconds)
    assert sandbox.run(GOOD, SECONDS) == "passed"
    return verdict


@pytest.mark.parametrize(("code", "verdict"), [
    (FOUND, "passed"),
    ("def f():\n    return 2\n", "failed"),
    ("def f():\n    return 1 / 0\n", "error"),
    ("def g():\n    return 1\n", "error"),
    ("def f(:\n", "syntax"),
    ("def f():\n    while True:\n        pass\n", "timeout"),
    ("import time\ndef f():\n    time.sleep(60)\n", "timeout"),
    ("def f():\n    return f()\n", "error"),
])
def test_how_programs_end(sandbox, code, verdict):
    assert tried(sandbox, code, seconds=1.0 if verdict == "timeout" else SECONDS) == verdict


@pytest.mark.parametrize("code", [
    "raise SystemExit(0)\n",
    "import sys\nsys.exit(0)\n",
    "import os\nos._exit(0)\n",
    "def f():\n    exit(0)\n",
    "def f():\n    raise SystemExit\n",
    "import os\nif os.fork():\n    os._exit(0)\nraise SystemExit\n",
    "import os, sys\nsys.exit = os._exit = exit = quit = lambda *code: None\ndef f():\n    return 2\n",
    "import builtins\nbuiltins.AssertionError = type('Calm', (BaseException,), {})\ndef f():\n    return 2\n",
    "AssertionError = Exception\ndef f():\n    return 2\n",
    "import builtins\nbuiltins.exec = builtins.compile = lambda *words: None\ndef f():\n    return 2\n",
    "import os\nfor n in range(1, 100):\n    try:\n        os.write(n, b'passed\\n{\"verdict\": \"passed\"}\\n')\n"
    "    except OSError:\n        pass\ndef f():\n    return 2\n",
    "import os\nos.write = print\ndef f():\n    return 2\n",
    "import atexit, os\natexit.register(os._exit, 0)\ndef f():\n    return 2\n",
    "import signal, os\nsignal.signal(15, lambda *_: os._exit(0))\ndef f():\n    os.kill(os.getpid(), 15)\n",
])
def test_success_cannot_be_feigned(sandbox, code):
    assert tried(sandbox, code) in ("failed", "error")


@pytest.mark.parametrize(("code", "tests"), [
    ("abs = lambda x: 0\n", "assert abs(f() - 1) < 1e-6\n"),
    ("import builtins\nbuiltins.abs = lambda x: 0\n", "assert abs(f() - 1) < 1e-6\n"),
    ("import math\nmath.fabs = lambda x: 0\n", "import math\nassert math.fabs(f() - 1) < 1e-6\n"),
    ("import builtins\nbuiltins.all = lambda x: True\n", "assert all(f() == n for n in (1,))\n"),
])
def test_tests_find_their_own_tools_unchanged(sandbox, code, tests):
    assert tried(sandbox, f"{code}def f():\n    return 5\n", tests) == "failed"


def test_a_function_may_bear_the_name_of_a_built_in_one(sandbox):
    assert sandbox.run(Program("def sum(a):\n    return 7\n", "assert sum([1]) == 7\n", "sum"), SECONDS) == "passed"


def test_there_is_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\n{FOUND}"
        assert tried(sandbox, code) == "error"
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_files_of_others_are_not_there(sandbox, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("secret", encoding="utf-8")
    way = [name for name in (".pyenv", ".local") if sys.base_prefix.startswith(str(Path.home() / name))]
    for folder in (Path.home(), Path.cwd(), tmp_path, Path("/root"), Path("/home") / getpass.getuser()):
        code = f"import os\nassert os.path.isdir({str(folder)!r}) and set(os.listdir({str(folder)!r})) - set({way})\n"
        assert tried(sandbox, code + FOUND) == "failed", folder
    for file in (kept, Path("/etc/passwd"), Path("/etc/shadow")):
        assert tried(sandbox, f"open({str(file)!r})\n{FOUND}") == "error", file
    writes = f"open({str(Path.home() / 'shoal-was-here')!r}, 'w')\n{FOUND}"
    assert tried(sandbox, writes) == "error" and not (Path.home() / "shoal-was-here").exists()


@pytest.mark.parametrize("path", ["/usr/x", "/bin/x", "/x", "/dev/x", os.path.realpath(os.__file__)])
def test_the_system_is_read_only(sandbox, path):
    assert tried(sandbox, f"open({path!r}, 'a').write('#')\n{FOUND}") == "error"
    flags = f"import os\nassert os.statvfs(os.path.dirname({path!r})).f_flag & os.ST_RDONLY\n"
    assert tried(sandbox, flags + FOUND) == "passed"


def test_the_home_is_empty_for_every_program(sandbox):
    look = "import os\nseen = os.listdir('.') + os.listdir(os.environ['HOME'])\ndef f():\n    return 1 + len(seen)\n"
    write = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.symlink('/', 'root')\nos.chmod('a', 0)\n"
    assert tried(sandbox, write + FOUND) == "passed"
    assert tried(sandbox, look) == "passed"


def test_a_fork_bomb_ends_with_its_program(sandbox):
    began = time.monotonic()
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    assert tried(sandbox, code, seconds=1.0) == "timeout"
    assert time.monotonic() - began < SECONDS + 10


def test_processes_and_threads_are_counted(sandbox):
    if sandbox.kind == "bubblewrap" and os.geteuid() == 0:
        pytest.skip("no limit counts root's own processes, which is why root never gets bubblewrap")
    count = ("import os\nmade = 0\ntry:\n    while made < 100:\n        if os.fork() == 0:\n            import time\n"
             "            time.sleep(9)\n        made += 1\nexcept OSError:\n    pass\n"
             "def f():\n    return int(made < 20)\n")
    assert tried(sandbox, count) == "passed"


def test_what_a_program_leaves_running_is_ended(sandbox):
    leave = "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        open('late', 'w').write('x')\n"
    look = "import os, time\ntime.sleep(0.2)\ndef f():\n    return 1 if os.listdir('.') == [] else 0\n"
    assert tried(sandbox, leave + FOUND) == "passed"
    assert tried(sandbox, look) == "passed"


@pytest.mark.parametrize("code", [
    f"x = bytearray({2 * LIMITS['memory']})\n",
    "x = []\nwhile True:\n    x.append(' ' * 1000000)\n",
])
def test_memory_ends(sandbox, code):
    assert tried(sandbox, code + FOUND) == "error"


def test_files_end(sandbox):
    huge = f"with open('x', 'wb') as file:\n    file.write(b' ' * {LIMITS['file_bytes'] + 1})\n"
    assert tried(sandbox, huge + FOUND) == "error"
    many = "for n in range(100):\n    with open(f'x{n}', 'wb') as file:\n        file.write(b' ' * 10_000_000)\n"
    assert tried(sandbox, many + FOUND) == "error"
    assert tried(sandbox, "kept = [open('x', 'w') for _ in range(1000)]\n" + FOUND) == "error"


def test_endless_output_goes_nowhere(sandbox):
    assert tried(sandbox, "while True:\n    print('x' * 10000)\n", seconds=1.0) == "timeout"


@pytest.mark.parametrize("who", ["1", "os.getppid()", "-1", "us"])
def test_nobody_else_is_killed(sandbox, who):
    victim = str(os.getpid()) if who == "us" else who
    assert tried(sandbox, f"import os\nos.kill({victim}, 9)\n{FOUND}") in ("passed", "error")


def test_rights_do_not_come_back(sandbox):
    code = ("import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "tries = [libc.mount(b'x', b'/home', b'tmpfs', 0, None), libc.unshare(0x10000000), libc.umount(b'/proc'),"
            " libc.mount(None, b'/', None, 32, None), libc.sethostname(b'x', 1), libc.ptrace(16, 1, 0, 0)]\n"
            "def f():\n    return 1 if all(result == -1 for result in tries) else tries\n")
    assert tried(sandbox, code) == "passed"


def test_a_lost_sandbox_is_an_error_and_the_next_program_gets_another(sandbox):
    assert sandbox.run(GOOD, SECONDS) == "passed"
    assert sandbox._process is not None
    sandbox._process.kill()
    sandbox._process.wait()
    assert sandbox.run(GOOD, SECONDS) == "passed"


def test_many_files_may_be_open(sandbox):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096:
        pytest.skip("no more than 4096 files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    held = []
    try:
        held += [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        other = Sandbox(sandbox.kind)
        assert tried(other, FOUND) == "passed" and tried(other, "def f():\n    return 2\n") == "failed"
        other.close()
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_verdict_that_nobody_read_is_not_the_next_program_s(sandbox, monkeypatch):
    started = sandbox._started()
    read = mock.Mock(wraps=started.stdout, readline=mock.Mock(side_effect=KeyboardInterrupt))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(started, "stdout", read)
        sandbox.run(GOOD, SECONDS)
    assert tried(sandbox, "def f():\n    return 2\n") == "failed"


def test_a_program_without_a_sandbox_is_judged_alike(tmp_path):
    made = Sandbox("none")
    try:
        assert tried(made, FOUND) == "passed" and tried(made, "raise SystemExit(0)\n") == "failed"
        assert tried(made, "while True:\n    pass\n") == "timeout"
    finally:
        made.close()
    assert not Path(made._home).exists()


def test_where_no_sandbox_works_that_is_said(monkeypatch):
    monkeypatch.setattr(Sandbox, "why_not", lambda self: "not allowed")
    find.cache_clear()
    with pytest.raises(Unsupported, match=r"namespaces: not allowed.* --unsafe"):
        find()
    assert find(unsafe=True) == "none"
    find.cache_clear()


def test_ordinary_users_get_bubblewrap_where_it_works(monkeypatch):
    tries: list[Kind] = []
    monkeypatch.setattr(process.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(Sandbox, "why_not", lambda self: tries.append(self.kind) or ("no" if len(tries) < 2 else None))
    find.cache_clear()
    assert find() == "namespaces" and tries == ["bubblewrap", "namespaces"]
    find.cache_clear()
