"""Runs jedi in a helper's process of its own, since jedi may hang and loads compiled modules.

The code may be a stranger's. jedi runs none of it, but would follow the paths that the code adds to `sys.path`. Here it
may read only what is installed and what lies in the folder, and its memory is limited.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import jedi
import parso
from jedi.inference import sys_path

_MEMORY = 2 << 30
"""Most bytes of the process's own memory."""
_NOWHERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "none")
"""Stands for the folder of code that has none. It does not exist."""
_READS = frozenset(("open", "os.listdir", "os.scandir"))
_ACTS = frozenset(("os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "socket.connect",
                   "subprocess.Popen"))
"""Names of Python's audit events."""


class Wall:
    """An audit hook that refuses to read anything but some folders.

    Args:
        places: folders that may be read at any time.

    Attributes:
        folder: another one, or none where empty.
    """

    def __init__(self, places: Iterable[str]) -> None:
        self._places = tuple(_within(place) for place in places if place)
        self.folder = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise PermissionError for what lies outside."""
        if event in _ACTS:
            raise PermissionError(f"{event} is not for a text to ask for")
        if event in _READS and args and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(args[0]))
            places = (*self._places, _within(self.folder)) if self.folder else self._places
            if not _within(path).startswith(places):
                raise PermissionError(f"{path} is not for a text to ask for")


def _within(path: str) -> str:
    """A folder in a form with which the paths of all that it holds begin."""
    return os.path.join(os.path.abspath(path), "")


def answer(question: tuple[str, str]) -> list[str] | None:
    """The members that may follow some code, None for any.

    Args:
        question: the code, and the folder where it lies, or nothing.
    """
    environment, wall = _walled_in()
    code, wall.folder = question
    project = jedi.Project(wall.folder or _NOWHERE, smart_sys_path=bool(wall.folder))
    try:
        script = jedi.Script(code, project=project, environment=environment)
        return sorted({one.name for one in script.complete() if one.type not in ("keyword", "path")})
    except Exception:  # jedi raises errors of any type for code that it does not understand
        return None


@cache
def _walled_in() -> tuple[Any, Wall]:
    """The environment that jedi takes for the user's Python, and the hook that guards this process from now on."""
    sys_path.check_sys_path_modifications = lambda module_context: []
    environment = jedi.InterpreterEnvironment()
    wall = Wall([*environment.get_sys_path(), *sys.path, sys.prefix, sys.base_prefix, jedi.settings.cache_directory,
                 *(os.path.dirname(str(one.__file__)) for one in (jedi, parso))])
    _limit_memory()
    sys.addaudithook(wall)
    return environment, wall


def _limit_memory() -> None:
    """Limit the memory, since a text can make jedi build ever longer strings."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
