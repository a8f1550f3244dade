"""A command in a pseudo-terminal."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
from collections.abc import Callable

_WITHOUT = "import sys; {hidden}; from shoal.cli import main; sys.exit(main(sys.argv[1:]))"


def without(*modules: str) -> str:
    """A program for `code` that runs a command where these modules are not installed."""
    return _WITHOUT.format(hidden="; ".join(f"sys.modules[{name!r}] = None" for name in modules))


class Terminal:
    """A command in its own terminal, and its output."""

    def __init__(self, *argv: str, code: str = "", columns: int = 0) -> None:
        import pty

        self._master, slave = pty.openpty()
        if columns:
            import fcntl
            import termios

            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        command = ["-c", code] if code else ["-m", "shoal"]
        told = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        told |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nothing here answers where the cursor is
        self.process = subprocess.Popen([sys.executable, *command, *argv], stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, env=told)
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def until(self, wanted: Callable[[bytes], bool]) -> bytes:
        found = b""
        while not wanted(found):
            assert select.select([self._master], [], [], 120)[0], found
            found += os.read(self._master, 4096)
        return found

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)
