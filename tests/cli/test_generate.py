

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest

import shoal
from shared_models import FIXTURES, REFERENCE
from shoal.cli import main, terminal
from shoal.engine.scheduling.stream import Stream
from two_processes import torchrun

QUESTION = "Mia buys 9 coins for $5 each and sells them for $8 each. How much profit does Mia make?"


SMALL = str(FIXTURES / REFERENCE)


@pytest.fixture(scope="module")
def small():
    return shoal.load(SMALL, dtype="float32")


def reported(capsys, *words: str) -> dict:
    assert main(["generate", "--json", "--dtype", "float32", "--temperature", "0", *words]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and captured.err == ""
    return json.loads(captured.out)


def test_a_model_answers_through_its_chat_template(capsys, small):
    found = reported(capsys, QUESTION, "--model", SMALL, "--max-new-tokens", "40")
    expected = small.generate(f"<s>{QUESTION}\n", max_new_tokens=40)
    assert tuple(found["tokens"]) == expected.tokens and found["text"] == expected.text
    assert "9 * 5 = 45" in found["text"]


def test_raw_leaves_the_prompt_alone(capsys, small):
    found = reported(capsys, QUESTION, "--model", SMALL, "--raw", "--max-new-tokens", "8")
    assert tuple(found["tokens"]) == small.generate(QUESTION, max_new_tokens=8).tokens


@pytest.fixture(scope="module")
def misfit(tiny_folder, tmp_path_factory):
    """A model whose activation the packed layers lack."""
    folder = tmp_path_factory.mktemp("misfit") / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "tanh"}))
    return str(folder)


