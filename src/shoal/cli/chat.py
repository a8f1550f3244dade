"""Talk with a model in the terminal. Every answer is coloured by depth or by what was guessed ahead and confirmed.

Ctrl-C ends an answer, which is kept as far as it came; Ctrl-D ends the talk. What is pasted is one message, however
many lines it has; several lines that are typed stand between two of three quotes. What the conversation holds already
is not read again.

/method d3:mean=0.9   how answers are decoded from here on; alone: how they are now
/system TEXT          what the model is told first; without a text: nothing
/reset                begin anew
/stats                what the conversation took so far
/save FILE            write the conversation, as JSON
/load FILE            go on with one that was saved, or with any list of messages
/help, /exit
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal.cli import notes
from shoal.cli.lines import Lines
from shoal.cli.options import common
from shoal.cli.options.method_list import label_of
from shoal.cli.options.parser import Parser
from shoal.cli.printers import add_color, printer_of, summary
from shoal.user_cache import expanded

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


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    common.add_method(parser, default="auto")
    common.add_sampling(parser)
    parser.set_defaults(max_new_tokens=1024)
    common.add_model(parser)
    add_color(parser)
    parser.add_argument("--quiet", action="store_true", help="no line of figures after each answer")


def run(args: argparse.Namespace) -> int:
    """Talk until there is nothing more to read."""
    engine = common.load_engine(args, chats=True)
    talk = Talk(args, engine)
    with Lines(COMMANDS) as lines:
        lines.say("Ctrl-C ends an answer, Ctrl-D the talk; /help shows what else there is.")
        for text in lines:
            try:
                if not talk.hear(text):
                    break
            except KeyboardInterrupt:  # before the answer began
                lines.say()
            except (ValueError, OSError) as error:  # a slip of the pen ends no conversation
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 0


class Talk:
    """A conversation, and what its commands do.

    Args:
        args: options of the command line.
        engine: the model.
    """

    def __init__(self, args: argparse.Namespace, engine: Engine) -> None:
        self._args, self._engine, self._method = args, engine, args.method
        self._session = engine.session(system=args.system, **common.sampling(args, engine))
        self._answers: list[Stats] = []

    def hear(self, text: str) -> bool:
        """Answer a text or obey a command; False where it ends the conversation.

        Raises:
            ValueError: the command is none, or cannot be done; the conversation stays as it was.
        """
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
            raise ValueError(f"there is no {word}; there are {', '.join(COMMANDS)}. To say it to the model, put it "
                             "between two lines of three quotes")
        orders[word](rest.strip())
        return True

    def answer(self, text: str) -> None:
        """Stream the answer to a text. An interrupt ends it, and what was said stays said."""
        with notes.held_back(), _interrupts() as heard:
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
        """Decode by another method from here on."""
        if word:
            method = common.method_from(word)
            self._engine.recipe(method, self._args.max_new_tokens)  # refused here, not in the middle of an answer
            self._method = method
        print(f"method: {label_of(self._method)}")

    def system(self, text: str) -> None:
        """Tell the model something else first; what was said stays."""
        rest = [message for message in self._session.messages if message["role"] != "system"]
        self._session.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def reset(self) -> None:
        """Forget all but what the model is told first."""
        self._session.messages = [message for message in self._session.messages if message["role"] == "system"]
        self._answers = []

    def stats(self) -> None:
        """Print what the answers took together."""
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
        if not path:
            raise ValueError("/save needs the name of a file")
        text = json.dumps({"messages": self._session.messages}, ensure_ascii=False, indent=1)
        _place(path).write_text(text + "\n", encoding="utf-8")
        print(f"saved {len(self._session.messages)} messages to {path}")

    def load(self, path: str) -> None:
        """Go on with another conversation."""
        if not path:
            raise ValueError("/load needs the name of a file")
        self._session.messages = messages_of(_place(path))
        self._answers = []
        print(f"{len(self._session.messages)} messages from {path}")


def _place(path: str) -> Path:
    """A path as a user types it."""
    found = expanded(path)
    if found is None:
        raise ValueError(f"{path!r} names a home folder, and there is none; write the path in full")
    return found


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Notes Ctrl-C, for the end of a step: an exception in its midst may be lost. A second one raises."""
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
    """The messages of a file: a list of them, or an object that has it as `messages`.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
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
