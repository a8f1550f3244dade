"""Tables of real files, worked out by hand from made-up reports; and the commands that make the reports."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import real_page as real
import scripts
from shoal.cli.options.parser import Parser
from shoal_lab.cli.bench import add_arguments

ROOT = Path(__file__).resolve().parents[3]


def figure(value: float) -> dict[str, float]:
    return {"median": value, "min": value - 1, "max": value + 1}


BASE: dict[str, Any] = {
    "command": "shoal bench", "commit": "0123456789", "date": "2030-01-02T03:04:05+00:00",
    "machine": {"cpu": "a chip", "cpu_capability": "AVX2", "torch_threads": 2}, "subject": {"name": "m.Q4_1.gguf"},
    "setting": {"dtype": "float32", "threads": 2, "device": "cpu"}, "rounds": {"asked": 3, "done": 3},
    "roof": {"median": 2e10, "min": 1e10, "max": 3e10}, "warnings": [], "not_measured": [],
}


def result(system: str, kind: str, value: float, quant: str | None = "file", label: str = "full") -> dict[str, Any]:
    key = "tokens_per_second" if kind == "generate" else "prompt_tokens_per_second"
    ratios = {"llama.cpp": figure(value / 50), "hf": figure(value / 10)} if system == "shoal" else {}
    return {"system": system, "kind": kind, "quant": quant, "label": label if system == "shoal" else "", "rows": 1,
            "context": 64, "new_tokens": 96, key: figure(value), "ratios": ratios}


SPEED = {**BASE, "results": [
    result("shoal", "generate", 75), result("shoal", "generate", 110, label="auto"),
    result("llama.cpp", "generate", 50), result("hf", "generate", 10), result("shoal", "prefill", 400),
    result("llama.cpp", "prefill", 200), result("shoal", "generate", 999, quant="int4"),
]}
FORMATS = {**BASE, "results": [result("shoal", "generate", 888, quant=None)], "warnings": ["another machine"]}
STARTUP = {**BASE, "kind": "startup", "model_bytes": 1e8, "results": [
    {"system": system, "condition": condition, "load_seconds": figure(seconds), "first_token_seconds": figure(seconds),
     "peak_bytes": figure(seconds * 1e8), "pss_bytes": figure(1e6), "disk_bytes": figure(0),
     "ratios": {"hf load_seconds": figure(7), "hf peak_bytes": figure(5)} if system == "shoal" else {}}
    for system, condition, seconds in
    (("shoal", "first", 4.0), ("shoal", "cached", 2.0), ("hf", "warm", 20.0), ("llama.cpp", "cold", 9.0))
]}
FIDELITY = {**BASE, "kind": "fidelity", "results": [
    {"system": "shoal", "bits_per_weight": 5.0, "perplexity": 20.5, "ratio": 1.001, "ratio_low": 0.999,
     "ratio_high": 1.003, "tokens": 511, "logits": {"relative": 0.0123},
     "greedy": {"equal": 3, "ties": 1, "wrong": 0}},
    {"system": "llama.cpp", "bits_per_weight": 5.0, "tokens": 0, "logits": {"relative": 0.01},
     "greedy": {"equal": 4, "ties": 0, "wrong": 0}},
]}


def test_the_overview_has_a_line_per_measurement_of_a_file() -> None:
    text = real.overview([SPEED, FORMATS, STARTUP, FIDELITY])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ("| model | what | Shoal | llama.cpp | transformers | times better than llama.cpp | "
                        "times better than transformers |")
    assert lines[2:] == [
        "| m.Q4_1 | decode, tokens/s | 75.0 | 50.0 | 10.0 | 1.50 (0.50-2.50) | 7.50 (6.50-8.50) |",
        "|  | decode by auto, tokens/s | 110 | 50.0 | 10.0 | 2.20 (1.20-3.20) | 11.00 (10.00-12.00) |",
        "|  | prompt of 64, tokens/s | 400 | 200 |  | 8.00 (7.00-9.00) | 40.00 (39.00-41.00) |",
        "|  | first load, s | 4.00 |  | 20.00 |  | 7.00 (6.00-8.00) |",
        "|  | load, s | 2.00 |  | 20.00 |  | 7.00 (6.00-8.00) |",
        "|  | memory at most, MB | 200 |  | 2000 |  | 5.00 (4.00-6.00) |",
    ]
    assert "a chip with AVX2, 2 threads, roof 20.0 (10.0-30.0) GB/s, medians of 3 interleaved rounds" in text
    assert "2030-01-02" in text and "commit 0123456" in text and "another machine" not in text
    assert real.overview([FIDELITY]) == "" == real.overview([])
    busy = real.overview([{**SPEED, "warnings": ["the machine was busy"]}])
    assert "Warning: m.Q4_1: the machine was busy." in busy


def test_a_glance_has_a_line_per_file() -> None:
    forward = {**result("shoal", "forward", 1), "positions": 8, "ratios": {"cost_of_one_position": figure(1.5)}}
    text = real.glance([{**SPEED, "results": [*SPEED["results"], forward]}])
    assert text.rstrip().splitlines()[-1] == "| m.Q4_1 | 75.0 (1.50x, 7.50x) | 400 (8.00x, 40.00x) | 1.50x |"
    assert "a chip with AVX2, 2 threads" in text and real.glance([]) == ""


def test_pages_of_loading_and_fidelity() -> None:
    page = real.page("m-startup", STARTUP)
    assert "### m-startup" in page and "| Shoal | cached | 2.00 (1.00-3.00) | 2.00 | 200 | 2.00 | 1 | 0 |" in page
    page = real.page("m-fidelity", FIDELITY)
    assert "| shoal | 5.00 | 20.500 | 1.0010 (0.9990-1.0030) | 511 | 1.2 % | 3, 1, 0 |" in page
    assert "| llama.cpp | 5.00 |  |  | 0 | 1 % | 4, 0, 0 |" in page


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.script("lab/benchmarks/real.py")


def test_every_part_is_a_command_within_its_share(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SHOAL_MODELS", "/models")
    argv = ["--text", "t.txt", "--work", str(tmp_path), "--minutes", "60"]
    args = script.arguments(argv)
    parts = [(part, name) for part in script.PARTS for name in script.MODELS]
    assert sum(script.minutes_of(part, name, args) for part, name in parts) == pytest.approx(60)
    parser = Parser()
    add_arguments(parser)
    for part, name in parts:
        command = script.command_of(part, name, args)
        if command[1] == "-m":
            taken = parser.parse_args(command[4:])
            assert taken.model == f"/models/{script.MODELS[name][0]}" and taken.startup == (part == "startup")
            assert taken.json == f"lab/reports/real/{name}-{part}.json"
    assert script.main([*argv, "--dry-run", "--models", "smollm2-135m"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(script.PARTS) + 1
    with pytest.raises(SystemExit):
        script.arguments([*argv, "--parts", "speed,nothing"])


def test_readers_of_the_script_are_known(script: ModuleType) -> None:
    from readers import SYSTEMS

    assert {name for names in script.READERS.values() for name in names} <= set(SYSTEMS)
