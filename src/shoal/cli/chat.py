"""Chat with a model in the terminal. Answers are coloured by depth, and green where tokens were drafted and accepted.

Ctrl-C ends an answer, whose text so far is kept; Ctrl-D ends the chat; `/help` lists its commands.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shoal.cli.console.files import attached, film, picture, place, sound, with_shown
from shoal.cli.console.lines import Lines
from shoal.cli.options import bring, common, tool_servers
from shoal.cli.options.parser import Parser
from shoal.cli.terminal import add_color, held_back, printer_of, summary

if TYPE_CHECKING:
    from shoal.cli.console.calls import ToolUse
    from shoal.engine.engine import Engine
    from shoal.engine.session import Turn
    from shoal.serve.protocol.thoughts import AnswerReader
    from shoal.types import Stats

EXAMPLES = """examples:
  shoal chat
  shoal chat --model path/to/model --system "Answer in one sentence."
  shoal chat --model path/to/model.gguf --method d3 --mean 0.9 --temperature 0.7
  shoal chat --model qwen3:4b --mcp servers.json
"""
ABOUT = {
    "/file PATH": "add a text file to the next message; alone: list what is added",
    "/model NAME": "go on with another model; alone: show which one answers",
    "/method NAME": "set the method for further answers, such as d3:mean=0.9; alone: show it",
    "/system TEXT": "set the system message; without a text: remove it",
    "/tools": "list the tools of MCP servers, which --mcp starts",
    "/stats": "show what the conversation cost; /stats on: show figures after each answer; /stats off: no more",
    "/reset": "start a new conversation",
    "/save PATH": "write the conversation as JSON",
    "/load PATH": "continue a saved conversation, or any list of messages",
    "/audio PATH": "add a sound to the next message, where the model hears",
    "/image PATH": "add a picture to the next message, where the model sees; alone: list what is added",
    "/video PATH": "add a film to the next message, where the model sees films",
    "/help": "show this",
    "/exit": "end the chat, as Ctrl-D does",
}
"""The commands, and what each does."""
COMMANDS = tuple(sorted(usage.split()[0] for usage in ABOUT))
_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")
"""What is read of a saved message."""
MOST_ROUNDS = 8
"""Answers in a row that may call tools, before the person must say something."""
_COMMAND = re.compile(r"/[a-z]+")


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--stats", action="store_true", help="show a line of figures after each answer")
    common.add_method(parser, default="auto")
    common.add_sampling(parser)
    parser.set_defaults(max_new_tokens=1024)
    common.add_adapter(common.add_model(parser))
    add_color(parser)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)  # as scripts may say
    tool_servers.add_arguments(parser)
    parser.show_usual("--model", "--system", "--method", "--max-new-tokens", "--temperature", "--seed", "--stats",
                      "--color", "--mcp", "--mcp-allow")


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends."""
    with Lines(COMMANDS) as lines, _talking(args, lines.ask) as talk:
        lines.say(_wrapped(f"Ctrl-C ends an answer, Ctrl-D the chat; {lines.keys}; /help lists the commands."))
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
    with _talking(args, lambda _: "") as talk:
        talk.answer(prompt)
    return 0


@contextmanager
def _talking(args: argparse.Namespace, ask: Callable[[str], str]) -> Iterator[Talk]:
    """A conversation, with the tools of the servers that --mcp names while it lasts."""
    configs = tool_servers.configs(args)
    engine = common.load_engine(args, chats=True)
    talk = Talk(args, engine)
    with tool_servers.running(args, configs) as servers:
        if servers is not None:
            from shoal.cli.console.calls import ToolUse

            talk.use(ToolUse(servers, ask))
        yield talk


