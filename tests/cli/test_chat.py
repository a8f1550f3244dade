"""`shoal chat`: turns of a session, its commands, interrupts, and a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import shoal
from shoal.cli import main, terminal
from shoal.cli.chat import ABOUT, COMMANDS, MOST_ROUNDS
from shoal.cli.console.files import MOST
from shoal.cli.console.lines import Lines

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}[assistant]"
LONGEST = 12
JOINED = "a\nb"


@pytest.fixture(scope="session")
def chat_folder(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def say(chat_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a chat with some lines; returns its stdout and stderr, as lines."""

    def talk(*lines: str, options: tuple[str, ...] = ()) -> tuple[str, list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        argv = ["chat", "--model", chat_folder, "--dtype", "float32", "--method", "full", "--max-new-tokens",
                str(LONGEST), "--temperature", "0", *options]
        assert main(argv) == 0
        out, err = capsys.readouterr()
        return out, err.splitlines()

    return talk


@pytest.fixture
def answers(chat_folder: str) -> Any:
    """The engine's own answer to some messages."""
    engine = shoal.load(chat_folder, dtype="float32")

    def ask(*messages: str, system: str | None = None, **options: Any) -> list[str]:
        session = engine.session(system=system, max_new_tokens=LONGEST, **options)
        return [session.send(message).text for message in messages]

    return ask


def test_turns_go_on_from_each_other(say: Any, answers: Any) -> None:
    out, err = say("one", "two", options=("--system", "brief"))
    assert out == "".join(f"{text}\n" for text in answers("one", "two", system="brief")) and err == []


def test_figures_stand_below_answers_where_they_are_asked_for(say: Any) -> None:
    figures = f"[{LONGEST} tokens, "
    assert [line.startswith(figures) for line in say("one", "two", options=("--stats",))[1]] == [True, True]
    assert say("one", options=("--stats", "--quiet"))[1] == []
    assert len(say("one", "/stats on", "one", "/stats off", "one")[1]) == 1
    assert say("/stats maybe")[1] == ["error: /stats takes on or off, not 'maybe'"]


def test_how_answers_are_drawn_stands_in_their_figures(
    say: Any, answers: Any, chat_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "drawn with" not in say("one", options=("--stats",))[1][0]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    argv = ["chat", "--stats", "--model", chat_folder, "--dtype", "float32", "--method", "full", "--max-new-tokens", str(LONGEST)]
    assert main(argv) == 0
    said, figures = capsys.readouterr()
    found = re.search(r"drawn with temperature 0.7, min_p 0.05, seed (\d+), ended", figures)
    assert found is not None
    assert said == f"{answers('one', temperature=0.7, min_p=0.05, seed=int(found[1]))[0]}\n"


def test_a_method_holds_from_where_it_is_named(say: Any, answers: Any) -> None:
    out, _ = say("one", "/method early_exit:exit_layer=3", "/reset", "one", "/method")
    full, shallow = answers("one")[0], answers("one", method={"method": "early_exit", "method_args": {"exit_layer": 3}})
    assert out == f"{full}\nmethod: early_exit:exit_layer=3\n{shallow[0]}\nmethod: early_exit:exit_layer=3\n"
    assert full != shallow[0]


def test_a_system_message_is_put_first_and_taken_away(say: Any, answers: Any) -> None:
    out, _ = say("/system brief", "one", "/reset", "one", "/reset", "/system", "one")
    with_it, without = answers("one", system="brief")[0], answers("one")[0]
    assert out == f"{with_it}\n{with_it}\n{without}\n" and with_it != without


def test_figures_of_all_answers(say: Any) -> None:
    out, _ = say("/stats", "one", "two", "/stats")
    assert out.startswith("no answer yet\n")
    assert re.search(rf"^2 answers, {2 * LONGEST} tokens, [\d.]+ tokens/s, 6\.00 of 6 layers on average, 0 of 0 "
                     r"guesses kept, [\d.]+ s reading$", out, re.MULTILINE)


def test_a_talk_is_saved_and_gone_on_with(say: Any, answers: Any, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    out, _ = say("one", f"/save {path}")
    first, second = answers("one", "two")
    assert json.loads(path.read_text("utf-8"))["messages"] == [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": first}]
    assert out.endswith(f"saved 2 messages to {path}\n")
    assert say(f"/load {path}", "two")[0] == f"2 messages from {path}\n{second}\n"


def test_slips_end_no_talk(say: Any, answers: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"messages": [{"role": "nobody", "content": 1}]}')
    out, err = say("/foo", "/method d4", "/method early_exit:exit_layer=99", "/save", "/load", f"/load {wrong}",
                   f"/load {tmp_path / 'none'}", "one")
    assert out == f"{answers('one')[0]}\n"
    assert [next(part for part in parts if part in line) for line, parts in zip(err, [
        ["there is no /foo; there are /exit, /file"], ["d4"], ["99"], ["/save needs the name of a file"],
        ["/load needs the name of a file"], ["holds no messages"], ["cannot read"],
    ], strict=True)]


def test_what_looks_like_a_command_can_be_said(say: Any, answers: Any) -> None:
    quoted = ('"""', "/help", '"""')
    assert say("/etc/hosts", "/reset", *quoted, "/exit", "never")[0] == "".join(
        f"{answers(text)[0]}\n" for text in ("/etc/hosts", "/help"))
    assert say('"""a', 'b"""')[0] == f"{answers(JOINED)[0]}\n"


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_ends_the_answer_alone(
    say: Any, answers: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    shown: list[Any] = []
    real = terminal.Printer.show

    def show(self: Any, step: Any) -> None:
        shown.append(step)
        real(self, step)
        for _ in range(times if len(shown) == 4 else 0):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal.Printer, "show", show)
    monkeypatch.setattr("shoal.decode.batch._MOST_STEPS", 1)  # so that no token has come that was not shown
    out, err = say("one", "/stats", "/reset", "one", options=("--stats",))
    whole = answers("one")[0]
    begun = out[: out.index("\n1 answer, 4 tokens")]
    assert begun and whole.startswith(begun) and begun != whole
    assert out.endswith(f"\n{whole}\n") and "interrupted]" in err[0]


def test_words_are_completed() -> None:
    lines = Lines(["/save", "/stats", "/help"])
    assert [lines.complete("/s", number) for number in range(3)] == ["/save", "/stats", None]
    assert lines.complete("", 0) is None


class Terminal:
    """A command in its own terminal, and its output."""

    def __init__(self, *argv: str, code: str = "") -> None:
        import pty

        self._master, slave = pty.openpty()
        command = ["-c", code] if code else ["-m", "shoal"]
        self.process = subprocess.Popen([sys.executable, *command, *argv], stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, env={**os.environ, "TERM": "xterm-256color"})
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


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
def test_a_terminal(chat_folder: str) -> None:
    """A prompt, an answer that Ctrl-C ends, another prompt, and Ctrl-D."""
    argv = ["chat", "--model", chat_folder, "--method", "full", "--max-new-tokens", "60000", "--color", "never"]
    with Terminal(*argv) as terminal:
        assert b"Ctrl-D" in terminal.until(lambda found: b">>> " in found)
        terminal.type(b"one\n")
        terminal.until(lambda found: len(found.partition(b"one\r\n")[2]) > 40)  # it answers
        terminal.process.send_signal(signal.SIGINT)
        assert b"interrupted]" in terminal.until(lambda found: b">>> " in found)
        terminal.type(b"\x04")
        terminal.until(lambda found: b"\n" in found)
        assert terminal.process.wait(timeout=60) == 0


PASTES = {
    "lines": ("first\nsecond line\n\n  indented", "first\nsecond line\n\n  indented"),
    "a command first": ("/reset\nand more", "/reset\nand more"),
    "quotes first": ('"""Words of a module."""\nx = 1', '"""Words of a module."""\nx = 1'),
    "in quotes": ('"""\n/help\n"""', "/help"),
    "a tabulator": ("a\tb\nc", "a\tb\nc"),
    "one line": ("just one", "just one"),
}
WITHOUT_READLINE = ("import sys; sys.modules['readline'] = None; from shoal.cli import main; "
                    "sys.exit(main(sys.argv[1:]))")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("code", ["", WITHOUT_READLINE], ids=["readline", "none"])
def test_a_paste_is_one_message(chat_folder: str, tmp_path: Path, code: str) -> None:
    if not code and getattr(pytest.importorskip("readline"), "backend", "readline") != "readline":
        pytest.skip("this Python edits lines by another library")
    argv = ["chat", "--model", chat_folder, "--method", "full", "--max-new-tokens", "3", "--color", "never"]
    saved = tmp_path / "talk.json"
    with Terminal(*argv, code=code) as terminal:
        assert b"\x1b[?2004h" in terminal.until(lambda found: b">>> " in found)  # the terminal is asked to mark pastes
        for text, _ in PASTES.values():
            pasted = text.replace("\n", "\r").encode()  # as terminals send a line's end
            terminal.type(b"\x1b[200~" + pasted + b"\x1b[201~")
            terminal.type(b"\r")
            terminal.until(lambda found: found.count(b"ended by") == 1 and b">>> " in found.partition(b"ended by")[2])
        terminal.type(f"/save {saved}\r".encode())
        terminal.until(lambda found: b"saved" in found)
    heard = [one["content"] for one in json.loads(saved.read_text("utf-8"))["messages"] if one["role"] == "user"]
    assert heard == [wanted for _, wanted in PASTES.values()]
