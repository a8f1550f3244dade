"""`shoal pull`, `rm`, `run`, and `--model` with names: what is here runs without the network, the rest is offered."""

from __future__ import annotations

import io
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

import shoal
from gguf_words import spoken
from hub_server import Hub
from shoal import heap
from shoal.cli import main
from shoal.cli.options import bring
from shoal.hub.names import parse
from shoal.hub.places import here

NAME = "org/real-GGUF:Q8_0"
FILE = "real-Q8_0.gguf"
SHORT = ("--temperature", "0", "--max-new-tokens", "3", "--dtype", "float32")


@pytest.fixture
def real(at_hub: Hub, tmp_path: Path) -> Hub:
    """The server, with a model that runs."""
    at_hub.repositories["org/real-GGUF"] = {FILE: spoken(tmp_path).read_bytes()}
    return at_hub


@pytest.fixture(autouse=True)
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers to questions; where there are none, there is no terminal."""
    answers: list[str] = []
    monkeypatch.setattr(bring, "_can_ask", lambda: bool(answers))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "readline", lambda: answers.pop(0) + "\n", raising=False)
    return answers


def failed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_pull_says_what_it_fetches_and_where_it_is(at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/tiny-GGUF"]) == 0
    shown = capsys.readouterr()
    place = Path(shown.out.strip())
    assert place.name == "Tiny-Q4_K_M.gguf" and place.is_file()
    lines = shown.err.splitlines()
    assert lines[0] == "org/tiny-GGUF: Tiny-Q4_K_M.gguf, 3 files, 181.4 kB (Q4_K_M, the usual choice)"
    assert lines[1] == "with mmproj-F16.gguf, which reads pictures; shoal pull --no-mmproj leaves it out"
    assert lines[-1] == "done: shoal chat --model org/tiny-GGUF"
    assert main(["pull", "org/tiny-GGUF", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["repository"], found["nbytes"], found["path"]) == ("org/tiny-GGUF", 181_400, str(place))
    assert (place.parent / "mmproj-F16.gguf").is_file()


def test_pull_without_what_reads_pictures(at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/tiny-GGUF", "--no-mmproj"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[1] == "not fetched: mmproj-F16.gguf, which reads pictures"
    assert not (Path(shown.out.strip()).parent / "mmproj-F16.gguf").exists()


def test_pull_says_which_quantisation_it_takes(at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/big-GGUF"]) == 0
    assert "3 files, 15.0 kB (Q8_0, the nearest to Q4_K_M it has)" in capsys.readouterr().err


def test_pull_says_what_memory_it_would_take(
    at_hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bring, "available", lambda: 200_000)
    assert main(["pull", "org/tiny-GGUF"]) == 0
    assert "note: it takes about 226.8 kB of memory, and 200.0 kB are free on this machine" in capsys.readouterr().err
    assert heap.available() != 200_000


@pytest.mark.parametrize("name", ["granite4", "./models/a.gguf", "nobody/nothing"])
def test_pull_of_no_model(name: str, at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert failed(capsys, "pull", name).startswith("shoal pull: error: ")


def test_an_interrupted_pull_says_how_to_go_on(
    at_hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.file_download.http_get", interrupted)
    assert main(["pull", "org/tiny-GGUF"]) == 130
    assert "what is here is kept: shoal pull org/tiny-GGUF goes on from it" in capsys.readouterr().err


def test_a_model_by_name_runs_without_the_network(real: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", NAME]) == 0
    asked = len(real.heard)
    capsys.readouterr()
    assert main(["generate", "--model", NAME, "--json", *SHORT, "The quick"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == NAME and len(real.heard) == asked
    assert tuple(found["tokens"]) == shoal.load(here(parse(NAME)), dtype="float32").generate(
        [{"role": "user", "content": "The quick"}], max_new_tokens=3, temperature=0).tokens
    with pytest.raises(ValueError, match=r"its weights take [1-9]"):  # the file's own size counts under a limit
        shoal.load(NAME, memory=1000)


def test_a_folder_by_name_runs_without_the_network(
    at_hub: Hub, tiny_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at_hub.repositories["org/small"] = {path.name: path.read_bytes() for path in Path(tiny_folder).iterdir()}
    assert main(["pull", "org/small"]) == 0
    asked = len(at_hub.heard)
    capsys.readouterr()
    assert main(["generate", "--model", "org/small", "--json", *SHORT, "abc"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "org/small" and len(at_hub.heard) == asked


@pytest.mark.quick(12)
@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch", "recommend"])
def test_without_a_terminal_one_line_says_how(command: str, real: Hub, capsys: pytest.CaptureFixture[str],
                                              tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    more = {"generate": ["text"], "serve": ["--port", "0"],
            "batch": [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]}
    said = failed(capsys, command, "--model", NAME, *more.get(command, []))
    assert f"the model {NAME!r}: it is not on this machine. Fetch it with: shoal pull {NAME}" in said
    assert real.heard == []


def test_replicas_find_the_model_here(real: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """What could ask, or fetch, is the command alone: its processes have no terminal."""
    said = failed(capsys, "serve", "--model", NAME, "--port", "0", "--replicas", "2")
    assert f"Fetch it with: shoal pull {NAME}" in said


def test_pull_of_what_is_no_name_of_the_hub(
    at_hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known model that is here, one that is not, and a file."""
    monkeypatch.setenv("SHOAL_MODELS", str(tmp_path))
    (tmp_path / "mine.gguf").write_bytes(b"mine")
    assert main(["pull", "mine"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "mine.gguf")
    assert f"Put gemma-3-270m-q4_k_m.gguf into {tmp_path}" in failed(capsys, "pull", "gemma3-270m")
    assert at_hub.heard == []


def test_on_a_terminal_it_asks(real: Hub, on_a_terminal: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    on_a_terminal.append("n")
    assert main(["generate", "--model", NAME, *SHORT, "The"]) == 2
    assert re.search(r"fetch \S+ MB now\? \[Y/n\] ", capsys.readouterr().err) and here(parse(NAME)) is None
    on_a_terminal.append("")
    assert main(["generate", "--model", NAME, *SHORT, "The"]) == 0


def test_yes_asks_nothing(real: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", NAME, "--yes", *SHORT, "The"]) == 0
    assert "now?" not in capsys.readouterr().err


def test_run_is_a_chat(
    real: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shoal.toml").write_text('model = "of/others"')
    monkeypatch.setenv("SHOAL_CONFIG", str(tmp_path / "shoal.toml"))
    assert main(["run", NAME, "The quick", "--yes", *SHORT]) == 0
    once = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("The quick\n/exit\n"))
    assert main(["chat", "--model", NAME, *SHORT]) == 0
    assert once and capsys.readouterr().out == once
    monkeypatch.setattr("sys.stdin", io.StringIO("The quick\n/exit\n"))
    assert main(["run", NAME, *SHORT]) == 0
    assert capsys.readouterr().out == once


def test_the_library_names_the_command(at_hub: Hub) -> None:
    for name in (NAME, "qwen3:4b"):
        with pytest.raises(shoal.Unsupported, match=f"it is not on this machine. Fetch it with: shoal pull {name}$"):
            shoal.load(name)
    with pytest.raises(ValueError, match="'granite4' may be granite4:micro, granite4:tiny-h"):
        shoal.load("granite4")


def test_rm_of_one_file_of_several(at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for quant in ("Q4_K_M", "Q8_0"):
        assert main(["pull", f"org/tiny-GGUF:{quant}"]) == 0
    capsys.readouterr()
    assert main(["rm", "org/tiny-GGUF:Q4_K_M", "--yes"]) == 0
    assert capsys.readouterr().out == "removed org/tiny-GGUF: Tiny-Q4_K_M.gguf, 180.0 kB\n"
    left = here(parse("org/tiny-GGUF:Q8_0"))
    assert here(parse("org/tiny-GGUF:Q4_K_M")) is None and left is not None
    assert left.with_name("mtp-Tiny-Q8_0.gguf").is_file()  # it belongs to both


def test_rm_leaves_bytes_that_another_file_has(at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    at_hub.repositories["org/twins"] = {"A-Q8_0.gguf": b"same", "B-Q8_0.gguf": b"same"}
    for name in ("A", "B"):
        assert main(["pull", f"org/twins:{name}-Q8_0.gguf"]) == 0
    assert main(["rm", "org/twins:A-Q8_0.gguf", "--yes"]) == 0
    assert here(parse("org/twins:A-Q8_0.gguf")) is None
    assert here(parse("org/twins:B-Q8_0.gguf")).read_bytes() == b"same"


def test_rm_of_the_last_one_leaves_nothing(
    at_hub: Hub, on_a_terminal: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["pull", "org/tiny-GGUF:Q4_K_M"]) == 0
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    on_a_terminal.extend(["", "y"])
    assert main(["rm", "org/tiny-GGUF:Q4_K_M"]) == 2
    assert "nothing is removed" in capsys.readouterr().err and here(parse("org/tiny-GGUF:Q4_K_M")) is not None
    assert main(["rm", "org/tiny-GGUF:Q4_K_M"]) == 0
    assert not (Path(constants.HF_HUB_CACHE) / "models--org--tiny-GGUF").exists()


def test_rm_of_one_of_two_repositories_with_the_same_commit(at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """As a renamed one and its earlier name have: `huggingface_hub` alone would take either."""
    for removed, kept in (("org/tiny", "org/big-GGUF"), ("org/big-GGUF", "org/tiny")):
        for name in (removed, kept):
            assert main(["pull", name]) == 0
        assert main(["rm", removed, "--yes"]) == 0
        assert here(parse(removed)) is None and here(parse(kept)) is not None


def test_rm_of_an_unfinished_pull(at_hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    blobs = Path(constants.HF_HUB_CACHE) / "models--org--tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "ab.part").write_bytes(b"begun")
    assert main(["rm", "org/tiny-GGUF", "--yes"]) == 0
    assert list(blobs.iterdir()) == []
    assert main(["pull", "org/tiny-GGUF"]) == 0
    (blobs / "ab.part").write_bytes(b"begun")
    assert main(["rm", "org/tiny-GGUF", "--yes"]) == 0
    assert not blobs.exists()


def test_rm_touches_nothing_of_others(
    at_hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "models"
    studio = Path(os.environ["HOME"]) / ".lmstudio" / "models" / "org" / "mine"
    for folder in (own, studio):
        folder.mkdir(parents=True)
        (folder / "mine-Q8_0.gguf").write_bytes(b"mine")
    monkeypatch.setenv("SHOAL_MODELS", str(own))
    assert "which is not in the Hub's cache. Remove the file by hand" in failed(capsys, "rm", "mine-Q8_0", "--yes")
    assert "which LM Studio keeps. Remove it there" in failed(capsys, "rm", "org/mine:Q8_0", "--yes")
    assert "Ollama keeps it. Remove it with: ollama rm qwen3:4b" in failed(capsys, "rm", "ollama:qwen3:4b", "--yes")
    assert "the Hub's cache holds none of it" in failed(capsys, "rm", "org/nothing", "--yes")
    assert "nobody can be asked here; add --yes" not in failed(capsys, "rm", "org/nothing")
    assert main(["pull", "org/tiny-GGUF"]) == 0
    capsys.readouterr()
    assert "nobody can be asked here; add --yes" in failed(capsys, "rm", "org/tiny-GGUF")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pty")
def test_a_real_terminal_is_asked_and_shown_a_bar(real: Hub, tmp_path: Path) -> None:
    import fcntl
    import pty
    import struct
    import termios

    env = {**os.environ, "HF_ENDPOINT": real.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"),
           "HF_HUB_CACHE": str(tmp_path / "home"), "NO_PROXY": "*"}
    main_end, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a bar needs a width
    command = [sys.executable, "-m", "shoal", "generate", "--model", NAME, *SHORT, "The"]
    process = subprocess.Popen(command, env=env, stdin=other, stdout=other, stderr=other, close_fds=True)
    os.close(other)
    shown = read_until(main_end, "[Y/n]")
    os.write(main_end, b"y\n")
    shown += read_until(main_end, "ended by")
    assert process.wait(60) == 0
    assert re.search(f"{FILE}: +100%", shown), shown


def read_until(end: int, text: str, seconds: float = 120) -> str:
    """What a terminal shows until a text comes."""
    shown, last = "", time.monotonic() + seconds
    while text not in shown and time.monotonic() < last:
        if select.select([end], [], [], 1.0)[0]:
            try:
                shown += os.read(end, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                break
    return shown
