from __future__ import annotations

import json
import sys

import pytest
import torch

import shoal
from gguf_fixtures import FOLDER
from shared_models import FIXTURES, REFERENCE
from shoal.cli import main
from shoal.model.packed import native
from shoal_lab.cli import correctness as command
from shoal_lab.cli.divergence import TOLERANCE

FOUR_BITS = str(FOLDER / "llama-Q4_K_M.gguf")
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")


def judged(capsys, *argv: str) -> tuple[int, dict]:
    code = main(["correctness", "--json", "--max-new-tokens", "12", *argv])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


def spoil(monkeypatch, *, plain: bool) -> None:
    """Change the third token of the plain loop's output, or of the method's."""
    real = command._greedy

    def greedy(engine, ids, method, max_new_tokens):
        tokens = list(real(engine, ids, method, max_new_tokens))
        if (method == "full") == plain:
            tokens[2] = (tokens[2] + 1) % 256
        return tuple(tokens)

    monkeypatch.setattr(command, "_greedy", greedy)


def test_the_plain_loop_equals_hugging_face(capsys, tiny_folder):
    code, report = judged(capsys, "--model", tiny_folder)
    assert code == 0 and report["passed"] and report["exact_to"] == "full" and report["dtype"] == "float32"
    assert len(report["prompts"]) == len(command.PROMPTS)
    for row in report["prompts"]:
        assert row["plain_vs_huggingface"]["at"] is None and row["method_vs_plain"]["at"] is None
        assert set(row["new_tokens"].values()) == {12}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_only(capsys, tiny_folder, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["correctness", "--max-new-tokens", "4", "abc", "--model", tiny_folder]) == 0
    said = capsys.readouterr().err
    assert ("prompts in full: " in said) == ("full: " in said) == terminal


@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_every_backend_has_its_peer(capsys, tiny_folder, backend):
    code, report = judged(capsys, "abc", "--model", tiny_folder, "--backend", backend)
    assert code == 0 and report["prompts"][0]["plain_vs_huggingface"]["at"] is None


def test_a_lossy_method_is_reported_and_passes(capsys, tiny_folder):
    code, report = judged(capsys, "abc", "--model", tiny_folder, "--method", "early_exit", "--exit-layer", "2")
    found = report["prompts"][0]["method_vs_plain"]
    assert code == 0 and report["exact_to"] == "plan" and found["wrong"] and found["at"] >= 1


def test_a_lossy_plain_loop_fails(capsys, tiny_folder, monkeypatch):
    spoil(monkeypatch, plain=True)
    code, report = judged(capsys, "abc", "--model", tiny_folder, "--method", "early_exit")
    assert code == 1 and not report["passed"] and report["prompts"][0]["plain_vs_huggingface"]["at"] == 2


def test_an_exact_method_that_diverges_fails(capsys, tiny_folder, monkeypatch):
    spoil(monkeypatch, plain=False)
    code, report = judged(capsys, "abc", "--model", tiny_folder, "--method", "d3", "--alpha", "1")
    assert code == 1 and report["exact_to"] == "full" and report["prompts"][0]["method_vs_plain"]["at"] == 2


def test_a_tie_is_no_failure(capsys, tiny_folder, monkeypatch):
    spoil(monkeypatch, plain=True)
    code, report = judged(capsys, "abc", "--model", tiny_folder, "--method", "early_exit", "--tie", "1000")
    assert code == 0 and report["prompts"][0]["plain_vs_huggingface"]["tie"]


def test_the_margin_is_that_of_the_reference(capsys, tiny_folder, monkeypatch):
    spoil(monkeypatch, plain=True)
    report = judged(capsys, "abc", "--model", tiny_folder, "--method", "early_exit")[1]
    found = report["prompts"][0]["plain_vs_huggingface"]
    engine = shoal.load(tiny_folder, dtype="float32", backend="hf")
    ids = engine.tokenizer("abc")["input_ids"]
    tokens = engine.generate(ids, max_new_tokens=2).tokens
    with torch.inference_mode():
        best = engine.model(torch.tensor([[*ids, *tokens]])).logits[0, -1].topk(2)
    assert found["margin"] == pytest.approx(float(best.values[0] - best.values[1]), rel=1e-4)
    assert found["expected"] == int(best.indices[0])


