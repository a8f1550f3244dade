"""Each lab command runs with the lab and its own extra alone; a wrong option is reported before a missing package."""

from __future__ import annotations

from pathlib import Path

import pytest

from extras import absent, command, project

HEALING = ["train", "heal", "--out", "{out}", "--under", "d3:mean=0.8"]
MISSING: dict[str, tuple[list[str], str]] = {
    "bench": (["bench"], "a benchmark: psutil is not installed. Install the extra: pip install 'shoal-lab[bench]'"),
    "bench-serve": (["bench-serve", "--model", "{model}"], "a benchmark: psutil is not installed."),
    "heal": ([*HEALING, "--model", "{model}"], "healing: peft is not installed."),
    "plan": (["plan", "--layers", "4", "--plot", "{out}"], "--plot: matplotlib is not installed."),
}
WRONG: dict[str, tuple[list[str], str]] = {
    "bench": (["bench", "--quant", "foo"], "--quant holds 'foo'"),
    "bench, its plan": (["bench", "--rounds", "0"], "--rounds is 0"),
    "bench-drafts": (["bench-drafts", "--methods", "d5"], "unknown method 'd5'"),
    "bench-serve": (["bench-serve", "--concurrency", "x"], "--concurrency is 'x'"),
    "heal": ([*HEALING[:-1], "d5"], "unknown method 'd5'"),
    "heal, a number": ([*HEALING, "--rank", "0"], "--rank is 0"),
    "eval": (["eval", "--suite", "known", "--n", "0", "--plot", "{out}"], "--n is 0"),
}


def filled(argv: list[str], model: str, out: Path) -> list[str]:
    return [word.format(model=model, out=out / "out") for word in argv]


@pytest.mark.slow
@pytest.mark.parametrize("case", MISSING)
def test_a_missing_package_is_named_with_its_extra(case: str, tiny_folder: str, tmp_path: Path) -> None:
    argv, said = MISSING[case]
    done = command(("lab",), *filled(argv, tiny_folder, tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"shoal {argv[0]}: error: ")
    assert any(part in done.stderr for part in said.split("|")), done.stderr
    assert done.stderr.count(f"shoal {argv[0]}") == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_comes_before_a_missing_package(case: str, tiny_folder: str, tmp_path: Path) -> None:
    argv, said = WRONG[case]
    done = command(("lab",), *filled(argv, tiny_folder, tmp_path))
    assert done.returncode == 2 and any(part in done.stderr for part in said.split("|")), done.stderr
    assert "not installed" not in done.stderr


ALONE: dict[str, list[str]] = {
    "correctness": ["correctness", "--max-new-tokens", "3"],
    "distances": ["eval", "--suite", "known", "--n", "2", "--measure", "distance", "--max-new-tokens", "3", "--method",
                  "early_exit"],
    "eagle": ["train", "eagle", "--prompts", "{out}/asked.txt", "--tokens", "200", "--max-new-tokens", "12", "--epochs",
              "1", "--batch", "256", "--vocabulary", "50", "--out", "{out}/eagle"],
    "eval": ["eval", "--suite", "known", "--n", "2", "--loss-n", "2", "--max-new-tokens", "3"],
    "prune": ["prune", "depth", "--layers", "1", "--out", "{out}/smaller"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE)
def test_what_needs_no_extra(case: str, tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text("".join(f"the {word} and the moon\n" for word in ("sun", "sea", "hill") * 8))
    argv = [word.format(out=tmp_path) for word in ALONE[case]]
    done = command(("lab",), *argv, "--model", tiny_folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_healing_needs_its_extra_alone(tiny_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "asked.txt").write_text("".join(f"the {word} and the moon\n" for word in ("sun", "sea", "hill") * 8))
    argv = [*filled(HEALING, tiny_folder, tmp_path), "--model", tiny_folder, "--prompts", str(tmp_path / "asked.txt")]
    less = ["--tokens", "200", "--max-new-tokens", "12", "--epochs", "1", "--batch", "64"]
    done = command(("lab", "lab:train"), *argv, *less)
    assert done.returncode == 0, done.stderr


def test_measuring_holds_what_the_servers_need_that_it_starts() -> None:
    assert "shoal[serve]" in set(project()["lab:bench"])


def test_what_is_hidden() -> None:
    assert "shoal_lab" not in absent("lab") and "psutil" not in absent("lab", "lab:bench")
