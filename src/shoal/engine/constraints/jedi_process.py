"""Run as a file: answers questions of `members`, apart, since jedi may hang and loads compiled modules.

A line on stdin is `[code, folder]` as JSON, one on stdout the members that may follow the code, or null.

The code may be a stranger's. jedi runs none of it, but would follow the paths that it adds to `sys.path`; here it may
read what is installed and what lies in the folder, nothing else, and take so much memory and no more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

_MEMORY = 2 << 30
"""Most bytes of the process's own memory."""
_READS = frozenset(("open", "os.listdir", "os.scandir"))
_ACTS = frozenset(("os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "socket.connect",
                   "subprocess.Popen"))
"""What goes on in Python, by the names of its audit events."""


class Wall:
    """What may be read; an audit hook, which refuses the rest.

    Args:
        places: folders that may be read at any time.

    Attributes:
        folder: another one, or none where empty.
    """

    def __init__(self, places: Iterable[str]) -> None:
        self._places = tuple(_within(place) for place in places if place)
        self.folder = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse what lies outside; PermissionError."""
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


def main() -> None:
    """Answer until stdin ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]  # else code would import its neighbours
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # modules may print
    import jedi
    import parso
    from jedi.inference import sys_path

    sys_path.check_sys_path_modifications = lambda module_context: []
    environment = jedi.InterpreterEnvironment()
    wall = Wall([*environment.get_sys_path(), *sys.path, sys.prefix, sys.base_prefix, jedi.settings.cache_directory,
                 *(os.path.dirname(str(one.__file__)) for one in (jedi, parso))])
    _limit_memory()
    sys.addaudithook(wall)
    for line in sys.stdin:
        code, wall.folder = json.loads(line)
        project = jedi.Project(wall.folder or here + "/none", smart_sys_path=bool(wall.folder))
        try:
            script = jedi.Script(code, project=project, environment=environment)
            found = sorted({one.name for one in script.complete() if one.type not in ("keyword", "path")})
        except Exception:  # jedi raises what it likes about code that it does not understand
            found = None
        print(json.dumps(found), file=answers, flush=True)


def _limit_memory() -> None:
    """A text can make jedi add up ever longer strings."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


if __name__ == "__main__":
    main()