def test_text(capsys, tiny_folder):
    assert main(["correctness", "abc", "--model", tiny_folder, "--max-new-tokens", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "passed: full is exact; 1 of 1 texts equal the plain loop's"
    assert sum("equal, 5 tokens" in line for line in lines) == 2


def test_every_exact_method_is_compared(capsys, tiny_folder):
    code, report = judged(capsys, "abc", "abcabcabcabc", "--model", tiny_folder, "--all")
    assert code == 0 and report["passed"]
    found = {one["method"] for one in report["methods"]}
    assert {"full", "prompt_lookup", "aded", "draft_model"} <= found
    assert "d3" not in found and "early_exit" not in {*found, *report["skipped"]}
    for one in report["methods"]:
        assert one["exact_to"] == "full" and len(one["prompts"]) == 2
        assert all(row["method_vs_plain"]["at"] is None for row in one["prompts"])


def test_one_wrong_method_fails_them_all(capsys, tiny_folder, monkeypatch):
    real = command._greedy

    def greedy(engine, ids, method, max_new_tokens):
        tokens = real(engine, ids, method, max_new_tokens)
        return (*tokens[:-1], (tokens[-1] + 1) % 256) if getattr(method, "name", "") == "aded" else tokens

    monkeypatch.setattr(command, "_greedy", greedy)
    assert main(["correctness", "abc", "--model", tiny_folder, "--max-new-tokens", "6", "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "FAILED" and [line.split()[1] for line in lines if line.startswith("FAILED:")] == ["aded"]


@pytest.mark.slow
def test_the_end_of_the_context_ends_the_comparison(capsys):
    code, report = judged(capsys, "12 " * 160, "--raw", "--max-new-tokens", "500", "--model", str(FIXTURES / REFERENCE))
    assert code == 0 and report["prompts"][0]["new_tokens"]["huggingface"] < 500


@needs_kernels
def test_ties_are_as_wide_as_the_kernels_round(tiny_folder):
    engine = shoal.load(tiny_folder, dtype="float32", backend="packed")
    assert engine.runner.activation_dtype == torch.float32
    assert command.tie_below(engine.runner) == TOLERANCE["float32"]
    quantised = shoal.load(tiny_folder, dtype="float32", quant="int8")
    assert quantised.runner.activation_dtype == torch.int8
    assert command.tie_below(quantised.runner) == TOLERANCE["int8"]


@needs_kernels
@pytest.mark.parametrize("plain", [True, False])
def test_only_the_peer_may_be_apart_by_what_8_bits_round(capsys, monkeypatch, plain):
    """The margin at the third token lies between both tolerances: a tie for Hugging Face, an error of the method."""
    spoil(monkeypatch, plain=plain)
    monkeypatch.setattr(command.HuggingFace, "margin", lambda self, ids: 0.1)
    code, report = judged(capsys, "abc", "--raw", "--model", FOUR_BITS, "--method", "prompt_lookup")
    found = report["prompts"][0]["plain_vs_huggingface" if plain else "method_vs_plain"]
    assert (report["tie_below"], report["tie_below_huggingface"]) == (TOLERANCE["float32"], TOLERANCE["int8"])
    assert found["at"] is not None and found["tie"] == plain
    assert code == 1, "a spoiled plain loop differs from the method's text, and a spoiled method from the plain loop's"


@needs_kernels
def test_a_file_whose_weights_are_not_the_peers_fails(capsys, monkeypatch):
    real = command.load_peer

    def other(args, engine):
        model = real(args, engine)
        with torch.no_grad():
            model.model.norm.weight.mul_(-50)
        return model

    assert judged(capsys, "abc", "--raw", "--model", FOUR_BITS)[0] == 0
    monkeypatch.setattr(command, "load_peer", other)
    assert judged(capsys, "abc", "--raw", "--model", FOUR_BITS)[0] == 1
