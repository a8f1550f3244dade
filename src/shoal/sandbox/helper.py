"""Processes that answer one question at a time, and are ended where one takes too long or too much memory.

A process is the one bound in time and memory that holds whatever the work is: code of another language cannot be
interrupted, and a stack that overflows there ends the process that it is in.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path[0] = sys.argv[1]; from shoal.sandbox.helper_process import main; main(*sys.argv[2:])"
_PATIENCE = 6
"""Seconds by the clock for each of computing time: other work may keep the machine busy."""
_START_SECONDS = 300
"""By the clock, until a process has imported what it needs: beside much other work that takes minutes."""
READY = "ready\n"
"""What it says then."""
_AT_ONCE = 2


class NoAnswer(Exception):
    """A question has no answer, for a reason that its asker can be told."""


class OverLimit(NoAnswer):
    """The reason is a limit, which the same question would meet again."""


class Helpers:
    """Processes of one kind. They start when they are first needed and wait for the next question; for any thread.

    Args:
        work: the module in which they find `answer`, a function of a question; both are what JSON can hold, and of a
            question whatever else it has is given as the name of its kind.
        seconds: of computing time for an answer; None for any, where each question has a time of its own.
        memory: bytes that a process may take beyond those with which it begins, where the system can hold it to that;
            None where the work sees to it.
        at_once: questions that are worked on at a time.
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
        """The answer to a question; it waits where others are asked at the time.

        Args:
            question: see the class.
            within: seconds by the clock until there must be an answer. Waiting counts, the start of a process does not.

        Raises:
            NoAnswer: there is none: it would take too long or too much memory (OverLimit), `answer` raised an error, or
                no process can be started.
        """
        line, asked = json.dumps(question, default=_named) + "\n", time.monotonic()
        if not self._room.acquire(timeout=min(within, threading.TIMEOUT_MAX)):
            raise OverLimit(f"there is no answer within {within:g} s: others are asked")
        try:
            left = min(within - (time.monotonic() - asked), (self.seconds or math.inf) * _PATIENCE)
            process = self._taken()
            if process in self._starting:
                self._starting.discard(process)
                said, _ = _timed(process, "", _START_SECONDS)
                if said != READY:
                    raise NoAnswer(f"the process that is to work on it does not start: it ended with {_end(process)}")
            said, late = _timed(process, line, left)
            if not said.endswith("\n"):
                raise OverLimit(self._why(_end(process), late, within))
            answer, why, limit, spent = json.loads(said)
            if spent:
                _end(process)
            else:
                self._idle.append(process)
        finally:
            self._room.release()
        if why is not None:
            raise (OverLimit if limit else NoAnswer)(why)
        return answer

    def begin(self) -> None:
        """Start a process, if none waits, so that the first question need not wait for it."""
        with suppress(NoAnswer):
            self._idle.append(self._taken())

    def end(self) -> None:
        """End the processes that wait."""
        while self._idle:
            process = self._idle.pop()
            if self._owner == os.getpid():
                process.kill()
                _end(process)

    def _taken(self) -> subprocess.Popen[str]:
        """A process that waits, or a new one."""
        if self._owner != os.getpid():  # a fork: they wait for the parent's questions
            self._owner, self._idle = os.getpid(), []
        with suppress(IndexError):  # several threads take them
            while True:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
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


def _named(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _timed(process: subprocess.Popen[str], line: str, seconds: float) -> tuple[str, bool]:
    """What a process says to a line, a line or what it said before it ended; and whether that took too long."""
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
        _end(process)  # what it will say would be taken for the next question's answer
        raise
    finally:
        timer.cancel()


def _stop(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    process.kill()


def _end(process: subprocess.Popen[str]) -> int:
    """Its exit code; one that has closed its output is given the time to die of what it does."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.kill()
    process.stdout.close()
    return process.wait()


_all: weakref.WeakSet[Helpers] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for helpers in list(_all):
        helpers.end()
