from __future__ import annotations

import json
import platform

import torch

import shoal
from shoal.cli import env, main


def test_json_names_what_is_installed(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["shoal"] == shoal.__version__
    assert torch.__version__.startswith(facts["torch"])  # which a wheel may name without its "+cu130"
    assert facts["python"] == platform.python_version() and facts["torch_threads"] == torch.get_num_threads()
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["default_dtype"] in ("bfloat16", "float32")
    assert facts["native_kernels"] in ("amx", "avx512", "avx2", "neon") or facts["native_kernels"].startswith("none: ")


def test_text_has_a_line_per_fact(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(env.collect()) + 1 and all(len(line.split()) >= 2 for line in lines)


def test_one_processor_is_a_number():
    assert (env._text(1), env._text(True), env._text(None), env._text([])) == ("1", "yes", "none", "none")


def test_cpu_name(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9000 @ 1 Hz\n")
    assert env.cpu_name(tmp_path / "cpuinfo") == "Abacus 9000 @ 1 Hz"
    assert env.cpu_name(tmp_path / "none")


def test_it_lists_the_settings_files(capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.toml").write_text("")
    monkeypatch.setenv("SHOAL_CONFIG", str(tmp_path / "mine.toml"))
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config_files"] == [str(tmp_path / "mine.toml")]
