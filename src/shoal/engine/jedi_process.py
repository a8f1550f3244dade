"""Run as a file: answers questions of `shoal.engine.members`, apart, since jedi may hang and loads compiled modules.

A line on stdin is `[code, folder]` as JSON, one on stdout the members that may follow the code, or null.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Answer until stdin ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]  # else code would import its neighbours
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # modules may print
    import jedi

    environment = jedi.InterpreterEnvironment()
    for line in sys.stdin:
        code, folder = json.loads(line)
        project = jedi.Project(folder or here + "/none", smart_sys_path=bool(folder))
        try:
            script = jedi.Script(code, project=project, environment=environment)
            found = sorted({one.name for one in script.complete() if one.type not in ("keyword", "path")})
        except Exception:  # jedi raises what it likes about code that it does not understand
            found = None
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
