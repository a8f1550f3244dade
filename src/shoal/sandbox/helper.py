"""Processes that answer one question at a time, and are killed if it takes too long or too much memory.

Only a process can be bounded in time and memory whatever it does: native code cannot be interrupted, and a stack
overflow in it kills its whole process.

Questions go to a process as lines of JSON. Its first line on stdout is `READY`; each further one is `[answer, reason
why there is none or null, whether that is a limit, whether the process ends now]`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path[0] = sys.argv[1]; from shoal.sandbox.helper import main; main(*sys.argv[2:])"
_PATIENCE = 6
"""Seconds of wall time allowed per second of CPU time, because the machine may be busy."""
_START_SECONDS = 300
"""Wall time in which a process must have imported what it needs; on a busy machine that takes minutes."""
READY = "ready\n"
_AT_ONCE = 2


class NoAnswer(Exception):
    """A question has no answer; the message says why and may be shown to whoever asked."""


class OverLimit(NoAnswer):
    """A question exceeded a limit, and would again."""


class Helpers:
    """Processes of one kind, usable from any thread. They start on first use and then wait for more questions.

    Args:
        work: the module whose function `answer` maps a question to an answer. Both are JSON values; anything else in a
            question is sent as the name of its type.
        seconds: CPU time for an answer; None for no limit, where each question has its own.
        memory: bytes that a process may take beyond those it starts with, if the system can enforce that; None for no
            limit.
        at_once: most questions worked on at a time.
    """

    def __init__(self, work: str, seconds: int | None, memory: int | None, at_once: int = _AT_ONCE) -> None:
        self.seconds, self.memory = seconds, memory
        self._words = [sys.executable, "-c", _START, str(_ROOT), work, str(seconds or 0), str(memory or 0)]
        self._idle: list[subprocess.Popen[str]] = []
        self._starting: weakref.WeakSet[subprocess.Popen[str]] = weakref.WeakSet()
        self._room = threading.BoundedSemaphore(at_once)
        self._owner = os.getpid()
        _all.add(self)

    def ask(self, question: Any, within: float = math.inf) -> Any:
        """The answer to a question. Waits while all processes are busy.

        Args:
            within: wall time in seconds for the answer. Waiting counts; starting a process does not.

        Raises:
            OverLimit: the answer would take too long or too much memory.
            NoAnswer: `answer` raised an error, or no process can be started.
        """
        line, asked = json.dumps(question, default=lambda value: f"<{type(value).__name__}>") + "\n", time.monotonic()
        if not self._room.acquire(timeout=min(within, threading.TIMEOUT_MAX)):
            raise OverLimit(f"there is no answer within {within:g} s: other questions are being answered")
        try:
            left = min(within - (time.monotonic() - asked), (self.seconds or math.inf) * _PATIENCE)
            process = self._taken()
            if process in self._starting:
                self._starting.discard(process)
                said, _ = timed(process, "", _START_SECONDS)
                if said != READY:
                    raise NoAnswer(f"the process that should work on it did not start: it ended with {end(process)}")
            said, late = timed(process, line, left)
            if not said.endswith("\n"):
                raise OverLimit(self._why(end(process), late, within))
            answer, why, limit, spent = json.loads(said)
            if spent:
                end(process)
            else:
                self._idle.append(process)
        finally:
            self._room.release()
        if why is not None:
            raise (OverLimit if limit else NoAnswer)(why)
        return answer

    def begin(self) -> None:
        """Start a process, unless one waits, so that the first question need not wait for it."""
        with suppress(NoAnswer):
            self._idle.append(self._taken())

    def end(self) -> None:
        """End the waiting processes."""
        while self._idle:
            process = self._idle.pop()
            if self._owner == os.getpid():
                process.kill()
                end(process)

    def _taken(self) -> subprocess.Popen[str]:
        """A waiting process, or a new one."""
        if self._owner != os.getpid():  # after a fork, the waiting processes belong to the parent
            self._owner, self._idle = os.getpid(), []
        with suppress(IndexError):  # other threads pop too
            while True:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                end(process)
        try:
            process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, encoding="ascii")
        except OSError as error:
            raise NoAnswer(f"no process can be started to work on it: {error}") from error
        self._starting.add(process)
        return process

    def _why(self, code: int, late: bool, within: float) -> str:
        end = signal.Signals(-code).name if code < 0 else str(code)
        if late and within < math.inf:
            return f"it takes more than {within:g} s"
        if late or end == "SIGXCPU":
            return f"it takes more than {self.seconds} s of computing time"
        if self.memory and end in ("SIGABRT", "SIGKILL"):
            return f"it takes more than {self.memory >> 20} MiB of memory"
        if end in ("SIGSEGV", "SIGBUS"):
            return "it is nested too deeply, or its parts refer to one another through too many others"
        return f"the process that worked on it ended with {end}"


def timed(process: subprocess.Popen[str], line: str, seconds: float) -> tuple[str, bool]:
    """Send a line. Returns the line that comes back, or the part of it sent before the process died, and if late."""
    assert process.stdin is not None and process.stdout is not None
    late = threading.Event()
    timer = threading.Timer(min(max(seconds, 0.0), threading.TIMEOUT_MAX), _stop, (process, late))
    timer.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline(), late.is_set()
    except OSError:
        return "", late.is_set()
    except BaseException:
        end(process)  # its answer would be taken for that of the next question
        raise
    finally:
        timer.cancel()


def _stop(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    process.kill()


def end(process: subprocess.Popen[str]) -> int:
    """Kill a process and return its exit code. One that is dying gets a second, so that the code says of what."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.kill()
    process.stdout.close()
    if process.stderr is not None:
        process.stderr.close()
    return process.wait()


_all: weakref.WeakSet[Helpers] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for helpers in list(_all):
        helpers.end()


def main(work: str, seconds: str, memory: str) -> None:
    """Run in the process: answer until stdin ends. The arguments are those of `Helpers`, 0 for None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the process that asks
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # libraries may print
    answer = importlib.import_module(work).answer
    print(READY, end="", file=answers, flush=True)
    most, begun = int(memory), _address_space()
    if most:
        _limit_memory(begun + most)
    for line in sys.stdin:
        if int(seconds):
            _limit_time(int(seconds))
        said, why, limit, spent = _told(answer, json.loads(line), most)
        spent = spent or 0 < most // 4 < _address_space() - begun  # too little is left for the next question
        print(json.dumps([said, why, limit, spent]), file=answers, flush=True)


def _told(answer: Callable[[Any], Any], question: Any, memory: int) -> tuple[Any, str | None, bool, bool]:
    try:
        return answer(question), None, False, False
    except NoAnswer as error:
        return None, str(error), isinstance(error, OverLimit), False
    except MemoryError:
        return None, f"it takes more than {memory >> 20} MiB of memory", True, True
    except RecursionError:
        return None, "it is nested too deeply, or calls itself without an end", True, False
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", False, False


def _address_space() -> int:
    """Bytes of this process's address space; 0 if the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0


def _limit_memory(most: int) -> None:
    with suppress(ImportError, OSError, ValueError):  # Unix only
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if _address_space():
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(most: int) -> None:
    """Limit CPU time, not wall time: other work may keep the machine busy. The process dies when it is used up."""
    with suppress(ImportError, OSError, ValueError):  # Unix only
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        end = int(used.ru_utime + used.ru_stime) + 1 + most
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
