"""A line editor of prompt_toolkit: Enter sends, Alt-Enter begins a new line, Tab completes commands and paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_TAKE_PATHS = ("/file", "/load", "/save")


class Editor:
    """Reads messages of one or several lines.

    Args:
        commands: what Tab completes at the beginning of a message.
        history: a file for what was sent; without permission it is forgotten at the end.
    """

    def __init__(self, commands: Sequence[str], history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            multiline=True, key_bindings=_keys(), history=_history(history), completer=_Commands(commands),
            complete_while_typing=False, prompt_continuation="... ")

    def line(self, prompt: str) -> str:
        """A message; EOFError and KeyboardInterrupt as `input` raises them."""
        return str(self._session.prompt(prompt))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    keys.add("enter")(_send)
    keys.add("escape", "enter")(_break_line)
    return keys


def _send(event: KeyPressEvent) -> None:
    event.current_buffer.validate_and_handle()


def _break_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


def _history(path: Path) -> History:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class _Commands(Completer):  # type: ignore[misc]
    """Completes commands, and the paths that some of them take."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands, self._paths = commands, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """What may follow the text before the cursor."""
        command, space, begun = document.text_before_cursor.partition(" ")
        if not space:
            return [Completion(one, -len(command)) for one in self._commands if command and one.startswith(command)]
        if command not in _TAKE_PATHS:
            return []
        return list(self._paths.get_completions(Document(begun), complete_event))
