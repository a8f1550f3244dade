"""`shoal.toml`: precedence of files, settings of single commands, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal import methods
from shoal.cli import chat, generate, main
from shoal.cli.entry import COMMANDS, LAB
from shoal.cli.options import common, config

OPTIONS = ("--model", "--port", "--method", "--stop", "--quiet", "--trust-remote-code")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Paths of the user's and the project's file; neither exists."""
    monkeypatch.delenv("SHOAL_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (tmp_path / "config" / "shoal").mkdir(parents=True)
    return tmp_path / "config" / "shoal" / "shoal.toml", project / "shoal.toml"


def words(*typed: str, command: str = "serve") -> list[str]:
    return config.arguments(command, {*COMMANDS, *LAB}, OPTIONS, typed)


def test_nothing_is_said_without_files() -> None:
    assert words() == []


def test_the_projects_settings_go_before_the_users(places: tuple[Path, Path]) -> None:
    own, project = places
    own.write_text('model = "a"\n[serve]\nport = 1\nquiet = true\n[generate]\nmethod = "d3"\n')
    project.write_text('model = "b"\n[serve]\nport = 2\nstop = ["x", "y"]\n')
    assert words() == ["--model=b", "--port=2", "--quiet", "--stop=x", "--stop=y"]
    assert words(command="generate") == ["--model=b", "--method=d3"]
    project.write_text("[serve]\nquiet = false\n")
    assert words() == ["--model=a", "--port=1"]


def test_a_commands_own_setting_goes_before_that_of_all(places: tuple[Path, Path]) -> None:
    places[0].write_text('model = "a"\n[serve]\nmodel = "b"\n')
    assert words() == ["--model=b"] and words(command="chat") == ["--model=a"]


def test_a_setting_of_all_is_for_those_that_have_it(places: tuple[Path, Path]) -> None:
    places[0].write_text('device = "cpu"\nmodel = "a"\n')
    assert words() == ["--model=a"]


def test_a_method_goes_with_its_options(places: tuple[Path, Path]) -> None:
    own, project = places
    own.write_text('[serve]\nmethod = "d3"\nmean = 0.9\nport = 1\n')
    assert words() == ["--method=d3", "--mean=0.9", "--port=1"]
    assert words("--method", "full") == ["--port=1"] == words("--method=full")
    project.write_text('[serve]\nmethod = "early_exit"\nexit_layer = 3\n')
    assert words() == ["--method=early_exit", "--port=1", "--exit-layer=3"]


def test_one_file_may_stand_for_both(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places[0].write_text('model = "a"\n')
    (tmp_path / "other.toml").write_text('model = "c"\n')
    monkeypatch.setenv("SHOAL_CONFIG", str(tmp_path / "other.toml"))
    assert words() == ["--model=c"]
    monkeypatch.setenv("SHOAL_CONFIG", "")
    assert words() == []


@pytest.mark.parametrize(("text", "said"), [
    ("model = ", "cannot read .*shoal.toml: Invalid value"),
    ('modle = "a"', "shoal.toml: unknown setting of all commands 'modle'. Did you mean 'model'"),
    ("[srve]", "shoal.toml: unknown table 'srve'. Did you mean 'serve'"),
])
def test_what_nobody_knows_is_refused(text: str, said: str, places: tuple[Path, Path]) -> None:
    places[0].write_text(text)
    with pytest.raises(ValueError, match=said):
        words()


@pytest.mark.parametrize("text", [
    "trust_remote_code = true", "[serve]\ntrust-remote-code = true", "[eval]\nunsafe = true",
    'mcp = "servers.json"', '[chat]\nmcp = "servers.json"', '[chat]\nmcp-allow = ["run"]',
])
def test_a_project_cannot_allow_its_own_code(text: str, places: tuple[Path, Path]) -> None:
    own, project = places
    own.write_text(text)
    assert words() in ([], ["--trust-remote-code"])
    project.write_text(text)
    with pytest.raises(ValueError, match="may only stand in your own file"):
        words()


def test_a_command_takes_them(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    places[1].write_text('[generate]\nmethod = "d3"\nalpha = 0.9\nmax_new_tokens = 3\n')
    seen = []
    monkeypatch.setattr(generate, "run", lambda args: seen.append(args) or 0)
    assert main(["generate"]) == main(["generate", "--max-new-tokens", "8"]) == 0
    assert [(args.method.alpha, args.max_new_tokens) for args in seen] == [(0.9, 3), (0.9, 8)]
    assert seen[0].argv == ["shoal", "generate", "--method=d3", "--alpha=0.9", "--max-new-tokens=3"]
    places[1].write_text("[generate]\ntemprature = 1\n")
    assert main(["generate"]) == 2
    assert re.search("no option --temprature", capsys.readouterr().err)


def test_a_byte_order_mark_is_no_text(places: tuple[Path, Path]) -> None:
    """In any file that users write: settings, schemas, prompts, cards, conversations."""
    file = places[1]
    file.write_bytes(b"\xef\xbb\xbf[serve]\r\nport = 8001\r\n")
    assert words() == ["--port=8001"]
    file.write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert common.read_text(file) == "a\nb\n"
    card = file.with_name("card.json")
    card.write_bytes(b'\xef\xbb\xbf{"method": "prompt_lookup"}')
    assert methods.make(str(card)) == methods.make("prompt_lookup")
    card.write_bytes(b'\xef\xbb\xbf[{"role": "user", "content": "Hi"}]')
    assert chat.messages_of(card) == [{"role": "user", "content": "Hi"}]
