"""What a user types, line by line, and what they paste, as it is; editing and a history where there is readline."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import ModuleType, TracebackType

from shoal.user_cache import cache_folder

_QUOTES = '"""'
_BEGIN, _END = "\x1b[200~", "\x1b[201~"
"""What a terminal puts around what is pasted, once it was asked to."""
_ASK, _ASK_NO_MORE = "\x1b[?2004h", "\x1b[?2004l"
_LONGEST_HISTORY = 1000


class Lines:
    """Texts from a terminal, with a prompt, or from a pipe.

    Args:
        words: completed by the tabulator at the beginning of a line.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = sorted(words)
        self._shown = sys.stdin.isatty() and sys.stdout.isatty()
        self._history = cache_folder() / "chat_history"
        self._readline = _readline() if self._shown else None

    def __enter__(self) -> Lines:
        if self._shown and self._readline is None:
            print(_ASK, end="", flush=True)
        if self._readline is not None:
            self._readline.parse_and_bind("tab: complete")
            self._readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
            self._readline.set_completer_delims("\n")
            self._readline.set_completer(self.complete)
            self._readline.set_history_length(_LONGEST_HISTORY)
            with suppress(OSError):
                self._readline.read_history_file(self._history)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if self._shown and self._readline is None:
            print(_ASK_NO_MORE, end="", flush=True)
        if self._readline is not None:
            with suppress(OSError):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._readline.write_history_file(self._history)

    def __iter__(self) -> Iterator[str]:
        """Texts that are not empty, until the end of the input. An interrupt drops the line that is being typed."""
        while True:
            try:
                text = self._text()
            except EOFError:
                self.say()
                return
            except KeyboardInterrupt:
                self.say()
                continue
            if text.strip():
                yield text

    def say(self, words: str = "") -> None:
        """Write a line, where somebody sits before a terminal."""
        if self._shown:
            print(words)

    def complete(self, begun: str, number: int) -> str | None:
        """The `number`-th word that begins so, as readline asks for it."""
        found = [word for word in self._words if word.startswith(begun)]
        return found[number] if begun and number < len(found) else None

    def _text(self) -> str:
        line = self._pasted(self._line(">>> "))
        if not line.strip().startswith(_QUOTES) or ("\n" in line.strip() and not line.rstrip().endswith(_QUOTES)):
            return line.strip()  # what was pasted is whole, whatever it begins with
        parts = [line.strip().removeprefix(_QUOTES)]
        while not parts[-1].rstrip().endswith(_QUOTES):
            parts.append(self._pasted(self._line("... ")))
        parts[-1] = parts[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(parts)

    def _pasted(self, line: str) -> str:
        """The line, and where a paste begins in it, the lines up to its end: without readline they come one by one."""
        while _BEGIN in line and _END not in line.rpartition(_BEGIN)[2]:
            line = f"{line}\n{self._line('')}"
        return line.replace(_BEGIN, "").replace(_END, "")

    def _line(self, prompt: str) -> str:
        return input(prompt if self._shown else "")


def _readline() -> ModuleType | None:
    """The module, where the system has it: Windows has none."""
    with suppress(ImportError):
        return importlib.import_module("readline")
    return None
