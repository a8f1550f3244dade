"""Chat with a model in the terminal. Answers are coloured by depth, and green where tokens were drafted and accepted.

Ctrl-C ends an answer, whose text so far is kept; Ctrl-D ends the chat. Pasted text is one message, however many lines
it has; typed lines form one message between two lines of three quotes. Earlier turns are not read again.

/method d3:mean=0.9   set the method for further answers; alone: show it
/system TEXT          set the system message; without a text: remove it
/reset                start a new conversation
/stats                show what the conversation cost so far
/save FILE            write the conversation as JSON
/load FILE            continue a saved conversation, or any list of messages
/help, /exit
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal.cli.terminal import add_color, held_back, printer_of, summary
from shoal.user_cache import cache_folder, expanded

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.types import Stats

EXAMPLES = """examples:
  shoal chat
  shoal chat --model path/to/model --system "Answer in one sentence."
  shoal chat --model path/to/model.gguf --method d3 --mean 0.9 --temperature 0.7
"""
COMMANDS = ("/exit", "/help", "/load", "/method", "/reset", "/save", "/stats", "/system")
_COMMAND = re.compile(r"/[a-z]+")
_QUOTES = '"""'
_BEGIN, _END = "\x1b[200~", "\x1b[201~"
"""What a terminal sends around pasted text, after `_ASK`."""
_ASK, _ASK_NO_MORE = "\x1b[?2004h", "\x1b[?2004l"
_LONGEST_HISTORY = 1000


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    common.add_method(parser, default="auto")
    common.add_sampling(parser)
    parser.set_defaults(max_new_tokens=1024)
    common.add_adapter(common.add_model(parser))
    add_color(parser)
    parser.add_argument("--quiet", action="store_true", help="no line of figures after each answer")


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends."""
    engine = common.load_engine(args, chats=True)
    talk = Talk(args, engine)
    with Lines(COMMANDS) as lines:
        lines.say("Ctrl-C ends an answer, Ctrl-D the chat; /help lists the commands.")
        for text in lines:
            try:
                if not talk.hear(text):
                    break
            except KeyboardInterrupt:  # before the answer began
                lines.say()
            except (ValueError, OSError) as error:  # a mistyped command must not end the conversation
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 0


def once(args: argparse.Namespace, prompt: str) -> int:
    """Answer one prompt."""
    Talk(args, common.load_engine(args, chats=True)).answer(prompt)
    return 0


class Talk:
    """A conversation and its commands."""

    def __init__(self, args: argparse.Namespace, engine: Engine) -> None:
        self._args, self._engine, self._method = args, engine, args.method
        self._session = engine.session(system=args.system, **common.sampling(args, engine))
        self._answers: list[Stats] = []

    def hear(self, text: str) -> bool:
        """Answer a text or run a command, False if that ends the chat; a ValueError leaves the chat unchanged."""
        word, _, rest = text.partition(" ")
        if not _COMMAND.fullmatch(word) or "\n" in text:
            self.answer(text.strip())
            return True
        if word in ("/exit", "/quit", "/bye"):
            return False
        orders: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(str(__doc__).strip()), "/load": self.load, "/method": self.method,
            "/reset": lambda _: self.reset(), "/save": self.save, "/stats": lambda _: self.stats(),
            "/system": self.system,
        }
        if word not in orders:
            raise ValueError(f"there is no {word}; there are {', '.join(COMMANDS)}. To send it to the model, put it "
                             "between two lines of three quotes")
        orders[word](rest.strip())
        return True

    def answer(self, text: str) -> None:
        """Stream the answer to a text. An interrupt ends it; the text so far stays in the conversation."""
        with held_back(), _interrupts() as heard:
            turn = self._session.stream(text, method=self._method)
            printer = printer_of(self._args, self._engine, self._method)
            try:
                with suppress(KeyboardInterrupt):
                    for step in turn:
                        printer.show(step)
                        if heard:
                            break
            finally:
                turn.close()
                printer.close()
        if not turn.result.tokens:
            return
        self._answers.append(turn.result.stats)
        if not self._args.quiet:
            print(summary(turn.result), file=sys.stderr)

    def method(self, word: str) -> None:
        """Set the method for further answers, if one is given, and show it."""
        if word:
            method = common.method_from(word)
            self._engine.recipe(method, self._args.max_new_tokens)  # refused here, not in the middle of an answer
            self._method = method
        print(f"method: {common.label_of(self._method)}")

    def system(self, text: str) -> None:
        """Replace the system message."""
        rest = [message for message in self._session.messages if message["role"] != "system"]
        self._session.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._session.messages = [message for message in self._session.messages if message["role"] == "system"]
        self._answers = []

    def stats(self) -> None:
        """Print the total cost of the answers."""
        if not self._answers:
            print("no answer yet")
            return

        def total(name: str) -> float:
            return float(sum(getattr(stats, name) for stats in self._answers))

        count, seconds = len(self._answers), total("decode_seconds")
        pace = (total("new_tokens") - count) / seconds if seconds else 0
        depth = f"{total('layer_tokens') / total('new_tokens'):.2f} of {self._answers[0].num_layers}"
        print(f"{count} answer{'s' * (count > 1)}, {total('new_tokens'):.0f} tokens, {pace:.1f} tokens/s, "
              f"{depth} layers on average, {total('accepted'):.0f} of {total('drafted'):.0f} guesses kept, "
              f"{total('prefill_seconds'):.2f} s reading")

    def save(self, path: str) -> None:
        """Write the conversation."""
        text = json.dumps({"messages": self._session.messages}, ensure_ascii=False, indent=1)
        _place("/save", path).write_text(text + "\n", encoding="utf-8")
        print(f"saved {len(self._session.messages)} messages to {path}")

    def load(self, path: str) -> None:
        """Continue another conversation."""
        self._session.messages = messages_of(_place("/load", path))
        self._answers = []
        print(f"{len(self._session.messages)} messages from {path}")


def _place(command: str, path: str) -> Path:
    """The path that a user typed after a command, `~` expanded."""
    if not path:
        raise ValueError(f"{command} needs the name of a file")
    if (found := expanded(path)) is None:
        raise ValueError(f"{path!r} names a home folder that does not exist; write the path in full")
    return found


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C, to act on it after the step: inside a step the exception might be lost. A second one raises."""
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


def messages_of(path: Path) -> list[dict[str, str]]:
    """The messages of a JSON file: a list, or an object with one as `messages`; ValueError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(f"{path} holds no messages: a list of objects with a role (system, user, assistant) and a "
                         "text as content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(found: object) -> bool:
    return (isinstance(found, dict) and found.get("role") in ("system", "user", "assistant")
            and isinstance(found.get("content"), str))


class Lines:
    """Messages from a pipe or a terminal, where readline, if there, edits, completes commands and has a history."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = sorted(commands)
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

    def __exit__(self, *_: object) -> None:
        if self._shown and self._readline is None:
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
        return input(prompt if self._shown else "")


def _readline() -> ModuleType | None:
    """The module readline; None if the system lacks it, as Windows does."""
    with suppress(ImportError):
        return importlib.import_module("readline")
    return None
