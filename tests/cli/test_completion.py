"""`shoal completion`: the shells accept the scripts, and bash completes with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.completion import SHELLS, whole
from shoal.cli.entry import COMMANDS


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import io
    from contextlib import redirect_stdout

    folder, found = tmp_path_factory.mktemp("completion"), {}
    for shell in SHELLS:
        with redirect_stdout(io.StringIO()) as text:
            assert main(["completion", shell]) == 0
        found[shell] = folder / shell
        found[shell].write_text(text.getvalue(), encoding="utf-8")
    return found


def test_every_command_and_option_is_there(scripts: dict[str, Path]) -> None:
    text = scripts["zsh"].read_text("utf-8")
    assert all(f'"{name}:' in text or f"{name})" in text for name in COMMANDS)
    assert "--max-new-tokens" in text and "prompt_lookup" in text


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word of a command line."""
    line = (f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            "$(complete -p shoal | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${COMPREPLY[@]}")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    assert completed(scripts["bash"], "shoal", "gen") == ["generate"]
    assert completed(scripts["bash"], "shoal", "serve", "--po") == ["--port"]
    assert completed(scripts["bash"], "shoal", "generate", "--method", "d3") == ["d3", "d3_spec"]
    (tmp_path / "mine.gguf").touch()
    assert completed(scripts["bash"], "shoal", "chat", "--model", f"{tmp_path}/mi") == [f"{tmp_path}/mine.gguf"]


def test_a_shell_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "dash"]) == 2
    assert "invalid choice: 'dash'" in capsys.readouterr().err


def test_the_parser_is_whole() -> None:
    words = ["serve", "--port", "3"]
    assert whole(files=None).parse_args(words).port == 3