@pytest.mark.parametrize(("options", "told"), [
    (("--dtype", "float32"), True), (("--dtype", "float64"), False), (("--dtype", "float32", "--backend", "hf"), False),
])
def test_what_runs_on_modules_is_said_once_with_its_cost(capsys, misfit, options, told):
    assert main(["generate", "abc", "--model", misfit, "--max-new-tokens", "3", "--quiet", *options]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("4.9 to 8.5 times as fast") == told
    assert err == "" or ("on transformers' modules" in err and "its activation 'tanh' is not among" in err)


def test_report(capsys, tiny_folder):
    words = ["--model", tiny_folder, "--method", "early_exit", "--exit-layer", "4", "--max-new-tokens", "5"]
    found = reported(capsys, "abc", *words)
    assert found["depths"] == [6, 4, 4, 4, 4] and found["stats"]["mean_layers"] == pytest.approx(4.4)
    assert (found["method"], found["method_args"], found["model"]) == ("early_exit", {"exit_layer": 4}, tiny_folder)
    assert found["finish_reason"] == "length" and len(found["tokens"]) == 5 and "logprobs" not in found


def test_methods_combine(capsys, tiny_folder):
    words = ["--model", tiny_folder, "--method", "early_exit", "--exit-layer", "4", "--max-new-tokens", "12"]
    alone, both = (reported(capsys, "abcabc", *words, *more) for more in ([], ["--with", "prompt_lookup:min_ngram=1"]))
    assert (both["tokens"], both["depths"]) == (alone["tokens"], alone["depths"])
    assert both["stats"]["drafted"] > alone["stats"]["drafted"] == 0
    assert [method["method"] for method in both["method"]] == ["early_exit", "prompt_lookup"]
    assert main(["generate", "abc", *words, "--with", "d3"]) == 2
    assert "early_exit and d3 both fill the part 'plan'" in capsys.readouterr().err


def test_stream_and_report_agree(capsys, tiny_folder):
    words = ["abc", "--model", tiny_folder, "--max-new-tokens", "30", "--temperature", "1", "--seed", "5"]
    found = reported(capsys, *words)
    assert found["seed"] == 5
    assert main(["generate", "--dtype", "float32", *words]) == 0
    out, err = capsys.readouterr()
    assert out == found["text"] + "\n"
    assert re.fullmatch(r"\[30 tokens, \S+ tokens/s, 6.00 of 6 layers on average, .* 1.00x, drawn with "
                        r"temperature 1, seed 5, ended by length\]\n", err)


def drawn(capsys, *words: str) -> dict:
    assert main(["generate", "abc", "--json", "--dtype", "float32", "--max-new-tokens", "30", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_nobody_asked_for_is_drawn_and_can_be_drawn_again(capsys, tiny_folder):
    first = drawn(capsys, "--model", tiny_folder)
    assert first["sampling"] == {"temperature": 0.7, "min_p": 0.05}
    again = drawn(capsys, "--model", tiny_folder, "--seed", str(first["seed"]))
    assert (again["tokens"], again["sampling"]) == (first["tokens"], first["sampling"])
    engine = shoal.load(tiny_folder, dtype="float32")
    how = {"temperature": 0.7, "min_p": 0.05, "seed": first["seed"], "max_new_tokens": 30}
    assert tuple(first["tokens"]) == engine.generate("abc", **how).tokens
    assert drawn(capsys, "--model", tiny_folder)["seed"] != first["seed"]
    greedy = drawn(capsys, "--model", tiny_folder, "--temperature", "0")
    assert tuple(greedy["tokens"]) == engine.generate("abc", max_new_tokens=30).tokens
    assert greedy["sampling"] == {"temperature": 0.0}


def test_what_the_models_makers_recommend_is_taken(capsys, tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    assert drawn(capsys, "--model", str(folder))["sampling"] == {"temperature": 0.6, "top_k": 20}
    assert drawn(capsys, "--model", str(folder), "--temperature", "0.9", "--min-p", "0.1")["sampling"] == {
        "temperature": 0.9, "top_k": 20, "min_p": 0.1}


def test_every_sampling_option_arrives(monkeypatch):
    words = ["hi", "--json", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--seed", "4",
             "--repetition-penalty", "1.5", "--presence-penalty", "-1", "--frequency-penalty", "0.25",
             "--stop", "x", "--stop", "yz", "--logprobs", "2", "--max-new-tokens", "7", "--model", SMALL]
    seen = {}

    def refuse(self, prompt, **options):
        seen.update(options)
        raise ValueError("enough")

    monkeypatch.setattr(shoal.Engine, "stream", refuse)
    assert main(["generate", *words]) == 2
    assert seen.pop("method") == shoal.Full()
    assert seen == {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5,
                    "presence_penalty": -1.0, "frequency_penalty": 0.25, "seed": 4, "stop": ["x", "yz"], "logprobs": 2,
                    "max_new_tokens": 7, "constraint": None}


def test_logprobs(capsys, tiny_folder):
    found = reported(capsys, "abc", "--model", tiny_folder, "--logprobs", "2", "--max-new-tokens", "3")
    assert [entry["token"] for entry in found["logprobs"]] == found["tokens"]
    for entry in found["logprobs"]:
        assert entry["top"][0] == {"token": entry["token"], "logprob": entry["logprob"]} and len(entry["top"]) == 2


def test_stop(capsys, tiny_folder):
    words = ["abc", "--model", tiny_folder, "--max-new-tokens", "20"]
    text = reported(capsys, *words)["text"]
    found = reported(capsys, *words, "--stop", text[6:8])
    assert (found["text"], found["finish_reason"]) == (text[: text.index(text[6:8])], "stop")


@pytest.mark.parametrize("words", [["-"], []])
def test_prompt_from_stdin(capsys, monkeypatch, tiny_folder, words):
    common = ["--model", tiny_folder, "--max-new-tokens", "4"]
    expected = reported(capsys, "abc", *common)["tokens"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert reported(capsys, *words, *common)["tokens"] == expected


def test_prompt_from_a_file(capsys, tmp_path, tiny_folder):
    (tmp_path / "prompt.txt").write_text("h\u00e9llo", encoding="utf-8")
    common = ["--model", tiny_folder, "--max-new-tokens", "4"]
    found = reported(capsys, "--file", str(tmp_path / "prompt.txt"), *common)
    assert found["tokens"] == reported(capsys, "h\u00e9llo", *common)["tokens"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        ([], Terminal(), "there is no prompt"),
        ([], io.StringIO(""), "the prompt is empty"),
        (["a", "--file", "b"], None, "two prompts"),
        (["--file", "/no/such/file"], None, "cannot read /no/such/file: No such file or directory"),
        (["a", "--model", "/no/such/model"], None, "cannot load /no/such/model"),
        (["a", "--device", "abacus", "--model", SMALL], None, "abacus"),
        (["a", "--logprobs", "1"], None, "add --json"),
        (["a", "--top-p", "3", "--model", SMALL], None, "--top-p is 3.0; it must be in (0, 1]"),
        (["a", "--max-new-tokens", "0", "--model", SMALL], None, "--max-new-tokens is 0"),
    ],
)
def test_refusals(capsys, monkeypatch, words, stdin, message):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_a_broken_model_is_bad_input(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main(["generate", "a", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_tint_changes_the_colour_and_not_the_text(capsys):
    words = ["generate", QUESTION, "--model", SMALL, "--method", "early_exit", "--exit-layer", "22", "--quiet",
             "--max-new-tokens", "6"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--color", "always"]) == 0
    painted = capsys.readouterr().out
    assert "\x1b" not in plain and re.sub(r"\x1b\[[\d;]*m", "", painted) == plain
    colours = re.findall(r"\x1b\[38;([\d;]+)m", painted)
    assert colours[0] not in colours[1:] and len(set(colours[1:])) == 1


def interrupt_at(monkeypatch, owner, name, number):
    """A KeyboardInterrupt at the `number`-th call of a method."""
    calls, real = itertools.count(1), getattr(owner, name)

    def called(*args):
        if next(calls) == number:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, called)


def test_an_interrupt_keeps_what_was_said(capsys, monkeypatch, tiny_folder):
    words = ["generate", "abc", "--model", tiny_folder, "--dtype", "float32", "--temperature", "0"]
    interrupt_at(monkeypatch, terminal.Printer, "show", 4)
    monkeypatch.setattr("shoal.decode.batch._MOST_STEPS", 1)  # so that no token has come that was not shown
    assert main([*words, "--max-new-tokens", "99"]) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err and "[4 tokens" in err
    assert main([*words, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == out


def test_an_interrupted_report_is_still_a_report(capsys, monkeypatch, tiny_folder):
    interrupt_at(monkeypatch, Stream, "__next__", 4)
    assert main(["generate", "abc", "--model", tiny_folder, "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["finish_reason"] == "cancelled" and len(found["tokens"]) == 3


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to send to a single process")
def test_ctrl_c(tiny_folder):
    words = [sys.executable, "-m", "shoal", "generate", "abc", "--model", tiny_folder, "--max-new-tokens", "60000"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job would pass on that it is ignored
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heard) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and first and out.endswith(b"\n")
    assert b"interrupted" in err and b"Traceback" not in err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes break differently there")
def test_a_reader_that_leaves(tiny_folder):
    words = [sys.executable, "-m", "shoal", "generate", "abc", "--model", tiny_folder, "--max-new-tokens", "60000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == 141 and b"Traceback" not in err


def test_an_answer_may_be_bound(capsys, tmp_path):
    grammar, schema = tmp_path / "words.lark", tmp_path / "schema.json"
    grammar.write_text('start: "yes" | "no"', encoding="utf-8")
    schema.write_text('{"enum": [12, 34]}', encoding="utf-8")
    for option, value, texts in (
        ("--regex", "[ab]{2}c", {a + b + "c" for a in "ab" for b in "ab"}), ("--grammar", str(grammar), {"yes", "no"}),
        ("--json-schema", str(schema), {"12", "34"}), ("--json-schema", '{"const": 5}', {"5"}),
    ):
        assert reported(capsys, QUESTION, "--model", SMALL, option, value)["text"] in texts


def test_members_without_the_lab_say_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(shoal.methods, "_entries", lambda *_: {})
    assert main(["generate", QUESTION, "--model", SMALL, "--python-members", "."]) == 2
    assert "pip install shoal-lab" in capsys.readouterr().err


def test_a_bound_that_cannot_be_read_is_named(capsys):
    for words, said in (
        (("--json-schema", "{"), "no JSON"), (("--json-schema", "missing.json"), "cannot read missing.json"),
        (("--grammar", "missing.lark"), "cannot read missing.lark"), (("--regex", "("), "unclosed group"),
        (("--regex", "a", "--grammar", "b"), "not allowed with"),
    ):
        assert main(["generate", QUESTION, "--model", SMALL, *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_process_prints(tiny_folder: str) -> None:
    words = ["--model", tiny_folder, "--dtype", "float64", "--max-new-tokens", "9", "--json", "--temperature", "0"]
    words += ["--method", "d3", "--no-card"]  # a card that is made in passing depends on how busy the machine is
    shared = torchrun("-m", "shoal", "generate", "--tensor-parallel", *words, input="Some words")
    alone = [sys.executable, "-m", "shoal", "generate", *words, "--backend", "hf", "Some words"]
    expected = subprocess.run(alone, capture_output=True, text=True, check=True).stdout
    assert shared.returncode == 0, shared.stderr[-3000:]
    (line,) = shared.stdout.splitlines()
    for name in ("text", "tokens", "depths"):
        assert json.loads(line)[name] == json.loads(expected)[name]


def test_a_process_alone_is_told_how(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--tensor-parallel", "--model", tiny_folder, "a"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
