"""Each command runs with the core and its own extra alone, and reports a wrong option before a missing package."""

from __future__ import annotations

from pathlib import Path

import pytest

from extras import absent, command

SERVING = ["serve", "--model", "{model}"]
MISSING: dict[str, tuple[list[str], str]] = {
    "chat": (["chat", "--mcp", "servers.json"], "mcp is not installed. Install the extra: pip install 'shoal[mcp]'"),
    "completion": (["completion", "bash"], "shtab is not installed. Install the extra: pip install 'shoal[comp"),
    "serve": (SERVING, " is not installed. Install the extra: pip install 'shoal[serve]'"),
}
WRONG: dict[str, tuple[list[str], str]] = {
    "serve": ([*SERVING, "--methods", "d5"], "unknown method 'd5'"),
    "serve, a number": ([*SERVING, "--max-n", "0"], "max_n is 0|--max-n is 0"),
    "serve, a size": ([*SERVING, "--memory", "1XB"], "memory is '1XB'"),
}


def filled(words: list[str], model: str, out: Path) -> list[str]:
    return [word.format(model=model, out=out / "out") for word in words]


@pytest.mark.slow
@pytest.mark.parametrize("case", MISSING)
def test_a_missing_package_is_named_with_its_extra(case: str, tiny_folder: str, tmp_path: Path) -> None:
    words, said = MISSING[case]
    done = command((), *filled(words, tiny_folder, tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"shoal {words[0]}: error: ")
    assert any(part in done.stderr for part in said.split("|")), done.stderr
    assert done.stderr.count(f"shoal {words[0]}") == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_comes_before_a_missing_package(case: str, tiny_folder: str, tmp_path: Path) -> None:
    words, said = WRONG[case]
    done = command((), *filled(words, tiny_folder, tmp_path))
    assert done.returncode == 2 and any(part in done.stderr for part in said.split("|")), done.stderr
    assert "not installed" not in done.stderr


CORE: dict[str, list[str]] = {
    "batch": ["batch", "{out}/lines.jsonl", "{out}/answers.jsonl", "--max-new-tokens", "3"],
    "env": ["env"],
    "generate": ["generate", "ab", "--max-new-tokens", "3"],
    "methods": ["methods"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CORE)
def test_what_needs_no_extra(case: str, tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"prompt": "ab"}\n')
    words = [word.format(out=tmp_path) for word in CORE[case]]
    done = command((), *words, *([] if case == "env" else ["--model", tiny_folder]))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "said"), [
    (["eval", "--suite", "known"], "eval is a command of shoal-lab, which is not installed: pip install shoal-lab"),
    (["lab", "train"], "train is a command of shoal-lab"),
    (["plan", "--layers", "4"], "plan is a command of shoal-lab, which is not installed: pip install shoal-lab"),
    (["serve", "--members-folder", "."], "what knows them comes with shoal-lab. pip install shoal-lab"),
    (["generate", "--method", "medusa", "ab"], "More methods come with shoal-lab: pip install shoal-lab"),
])
def test_what_the_lab_brings_is_named_where_it_is_absent(words: list[str], said: str) -> None:
    done = command((), *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr


def test_the_lab_s_overview_says_how_to_install_it() -> None:
    done = command((), "lab")
    assert done.returncode == 2 and "pip install shoal-lab" in done.stdout


def test_what_is_hidden() -> None:
    assert {"psutil", "fastapi", "pytest", "shoal_lab"} <= set(absent())
    assert not {"torch", "numpy", "tokenizers", "safetensors", "shoal"} & set(absent())
    assert "fastapi" not in absent("serve")
