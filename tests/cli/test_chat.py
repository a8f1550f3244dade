"""`shoal chat`: turns of a session, its commands, interrupts, and a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shoal
from shoal.cli import main, terminal
from shoal.cli.chat import ABOUT, COMMANDS
from shoal.cli.console.files import MOST
from shoal.cli.console.lines import Lines
from terminals import Terminal, without

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


def test_figures_stand_below_answers_where_they_are_asked_for(say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    figures = f"[{LONGEST} tokens, "
    assert [line.startswith(figures) for line in say("one", "two", options=("--stats",))[1]] == [True, True]
    assert say("one", options=("--stats", "--quiet"))[1] == []
    assert main(["chat", "--help-all"]) == 0
    assert "--stats" in (told := capsys.readouterr().out) and "--quiet" not in told
    assert len(say("one", "/stats on", "one", "/stats off", "one")[1]) == 1
    assert say("/stats maybe")[1] == ["error: /stats takes on or off, not 'maybe'"]


def test_how_answers_are_drawn_stands_in_their_figures(
    say: Any, answers: Any, chat_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "drawn with" not in say("one", options=("--stats",))[1][0]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    argv = ["chat", "--stats", "--model", chat_folder, "--dtype", "float32", "--method", "full", "--max-new-tokens",
            str(LONGEST)]
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
        ["there is no /foo; there are /audio, /exit, /file"], ["d4"], ["99"], ["/save needs the name of a file"],
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


FENCED = "notes.md:\n````\na\n```\nb\n```\n````\n\nwhat?"


def test_a_file_goes_with_the_next_message_alone(say: Any, answers: Any, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("a\n```\nb\n```\n")
    out, err = say(f"/file '{path}'", "/file", "what?", "/file", "and?")
    first, second = answers(FENCED, "and?")
    listed = "with the next message: notes.md (/reset drops it)\n"
    assert out == f"{2 * listed}{first}\nwith the next message: no file\n{second}\n" and err == []
    assert say(f"/file {path}", "/reset", "what?")[0] == f"{listed}{answers('what?')[0]}\n"


@pytest.mark.parametrize(("content", "why"), [
    (b"\x89PNG\r\n\x1a\n\x00", "is no text in UTF-8"), (b"a\x00b", "is no text in UTF-8"),
    (b"x" * ((MOST << 10) + 1), f"is larger than {MOST} kB"), (None, "cannot read"), ("folder", "is a folder"),
])
def test_a_file_that_cannot_go_with_a_message(say: Any, answers: Any, tmp_path: Path, content: Any, why: str) -> None:
    path = tmp_path / "some.bin"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    out, err = say(f"/file {path}", "one")
    assert len(err) == 1 and why in err[0] and out == f"{answers('one')[0]}\n"


def test_a_file_of_just_the_bound_goes(say: Any, tmp_path: Path) -> None:
    path = tmp_path / "full.txt"
    path.write_bytes(b"x" * (MOST << 10))
    assert say(f"/file {path}") == ("with the next message: full.txt (/reset drops it)\n", [])


def test_pictures_are_refused_by_models_of_text_in_a_line(say: Any) -> None:
    out, err = say("/image cat.png")
    assert out == "" and len(err) == 1 and "Shoal reads text alone with it. Leave pictures out" in err[0]


@pytest.fixture(scope="session")
def other_folder(chat_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(chat_folder, folder)
    engine = AutoModelForCausalLM.from_pretrained(chat_folder)
    with torch.no_grad():
        engine.lm_head.weight.mul_(-1)
    engine.save_pretrained(folder)
    return str(folder)


def test_another_model_goes_on_with_the_conversation(
    say: Any, answers: Any, chat_folder: str, other_folder: str
) -> None:
    out, err = say("/system brief", "one", f"/model {other_folder}", "two", "/model", f"/model {chat_folder}", "/stats")
    first = answers("one", system="brief")[0]
    session = shoal.load(other_folder, dtype="float32").session(max_new_tokens=LONGEST)
    session.messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "one"},
                        {"role": "assistant", "content": first}]
    second = session.send("two").text
    assert out.startswith(f"{first}\nmodel: {other_folder}\n{second}\nmodel: {other_folder}\nmodel: {chat_folder}\n2 ")
    assert err == [] and second != answers("one", "two", system="brief")[1]


def test_a_model_that_is_not_there_leaves_the_former_one(say: Any, answers: Any, tmp_path: Path) -> None:
    out, err = say("one", f"/model {tmp_path / 'none'}", "two")
    assert out == "".join(f"{text}\n" for text in answers("one", "two"))
    assert len(err) == 1 and "none" in err[0]


def test_help_lists_every_command_once(say: Any) -> None:
    out, _ = say("/help")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("/")] == [one.split()[0] for one in ABOUT]
    assert len(set(COMMANDS)) == len(ABOUT) == len([line for line in out.splitlines() if line.startswith("/")])


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
def test_alt_enter_begins_a_line_and_enter_sends(chat_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    saved = tmp_path / "talk.json"
    argv = ["chat", "--stats", "--model", chat_folder, "--method", "full", "--max-new-tokens", "3", "--color", "never"]
    with Terminal(*argv) as terminal:
        terminal.until(lambda found: b">>>" in found)
        terminal.type(b"first\x1b\rsecond\x1b\r\x1b\rthird\r")
        terminal.until(lambda found: b"ended by" in found and b">>>" in found.partition(b"ended by")[2])
        terminal.type(b"/sa\t")
        terminal.until(lambda found: b"ve" in found)  # completed, which takes a while on a busy machine
        terminal.type(f" {saved}\r".encode())
        terminal.until(lambda found: b"saved 2 messages" in found)
    assert json.loads(saved.read_text("utf-8"))["messages"][0]["content"] == "first\nsecond\n\nthird"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
def test_help_and_figures_wrap_by_words(chat_folder: str) -> None:
    argv = ["chat", "--stats", "--model", chat_folder, "--method", "full", "--max-new-tokens", "3", "--color", "never"]
    with Terminal(*argv, code=READLINE, columns=44) as terminal:
        hello = terminal.until(lambda found: b">>>" in found)
        terminal.type(b"/help\r")
        told = terminal.until(lambda found: found.endswith(b">>> ") and b"/exit" in found)
        terminal.type(b"one\r")
        figures = terminal.until(lambda found: found.endswith(b">>> ") and b"ended by" in found)
    lines = [line for text in (hello, told, figures[figures.index(b"[3 tokens") :])
             for line in text.decode(errors="replace").splitlines()]
    assert max(map(len, lines)) <= 44
    assert " ".join(told.decode().split()).count("add a text file to the next message; alone: list what is added") == 1
    assert "layers on average" in " ".join(figures.decode(errors="replace").split())


def test_words_are_completed() -> None:
    lines = Lines(["/save", "/stats", "/help"])
    assert [lines.complete("/s", number) for number in range(3)] == ["/save", "/stats", None]
    assert lines.complete("", 0) is None


READLINE, PLAIN = without("prompt_toolkit"), without("prompt_toolkit", "readline")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("code", ["", READLINE], ids=["prompt_toolkit", "readline"])
def test_a_terminal(chat_folder: str, code: str) -> None:
    """A prompt, an answer that Ctrl-C ends, another prompt, and Ctrl-D."""
    if not code:
        pytest.importorskip("prompt_toolkit")
    argv = ["chat", "--model", chat_folder, "--method", "full", "--max-new-tokens", "60000", "--color", "never",
            "--stats"]
    with Terminal(*argv, code=code) as terminal:
        said = terminal.until(lambda found: b">>>" in found)
        assert b"Ctrl-D" in said and (b"three quotes" if code else b"Alt-Enter") in said
        terminal.type(b"one\r")
        terminal.until(lambda found: len(found) > 600)  # it answers
        terminal.process.send_signal(signal.SIGINT)
        assert b"interrupted]" in terminal.until(lambda found: b">>>" in found)
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
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("code", ["", READLINE, PLAIN], ids=["prompt_toolkit", "readline", "none"])
def test_a_paste_is_one_message(chat_folder: str, tmp_path: Path, code: str) -> None:
    if not code:
        pytest.importorskip("prompt_toolkit")
    if code == READLINE and getattr(pytest.importorskip("readline"), "backend", "readline") != "readline":
        pytest.skip("this Python edits lines by another library")
    argv = ["chat", "--stats", "--model", chat_folder, "--method", "full", "--max-new-tokens", "3", "--color", "never"]
    saved = tmp_path / "talk.json"
    with Terminal(*argv, code=code) as terminal:
        assert b"\x1b[?2004h" in terminal.until(lambda found: b">>>" in found)  # the terminal is asked to mark pastes
        for text, _ in PASTES.values():
            pasted = text.replace("\n", "\r").encode()  # as terminals send a line's end
            terminal.type(b"\x1b[200~" + pasted + b"\x1b[201~")
            terminal.type(b"\r")
            terminal.until(lambda found: found.count(b"ended by") == 1 and b">>>" in found.partition(b"ended by")[2])
        terminal.type(f"/save {saved}\r".encode())
        terminal.until(lambda found: b"saved" in found)
    heard = [one["content"] for one in json.loads(saved.read_text("utf-8"))["messages"] if one["role"] == "user"]
    assert heard == [wanted for _, wanted in PASTES.values()]
