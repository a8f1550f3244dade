

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import shoal
from gguf_fixtures import FOLDER
from shoal.cli import env as env_command
from shoal.cli import main
from shoal.cli.entry import COMMANDS, known


def fails(capsys, *argv: str) -> str:
    """The one line on stderr of a refused command."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_unknown_command(capsys):
    assert "Did you mean 'generate'?" in fails(capsys, "genrate")


def test_unknown_command_with_more_words(capsys):
    assert "unknown command 'generat'. Did you mean 'generate'?" in fails(capsys, "generat", "hi", "--model", "m")


@pytest.mark.parametrize("option", [["--top-p", "3"], ["--top-p=3"]])
def test_an_error_names_the_option_as_it_was_typed(capsys, tiny_folder, option):
    err = fails(capsys, "generate", "hi", "--model", tiny_folder, *option)
    assert err == "shoal generate: error: --top-p is 3.0; it must be in (0, 1]\n"


def test_an_error_of_something_else_stays_as_it_is(capsys, tiny_folder, monkeypatch):
    def refuse(args):
        raise ValueError("layers is 9; it must be even")

    monkeypatch.setattr(env_command, "run", refuse)
    assert fails(capsys, "env", "--json") == "shoal env: error: layers is 9; it must be even\n"


def test_unknown_top_option(capsys):
    assert "no option --versoin. Did you mean --version?" in fails(capsys, "--versoin")


def test_no_command_shows_help_and_fails(capsys):
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


def test_misspelt_option(capsys):
    err = fails(capsys, "generate", "--method", "d3", "--alhpa", "0.9")
    assert "method d3 has no option --alhpa. Did you mean --alpha?" in err
    assert "--start" in err and "--rounding" in err


def test_misspelt_option_before_a_prompt(capsys):
    assert "no option --alhpa" in fails(capsys, "generate", "--method", "d3", "--alhpa", "0.9", "Once")
    assert "no option --alhpa" in fails(capsys, "generate", "--method=d3", "--alhpa=0.9", "Once")


def test_option_of_another_method_names_its_owner(capsys):
    said = fails(capsys, "generate", "--method", "d3", "--exit-layer", "3")
    assert re.search(r"--method early_exit( or \w+)* has", said)


def test_value_of_the_wrong_type(capsys):
    for option, kind in (("--alpha", "a number such as 0.5 or none"), ("--horizon", "a whole number such as 4 or none"),
                         ("--max-new-tokens", "a whole number such as 4"), ("--temperature", "a number such as 0.5")):
        error = fails(capsys, "generate", "--method", "d3", option, "x")
        assert error.endswith(f"argument {option}: 'x' is not {kind}\n"), error


def test_value_out_of_range(capsys):
    assert "(0, 1]" in fails(capsys, "generate", "--method", "d3", "--alpha", "2")


def test_unknown_method(capsys):
    assert "'d33'" in fails(capsys, "generate", "Once", "--method", "d33")
    assert "expected one argument" in fails(capsys, "generate", "Once", "--method")


def test_superfluous_word(capsys):
    assert "unexpected argument 'upon'" in fails(capsys, "generate", "Once", "upon")


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="--max-drop is 2"):
        main(["recommend", "--max-drop", "2", "--debug"])


def test_interrupt_is_130(capsys, monkeypatch):
    monkeypatch.setattr(env_command, "run", interrupt)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def interrupt(args):
    raise KeyboardInterrupt


def test_a_bug_is_not_dressed_up_as_bad_input(monkeypatch):
    monkeypatch.setattr(env_command, "run", lambda args: {}["no such key"])
    with pytest.raises(KeyError):
        main(["env"])


@pytest.mark.parametrize(("argv", "said"), [
    (["chat", "--max-tokens", "5"], "there is no option --max-tokens. Did you mean --max-new-tokens?"),
    (["generate", "--method", "d3", "--max-tokens", "5", "hi"], "there is no option --max-tokens. Did you mean"),
    (["serve", "--max-new-tokens", "5"], "there is no option --max-new-tokens. Did you mean --max-tokens?"),
    (["batch", "a", "b", "--temprature", "1"], "there is no option --temprature. Did you mean --temperature?"),
    (["generate", "--method", "d3", "--alhpa", "1", "hi"], "method d3 has no option --alhpa. Did you mean --alpha?"),
    (["generate", "--steam", "hi"], "there is no option --steam. --help lists them; those of method full: none"),
    (["generate", "--alpha", "0.9", "hi"], "method full has no option --alpha; --method "),
])
def test_an_unknown_option_is_laid_to_whom_it_belongs(capsys, argv, said):
    err = fails(capsys, *argv)
    assert err.startswith(f"shoal {argv[0]}: error: {said}")


def shoal_process(*argv: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shoal", *argv], capture_output=True, text=True, input=stdin
    )


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["methods"]])
def test_no_torch_before_it_is_needed(argv):
    done = shoal_process(*argv)
    assert done.returncode == 0 and done.stdout
    assert not {"torch", "transformers", "numpy"} & imported(done)


def listed(capsys, *argv: str) -> list[str]:
    """The commands of an overview, in its order."""
    assert main(list(argv)) == 0
    return re.findall(r"^  ([a-z][a-z0-9-]*) +\S", capsys.readouterr().out, re.MULTILINE)


def test_help_lists_the_usual_commands_and_help_all_every_one(capsys):
    assert listed(capsys, "--help") == ["generate", "run", "chat", "serve", "transcribe", "pull", "models", "rm",
                                        "batch", "recommend"]
    assert set(listed(capsys, "--help-all")) == set(known())


def helps(capsys, name: str) -> tuple[str, str]:
    """What --help and --help-all print."""
    assert main([name, "--help"]) == 0
    usual = capsys.readouterr().out
    assert main([name, "--help-all"]) == 0
    return usual, capsys.readouterr().out


def options(text: str) -> list[str]:
    return re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("name", known())
def test_help_shows_about_ten_options_and_help_all_the_rest(capsys, name):
    usual, whole = helps(capsys, name)
    assert len(options(usual)) <= 14 and usual.count("\n") <= 80
    assert set(options(usual)) <= set(options(whole))
    hidden = set(options(whole)) - set(options(usual))
    said = re.search(rf"^(\d+) more options: shoal {name} --help-all$", usual, re.MULTILINE)
    assert (said is None) == (not hidden)
    assert said is None or (int(said[1]) == len(hidden - {"--help-all"}) and "more options" not in whole)


def test_help_on_a_method_shows_its_options(capsys):
    assert main(["generate", "--method", "d3", "--help"]) == 0
    shown = options(capsys.readouterr().out)
    assert "--alpha" in shown and "--model" in shown and "--top-k" not in shown
    assert "--alpha" not in options(helps(capsys, "generate")[0])


@pytest.mark.parametrize("columns", [60, 100])
def test_help_wraps_by_words_at_the_width_of_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for argv in (["--help-all"], ["serve", "--help"]):
        assert main(argv) == 0
        text = capsys.readouterr().out.partition("examples:")[0]
        assert max(map(len, text.splitlines())) <= columns
        assert "-\n" not in text.replace("--help-\n", "")


def test_version():
    assert shoal_process("--version").stdout == f"shoal {shoal.__version__}\n"


def test_bad_usage_is_one_line_on_stderr_and_code_2():
    words = ["recommend", "--max-drop", "2"]
    done = subprocess.run([sys.executable, "-m", "shoal", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "shoal recommend: error: --max-drop is 2.0; it must be in [0, 1): 0.015 is 1.5 points\n"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["llama-Q4_0.gguf", "gemma3-Q4_K_M.gguf"])
def test_a_file_runs_without_the_models_code(file):
    """The modules with which transformers defines models take as long to import as torch."""
    code = (
        "import sys, shoal; engine = shoal.load(sys.argv[1]); print(len(engine.generate([1, 2, 3], max_new_tokens=4, "
        "ignore_eos=True).tokens)); print('transformers.modeling_utils' in sys.modules, type(engine.runner).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER / file)], capture_output=True, text=True)
    tokens, imported = done.stdout.splitlines()
    assert tokens == "4" and imported.startswith("False "), done.stderr
