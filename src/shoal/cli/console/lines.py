"""Messages from a pipe or a terminal.

In a terminal the extra `chat` (prompt_toolkit) edits them, several lines long by Alt-Enter; without it readline does,
where the system has it. It knows no commands but by their names.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from shoal.user_cache import cache_folder

_QUOTES = '"""'
_BEGIN, _END = "\x1b[200~", "\x1b[201~"
"""What a terminal sends around pasted text, after `_ASK`."""
_ASK, _ASK_NO_MORE = "\x1b[?2004h", "\x1b[?2004l"
_LONGEST_HISTORY = 1000


class Lines:
    """Messages from a pipe or a terminal, where readline, if there, edits, completes commands and has a history."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = sorted(commands)
        self._shown = sys.stdin.isatty() and sys.stdout.isatty()
        self._history = cache_folder() / "chat_history"
        self._editor = _editor(self._commands, cache_folder() / "chat_messages") if self._shown else None
        self._readline = _readline() if self._shown and self._editor is None else None

    @property
    def _marks_pastes(self) -> bool:
        """Whether nothing but this class asks the terminal to mark what is pasted."""
        return self._shown and self._editor is None and self._readline is None

    @property
    def keys(self) -> str:
        """How a message of several lines is typed, in words."""
        return "Alt-Enter begins a new line" if self._editor else 'three quotes begin and end a text of several lines'

    def __enter__(self) -> Lines:
        if self._marks_pastes:
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

    def __exit__(self, *_: object) -> None:
        if self._marks_pastes:
            print(_ASK_NO_MORE, end="", flush=True)
        if self._readline is not None:
            with suppress(OSError):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._readline.write_history_file(self._history)

    def __iter__(self) -> Iterator[str]:
        """Non-empty messages, until the input ends. An interrupt drops the line being typed."""
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

    def say(self, text: str = "") -> None:
        """Print a line, if this is a terminal."""
        if self._shown:
            print(text)

    def ask(self, question: str) -> str:
        """What somebody at the terminal answers, in lower case; nothing where nobody can be asked."""
        if not self._shown:
            return ""
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower()

    def complete(self, begun: str, number: int) -> str | None:
        """The `number`-th command that begins with `begun`, as readline asks for it."""
        found = [command for command in self._commands if command.startswith(begun)]
        return found[number] if begun and number < len(found) else None

    def _text(self) -> str:
        line = self._pasted(self._line(">>> "))
        if not line.strip().startswith(_QUOTES) or ("\n" in line.strip() and not line.rstrip().endswith(_QUOTES)):
            return line.strip()  # pasted text is complete, even if it begins with quotes
        parts = [line.strip().removeprefix(_QUOTES)]
        while not parts[-1].rstrip().endswith(_QUOTES):
            parts.append(self._pasted(self._line("... ")))
        parts[-1] = parts[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(parts)

    def _pasted(self, line: str) -> str:
        """The line, with the rest of a paste that begins in it: without readline its lines come one by one."""
        while _BEGIN in line and _END not in line.rpartition(_BEGIN)[2]:
            line = f"{line}\n{self._line('')}"
        return line.replace(_BEGIN, "").replace(_END, "")

    def _line(self, prompt: str) -> str:
        if self._editor is not None:
            return self._editor(prompt)
        return input(prompt if self._shown else "")


def _editor(commands: Sequence[str], history: Path) -> Callable[[str], str] | None:
    """Reads a message after a prompt; None without the extra `chat`, and in a terminal that moves no cursor."""
    if os.environ.get("TERM") == "dumb":
        return None
    with suppress(ImportError):
        from shoal.cli.console.editor import Editor

        return Editor(commands, history).line
    return None


def _readline() -> ModuleType | None:
    """The module readline; None if the system lacks it, as Windows does."""
    with suppress(ImportError):
        return importlib.import_module("readline")
    return None