class Talk:
    """A conversation and its commands."""

    def __init__(self, args: argparse.Namespace, engine: Engine) -> None:
        self._args, self._engine, self._method = args, engine, args.method
        self._session = engine.session(system=args.system, **common.sampling(args, engine))
        self._answers: list[Stats] = []
        self._files: list[str] = []
        self._shown: dict[str, str] = {}
        self._figures = args.stats and not args.quiet
        self._tools: ToolUse | None = None

    def use(self, tools: ToolUse) -> None:
        """Let the model call tools; ValueError for a model that calls none."""
        self._session.tools = tools.functions(self._engine.tokenizer)
        self._tools = tools

    def hear(self, text: str) -> bool:
        """Answer a text or run a command, False if that ends the chat; a ValueError leaves the chat unchanged."""
        word, _, rest = text.partition(" ")
        if not _COMMAND.fullmatch(word) or "\n" in text:
            self.answer(text.strip())
            return True
        if word in ("/exit", "/quit", "/bye"):
            return False
        orders: dict[str, Callable[[str], None]] = {
            "/audio": self.audio, "/file": self.file, "/help": lambda _: print(help_text()), "/image": self.image,
            "/load": self.load, "/method": self.method, "/model": self.model, "/reset": lambda _: self.reset(),
            "/save": self.save, "/stats": self.stats, "/system": self.system, "/tools": lambda _: self.tools(),
            "/video": self.video,
        }
        if word not in orders:
            raise ValueError(f"there is no {word}; there are {', '.join(COMMANDS)}. To send it to the model, put it "
                             "between two lines of three quotes")
        orders[word](rest.strip())
        return True

    def answer(self, text: str) -> None:
        """Stream the answer to a text, and make the calls in it. An interrupt ends it; the text so far stays."""
        before = list(self._session.messages)
        content = with_shown(self._shown.values(), "\n\n".join([*self._files, text]))
        said: list[dict[str, Any]] = [{"role": "user", "content": content}]
        try:
            for _ in range(MOST_ROUNDS):
                calls = self._answer(said)
                if not calls or self._tools is None:
                    self._forget()
                    return
                said = self._results(self._tools, calls)
        except ValueError:
            self._session.messages = before
            raise
        self._forget()
        self._session.messages += said
        print(f"[{MOST_ROUNDS} answers in a row called tools; say how to go on]", file=sys.stderr)

    def _answer(self, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Stream one answer; the calls in it, none if it was interrupted."""
        with held_back(), _interrupts() as heard:
            if self._tools is not None:
                self._session.tools = self._tools.functions(self._engine.tokenizer)
            turn = self._session.stream(said, method=self._method)
            printer = printer_of(self._args, self._engine, self._method)
            told = _Told(self._reader(turn, said))
            try:
                with suppress(KeyboardInterrupt):
                    for step in turn:
                        printer.show(replace(step, text=told.text(step.text, step.finish_reason)))
                        if heard:
                            break
            finally:
                turn.close()
                if told.shown or not told.calls:
                    printer.close()
        if not turn.result.tokens:
            return []
        self._answers.append(turn.result.stats)
        if self._figures:
            print(_wrapped(summary(turn.result)), file=sys.stderr)
        if heard or not told.calls:
            return []
        self._session.messages[-1] = {"role": "assistant", "content": told.said, "tool_calls": told.calls}
        return told.calls

    def _reader(self, turn: Turn, said: list[dict[str, Any]]) -> AnswerReader | None:
        """What finds calls in an answer; None without tools."""
        if not self._session.tools or self._tools is None:
            return None
        return self._tools.reader(self._engine.tokenizer, turn.tokens, [*self._session.messages, *said])

    def _results(self, tools: ToolUse, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A message with the result of each call. An interrupt ends the turn; the conversation then says so."""
        made = list[dict[str, Any]]()
        tokenizer, context = self._engine.tokenizer, self._engine.runner.max_positions
        try:
            for call in calls:
                made.append(tools.result(call, tokenizer, context))
        except KeyboardInterrupt:
            self._session.messages += [*made, *(tools.no_result(call) for call in calls[len(made) :])]
            raise
        return made

    def tools(self) -> None:
        """List the tools."""
        print("no MCP servers run; shoal chat --mcp CONFIG.json starts some" if self._tools is None
              else self._tools.listed())

    def file(self, path: str) -> None:
        """Add a text file to the next message; without a path, say what is added."""
        if path:
            self._files.append(attached(place("/file", path)))
        self._list_added()

    def image(self, path: str) -> None:
        """Add a picture to the next message; without a path, say what is added."""
        if path:
            found = place("/image", path)
            self._shown[found.name] = picture(found, self._engine)
        self._list_added()

    def audio(self, path: str) -> None:
        """Add a sound to the next message; without a path, say what is added."""
        if path:
            found = place("/audio", path)
            self._shown[found.name] = sound(found, self._engine)
        self._list_added()

    def video(self, path: str) -> None:
        """Add a film to the next message; without a path, say what is added."""
        if path:
            found = place("/video", path)
            self._shown[found.name] = film(found, self._engine)
        self._list_added()

    def _list_added(self) -> None:
        names = ", ".join([*self._shown, *(text.partition(":\n")[0] for text in self._files)])
        print(f"with the next message: {names or 'no file'}{names and ' (/reset drops it)'}")

    def _forget(self) -> None:
        """Leave no file added."""
        self._files, self._shown = [], {}

    def model(self, name: str) -> None:
        """Go on with another model, if one is given, and show which one answers.

        The former one is given up first, so that the memory need not hold both, and loaded again if that fails.
        """
        if name:
            bring.ready(name, yes=self._args.yes)
            former, messages = vars(self._args).copy(), self._session.messages
            self._args.model, self._args.revision = name, None
            try:
                self._load(messages)
            except BaseException:
                vars(self._args).update(former)
                self._load(messages)
                raise
        print(f"model: {self._engine.model_name or 'the default model'}")

    def _load(self, messages: list[dict[str, Any]]) -> None:
        """Load the model that the options name, to go on with a conversation."""
        vars(self).pop("_session", None)
        vars(self).pop("_engine", None)
        gc.collect()  # an engine and its methods hold each other
        self._engine = common.load_engine(self._args, chats=True)
        self._engine.recipe(self._method, self._args.max_new_tokens)  # refused here, not in the middle of an answer
        self._session = self._engine.session(**common.sampling(self._args, self._engine))
        self._session.messages = messages
        if self._tools is not None:
            self._session.tools = self._tools.functions(self._engine.tokenizer)

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
        self._forget()

    def stats(self, wanted: str) -> None:
        """Print the total cost of the answers, or say whether each shows its own."""
        if wanted:
            if wanted not in ("on", "off"):
                raise ValueError(f"/stats takes on or off, not {wanted!r}")
            self._figures = wanted == "on"
            return
        if not self._answers:
            print("no answer yet")
            return

        def total(name: str) -> float:
            return float(sum(getattr(stats, name) for stats in self._answers))

        count, seconds = len(self._answers), total("decode_seconds")
        pace = (total("new_tokens") - count) / seconds if seconds else 0
        depth = f"{total('layer_tokens') / total('new_tokens'):.2f} of {self._answers[0].num_layers}"
        print(_wrapped(f"{count} answer{'s' * (count > 1)}, {total('new_tokens'):.0f} tokens, {pace:.1f} tokens/s, "
              f"{depth} layers on average, {total('accepted'):.0f} of {total('drafted'):.0f} guesses kept, "
              f"{total('prefill_seconds'):.2f} s reading"))

    def save(self, path: str) -> None:
        """Write the conversation."""
        text = json.dumps({"messages": self._session.messages}, ensure_ascii=False, indent=1)
        place("/save", path).write_text(text + "\n", encoding="utf-8")
        print(f"saved {len(self._session.messages)} messages to {path}")

    def load(self, path: str) -> None:
        """Continue another conversation."""
        self._session.messages = messages_of(place("/load", path))
        self._answers = []
        print(f"{len(self._session.messages)} messages from {path}")


class _Told:
    """What of an answer is said, and which tools it calls; `reader` is None where it calls none."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader, self.said, self.shown = reader, "", False
        self.calls: list[dict[str, Any]] = []

    def text(self, piece: str, finish: str | None) -> str:
        """The text to show for a piece."""
        if self._reader is None:
            self.shown = True
            return piece
        delta = self._reader.read(piece, finish is not None, finish == "length")
        for call in delta.get("tool_calls", []):
            function = call["function"]
            with suppress(ValueError):  # no object: as text the tool itself will refuse it
                function = {**function, "arguments": json.loads(function["arguments"])}
            self.calls.append({"id": call["id"], "type": "function", "function": function})
        self.said += delta.get("content", "")
        text = str(delta.get("reasoning_content", "") + delta.get("content", ""))
        self.shown = self.shown or bool(text)
        return text


def help_text() -> str:
    """The commands, wrapped by words."""
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(text, width, initial_indent=f"{usage:<14}", subsequent_indent=" " * 14)
                     for usage, text in ABOUT.items())


def _wrapped(line: str) -> str:
    """A line that breaks between words at the terminal's width; whole where stderr is no terminal."""
    return textwrap.fill(line, shutil.get_terminal_size().columns, break_long_words=False,
                         break_on_hyphens=False) if sys.stderr.isatty() else line


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


def messages_of(path: Path) -> list[dict[str, Any]]:
    """The messages of a JSON file: a list, or an object with one as `messages`; ValueError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(f"{path} holds no messages: a list of objects with a role (system, user, assistant) and a "
                         "text as content")
    return [{key: message[key] for key in _KEPT if key in message} for message in messages]


def _is_message(found: object) -> bool:
    return (isinstance(found, dict) and found.get("role") in ("system", "user", "assistant", "tool")
            and (isinstance(found.get("content"), str) or _are_parts(found.get("content"))))


def _are_parts(found: object) -> bool:
    """Whether a message's content is texts, pictures, films and sounds, as `/save` writes them."""
    return isinstance(found, list) and bool(found) and all(map(_is_part, found))


def _is_part(found: object) -> bool:
    if not isinstance(found, dict) or found.get("type") not in ("text", "image_url", "video_url", "audio_url"):
        return False
    shown = found.get(found["type"])
    text = shown if found["type"] == "text" else shown.get("url") if isinstance(shown, dict) else None
    return isinstance(text, str)
