"""What runs in the process of a helper: questions come as lines of JSON, and so do answers. See `helper`.

The first line on stdout is `READY`, each other one `[answer, why there is none or null, whether that is a limit,
whether the process ends with it]`.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.sandbox.helper import READY, NoAnswer, OverLimit


def main(work: str, seconds: str, memory: str) -> None:
    """Answer until stdin ends; arguments as `Helpers` has them, 0 for None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for who asks
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # libraries may print
    answer = importlib.import_module(work).answer
    print(READY, end="", file=answers, flush=True)
    most, begun = int(memory), _taken()
    if most:
        _limit_memory(begun + most)
    for line in sys.stdin:
        if int(seconds):
            _limit_time(int(seconds))
        said, why, limit, spent = _told(answer, json.loads(line), most)
        spent = spent or 0 < most // 4 < _taken() - begun  # what the next question would lack
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


def _taken() -> int:
    """Bytes of addresses; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0


def _limit_memory(most: int) -> None:
    with suppress(ImportError, OSError, ValueError):  # of Unix
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if _taken():
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(most: int) -> None:
    """Computing time, whose end ends the process: that of the processor, since others may keep the machine busy."""
    with suppress(ImportError, OSError, ValueError):  # of Unix
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        end = int(used.ru_utime + used.ru_stime) + 1 + most
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
