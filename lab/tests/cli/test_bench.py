from __future__ import annotations

import dataclasses
import json

import pytest

import bench_file
from bench_systems import SETTING, Local
from shoal.cli import main
from shoal.cli.options.common import label_of
from shoal.methods import make
from shoal_lab.cli import bench
from shoal_lab.cli.method_list import methods_from


@pytest.fixture
def quick(monkeypatch):
    """One process, a small bandwidth buffer, a quick cost card."""
    plan_of = bench._plan

    def small(args):
        plan = plan_of(args)
        setting = dataclasses.replace(plan.setting, card_seconds=SETTING.card_seconds)
        return dataclasses.replace(plan, setting=setting, bandwidth_bytes=2**20, start=Local)

    monkeypatch.setattr(bench, "_plan", small)


def fails(capsys, *argv: str) -> str:
    assert main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


@pytest.mark.slow
def test_table_report_and_picture(capsys, quick, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    argv = ["bench", "--shape", "tiny", "--dtype", "float32", "--methods", "full,early_exit:exit_layer=2",
             "--batch", "1,2", "--context", "8", "--new-tokens", "4", "--positions", "1,4", "--prefill", "16",
             "--rounds", "1", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    report = json.loads(out[-1])
    assert report == json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert report["command"].split()[:4] == ["shoal", "bench", "--shape", "tiny"]
    assert {"cpu", "torch", "transformers", "torch_threads"} <= set(report["machine"])
    assert {r["system"] for r in report["results"]} == {"shoal", "hf"}
    assert {r["label"] for r in report["results"] if r["system"] == "shoal"} == {"full", "early_exit:exit_layer=2"}
    assert len(report["results"]) == 2 * 3 + 2 + 2 * 2 and len(report["cost_cards"]) == 2
    assert [r["tokens_as_full"] for r in report["results"] if r["system"] == "hf" and r["kind"] == "generate"] == [4, 4]
    assert out[0].startswith("tiny (shape with random weights), float32")
    assert any("early_exit:exit_layer=2, float32" in line for line in out)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_json_alone(capsys, quick):
    argv = ["--shape", "tiny", "--peer", "none", "--context", "8", "--new-tokens", "4", "--rounds", "1", "--json"]
    assert main(["bench", *argv]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and json.loads(out)["results"][0]["system"] == "shoal"


def test_a_gguf_file_runs_as_it_is(capsys, quick, tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'shoal-lab[bench]'")
    file, text = bench_file.write(tmp_path / "tiny.gguf"), tmp_path / "a.txt"
    text.write_text("the path to the north " * 5, encoding="utf-8")
    argv = ["--model", str(file), "--text", str(text), "--dtype", "float32", "--context", "8", "--new-tokens", "4",
             "--prefill", "16", "--rounds", "1"]
    assert main(["bench", *argv]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["subject"]["kind"] == "GGUF file" and report["subject"]["file"]["types"] == {"F32": 30}
    found = [(r["system"], r["quant"], r["kind"]) for r in report["results"]]
    assert found == [(name, "file", kind) for kind in ("generate", "prefill") for name in ("shoal", "hf")]
    assert report["results"][1]["tokens_as_full"] == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--startup"], "give one with --model"),
        (["--startup", "--model", "nowhere.gguf"], "nowhere.gguf"),
        (["--shape", "tiny", "--quant", "file"], "tiny is no GGUF file"),
        (["--shape", "tiny", "--dequantised", "x"], "tiny is no GGUF file"),
        (["--shape", "tiny", "--quant", "int3"], "none, int8, int4, file"),
        (["--shape", "tiny", "--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_options_of_files_that_cannot_be(capsys, argv, message):
    assert message in fails(capsys, *argv)


def test_a_model_from_files(capsys, quick, tiny_folder):
    argv = ["--model", tiny_folder, "--quant", "none,int8", "--context", "8", "--new-tokens", "4", "--rounds", "1",
             "--method", "early_exit", "--exit-layer", "3"]
    assert main(["bench", *argv]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["subject"]["kind"] == "model" and report["subject"]["num_hidden_layers"] == 6
    labels = [(r["system"], r["quant"], r["label"]) for r in report["results"]]
    assert labels == [("shoal", None, "full"), ("shoal", None, "early_exit:exit_layer=3"), ("hf", None, ""),
                      ("shoal", "int8", "full"), ("shoal", "int8", "early_exit:exit_layer=3")]
    assert {"system": "hf", "quant": "int8"}.items() <= report["not_measured"][-1].items()


@pytest.mark.slow
def test_in_processes_of_their_own(capsys, monkeypatch):
    monkeypatch.setattr("shoal_lab.bench.speed.run._BANDWIDTH_SECONDS", 0.0)
    argv = ["--shape", "tiny", "--dtype", "float32", "--threads", "1", "--context", "8", "--new-tokens", "4"]
    assert main(["bench", *argv, "--rounds", "1", "--peer", "hf", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["tokens_as_full"] for r in report["results"] if r["system"] == "hf"] == [4]
    assert report["setting"]["threads"] == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "2b"], "unknown shape '2b'"),
        (["--shape", "1b", "--model", "x"], "exclude each other"),
        (["--peer", "llamacpp"], "Did you mean 'llama.cpp'"),
        (["--quant", "int3"], "--quant holds 'int3'"),
        (["--batch", "1,x"], "--batch is '1,x'"),
        (["--context", "0"], "contexts holds 0"),
        (["--new-tokens", "1"], "at least 2"),
        (["--rounds", "0"], "rounds is 0"),
        (["--minutes", "0"], "minutes is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--methods", "full,d4"], "unknown method 'd4'"),
        (["--methods", "d3:menn=1"], "no option --menn"),
        (["--methods", "d3:mean=x"], "'x' is not"),
        (["--json", "nowhere/a.json"], "no folder 'nowhere'"),
        (["--plot", "nowhere/a.png"], "no folder 'nowhere'"),
        (["--shape", "tiny", "--context", "5000", "--new-tokens", "5"], "tiny has 1024"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_bad_input(capsys, argv, message):
    assert message in fails(capsys, *argv)


def test_labels_and_methods_are_each_others_inverse():
    for word in ("full", "d3:mean=0.6", "d3:alpha=0.99:core=4", "early_exit:exit_layer=20", "d3:mean=0.6+prompt_lookup",
                 "aded:corpus=a+b.txt:nodes=4+full"):
        (method,) = methods_from(word).values()
        assert label_of(method) == word
    listed = "schedule:order=[4,3]:steps=[1,9]"
    scheduled = make({"method": "schedule", "method_args": {"order": [4, 3], "steps": [1, 9]}})
    assert methods_from(f"d3,{listed},full") == {"d3": make("d3"), listed: scheduled, "full": make("full")}
    assert methods_from("aded+full,d3") == {"aded+full": make(["aded", "full"]), "d3": make("d3")}
    assert list(methods_from("best_of:verifier=execution,d3:mean=0.8"))[0] == "best_of:verifier=execution"
    assert methods_from("d3:mean=0.6")["d3:mean=0.6"] == make({"method": "d3", "method_args": {"mean": 0.6}})


def test_help_names_every_group(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("--shape", "--peer", "--rounds", "--positions", "examples:"))


@pytest.mark.parametrize(
    ("argv", "option", "command"),
    [
        (["--serve", "--concurrency", "8"], "--serve", "bench-serve"),
        (["--concurrency", "8", "--url=http://127.0.0.1:9"], "--url", "bench-serve"),
        (["--shape", "1b", "--soak"], "--soak", "bench-serve"),
        (["--suite", "spec", "--texts", "chat"], "--suite", "bench-drafts"),
    ],
)
def test_what_another_command_does_is_named(capsys, argv, option, command):
    said = fails(capsys, *argv)
    assert f" {option} is no option here" in said and said.endswith(f" shoal {command}\n")


def test_no_compile_leaves_out_what_compiles():
    assert bench._baselines(_args(peer=["hf", "hf-static-compiled"], no_compile=True)) == ["hf"]
    assert bench._baselines(_args(peer=None, no_compile=True)) == ["hf"]
    assert bench._baselines(_args(peer=["none"], no_compile=False)) == []


def _args(**values):
    import argparse

    return argparse.Namespace(**values)
