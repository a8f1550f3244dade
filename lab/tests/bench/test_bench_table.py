"""The tables in the documents are those of the reports, and the same reports always give the same tables."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import scripts
from pages import current
from shoal.cli.options.parser import Parser, parse
from shoal_lab.bench.drafts import summary

ROOT = Path(__file__).resolve().parents[3]
FIGURE = {"median": 2.0, "min": 1.0, "max": 3.0}
REPORT: dict[str, Any] = {
    "command": "shoal bench --shape 1b",
    "commit": "0123456789abcdef",
    "date": "2030-01-02T03:04:05+00:00",
    "machine": {"cpu": "a chip", "gpus": ["a card"]},
    "subject": {"name": "1b", "kind": "shape with random weights"},
    "setting": {"dtype": "bfloat16", "threads": 2, "device": "cpu"},
    "rounds": {"asked": 3, "done": 3, "stopped_early": False},
    "roof": {"median": 5e10, "min": 4e10, "max": 6e10},
    "warnings": ["the machine was busy"],
    "not_measured": [{"system": "vllm", "quant": None, "what": None, "reason": "no adapter"}],
    "results": [
        {
            "kind": "generate", "system": system, "label": label, "quant": None, "detail": detail, "version": "1",
            "rows": 1, "context": 64, "tokens_per_second": FIGURE, "ttft_seconds": FIGURE, "tpot_seconds": FIGURE,
            "mbu": {"median": 0.9}, "mean_layers": 12.0, "peak_memory_bytes": 2**30, "ratios": {"hf": FIGURE},
            "ideal_speedup": 1.0,
        }
        for system, label, detail in (
            ("shoal", "full", "packed"), ("shoal", "d3", "packed"), ("llama.cpp", "", "BF16, KV F16"),
        )
    ],
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return scripts.script("lab/tools/bench_table.py")


def test_the_tables_are_up_to_date(tool: ModuleType) -> None:
    stale = [path.name for path, text in tool.documents().items() if path.read_text("utf-8") != text]
    assert not stale, f"{stale} are out of date; run: python lab/tools/bench_table.py"


def test_kept_guesses_are_told_by_place(tool: ModuleType) -> None:
    row = {"texts": "chat", "method": "eagle", "n": 3, "forwards": 50, "tokens_per_forward": 1.604, "kept": 0.376,
           "guessed_at": [50, 30], "kept_at": [20, 10]}
    report = {"command": "python lab/benchmarks/acceptance.py --model M", "model": "M", "new_tokens": 96,
              "date": "2030-01-02T03:04:05", "rows": [row]}
    other = {"command": "shoal train eagle", "bytes": 3}
    lines = tool.kept([(Path("a"), other), (Path("b"), report)]).splitlines()
    assert lines[1] == "**M**, 96 tokens, 2030-01-02:"
    assert "| chat (3) | `eagle` | 1.60 | 38 | 40, 20 |" in lines
    assert "python lab/benchmarks/acceptance.py --model M" in lines


def test_recorded_commands_are_shown_as_they_are_given_today() -> None:
    reports = (json.loads(path.read_text("utf-8")) for path in (ROOT / "lab" / "reports").rglob("*.json"))
    commands = [one["command"] for one in reports if str(one.get("command")).startswith("shoal bench")]
    assert len(commands) > 10
    for command in map(current, commands):
        name, *argv = shlex.split(command)[1:]
        module, parser = importlib.import_module(f"shoal_lab.cli.{name.replace('-', '_')}"), Parser()
        module.add_arguments(parser)
        parse(parser, argv)
    assert current("shoal bench --serve --rate 2") == "shoal bench-serve --rate 2"
    assert current("shoal bench --shape 1b --suite spec") == "shoal bench-drafts --shape 1b"
    same = "shoal bench --shape 1b --json lab/reports/--serve.json"
    assert current(same) == same and current("lab/benchmarks/real.py --serve x") == "lab/benchmarks/real.py --serve x"


def test_reports_follow_the_order_of_their_names(tool: ModuleType, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        report = {**REPORT, "command": f"shoal bench {name}"}
        (tmp_path / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
    first, again = tool.documents(tmp_path), tool.documents(tmp_path)
    assert first == again
    text = first[ROOT / "lab" / "benchmarks" / "README.md"]
    assert text.index("shoal bench a") < text.index("shoal bench b") < text.index("shoal bench c")


def test_tables_say_what_and_where(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps(REPORT), encoding="utf-8")
    pages = tool.documents(tmp_path / "results")
    text = pages[ROOT / "lab" / "benchmarks" / "README.md"]
    assert "| shoal d3, bfloat16 | 1" in text and "| llama.cpp, BF16 | 1" in text
    assert "a chip, 2 threads" in text and "50.0 GB/s (40.0-60.0)" in text and "commit 0123456" in text
    assert "2030-01-02" in text and "2.0 (1.0-3.0)" in text and "90 %" in text and "hf 2.00" in text
    assert "Warning: the machine was busy." in text and "Random weights say nothing" in text
    assert "Not measured: vllm: no adapter" in text
    assert "a chip" not in pages[ROOT / "README.md"], "random weights are not for the README"


def test_a_table_without_reports_says_so(tool: ModuleType, tmp_path: Path) -> None:
    assert "No real model has been measured" in tool.documents(tmp_path / "results")[ROOT / "README.md"]


def drafts_report(systems: dict[str, float]) -> dict[str, Any]:
    """A report of a text decoded by some systems, each this many times faster."""
    made = {name: {"seconds_per_token": [1 / times], "tokens_per_forward": times * 2, "drafted": 8, "accepted": 2,
                   "ideal_speedup": 1.25, "difference": None if times < 2 else {"tie": True, "nats": 0.5,
                                                                               "agreement": 0.25}}
            for name, times in systems.items()}
    one = {"kind": "edits", "systems": made, "busy": [0.25]}
    texts = [one, {"kind": "edits", "too_short": True}, one]
    asked = {"model": "m.gguf", "computes_in": "bfloat16", "new_tokens": 64, "rounds": 1, "systems": list(systems)}
    report = {key: REPORT[key] for key in ("command", "date", "machine", "setting")}
    return {**report, "machine": {"cpu": "a chip", "cpu_count": 2}, "texts": texts, "asked": asked,
            "results": summary.rows(texts, ["edits"], list(systems)),
            "lossless": {"answers": 4, "equal": 3, "ties": 1, "wrong": 0}}


def test_what_drafts_bring_is_a_line_per_method(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "drafts").mkdir()
    report = drafts_report({"full": 1.0, "a": 0.5, "draft_model:draft=m:length=3": 2.5})
    (tmp_path / "drafts" / "a.json").write_text(json.dumps(report), encoding="utf-8")
    text = tool.documents(tmp_path / "results")[ROOT / "lab" / "reports" / "drafts" / "README.md"]
    assert "| method | edits (2) |" in text and "| a | 0.50x (0.50-0.50), 1.00, 25 % |" in text
    assert "| draft_model:length=3 | **2.50x** (2.50-2.50), 5.00, 25 % |" in text
    assert "Of 4 answers of lossless methods 3 equal plain decoding's, 1 differ by a tie, 0 otherwise" in text


def test_trained_parts_have_a_page_with_their_cards(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name, systems in (("a", {"full": 1.0, "eagle:part=folder:width=2": 0.5}), ("b", {"full": 1.0, "deer": 3.0})):
        (tmp_path / "parts" / f"{name}.json").write_text(json.dumps(drafts_report(systems)), encoding="utf-8")
    (tmp_path / "parts" / "card.json").write_text(json.dumps({"part": "heal"}), encoding="utf-8")
    text = tool.documents(tmp_path / "results")[ROOT / "lab" / "reports" / "parts" / "README.md"]
    assert "| eagle:width=2 | 0.50x" in text and "| deer |" not in text
    card = json.loads((ROOT / "src/shoal/parts/smollm2-135m-instruct/part.json").read_text("utf-8"))
    first, second = card["acceptance"][:2]
    line = next(line for line in text.splitlines() if "shoal/parts/smollm2-135m-instruct/part.json" in line)
    assert f"| {100 * first:.0f}, {100 * second / first:.0f}" in line
    assert f"| {card['tokens_per_forward']:.2f} |" in line


def test_a_dial_stands_in_the_order_of_its_speed(tool: ModuleType) -> None:
    text = tool.drafts(drafts_report({"full": 1.0, "d3_spec:rule=lenient:margin=2": 2.0, "d3": 0.5}))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| d3", "| full", "| d3_spec:margin=2"]
    assert lines[-1].endswith("| 2.00x (2.00-2.00) | 1.25x | 4.00 | 0.500 | 25 | 0 of 2 |")


def test_nothing_is_written_over_a_page_without_marks(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match="marks"):
        tool.filled("# A page\n", "table")
    page = "a\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\nb\n"
    assert tool.filled(page, "") == "a\n<!-- benchmarks:begin -->\n<!-- benchmarks:end -->\nb\n"
    assert tool.filled(tool.filled(page, "new \\1\n"), "") == tool.filled(page, "")


def test_loads_stand_beside_what_was_predicted(tool: ModuleType, tmp_path: Path) -> None:
    times = {"p50": 0.1, "p90": 0.25}
    one = {"system": "shoal", "label": "full, waves", "load": "8 at once", "tokens_per_second": FIGURE, "errors": 1,
           "ttft_seconds": times, "tpot_seconds": None, "requests": 16, "cores": {"median": 1.9}}
    keys = ("command", "commit", "date", "machine", "subject", "setting", "rounds")
    stage = {**{key: REPORT[key] for key in keys}, "results": [one], "not_measured": [{"system": "x", "reason": "why"}]}
    gain = {"load": "8 at once", "policy": "waves", "of": "tokens/s", "measured": FIGURE, "predicted": {"median": 1.3},
            "in_phase": 1.4}
    plain = {"load": "1 a second", "policy": "join", "of": "mean latency", "measured": {"median": 1.07}}
    aim = {"what": "speed", "measured": 3.125, "aim": 3.0, "reached": True}
    extra = {**one, "load": "4 at once", "concurrency": 4, "times_the_speed_of": {"peer serve": FIGURE}}
    file = {**stage, "subject": {"name": "m.gguf"}, "results": [extra, {**extra, "system": "peer", "label": ""}]}
    (tmp_path / "serving").mkdir()
    for name, found in (("streams", stage), ("load-m-4", file), ("gain", {"aims": [aim], "gains": [gain, plain]})):
        (tmp_path / "serving" / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    text = tool.documents(tmp_path / "results")[ROOT / "lab" / "reports" / "serving" / "README.md"]
    assert "| speed | 3.12 | 3 | yes |" in text
    assert "| 8 at once | waves | tokens/s | 2.00 (1.00-3.00) | 1.30 | 1.40 |" in text
    assert "| 1 a second | join | mean latency | 1.07 |  |  |" in text
    assert "| shoal full, waves | 8 at once | 2.0 (1.0-3.0) | 100, 250 |  | 1 of 16 | 1.90 |" in text
    end = "4 at once | 2.0 (1.0-3.0) | 100, 250 |  | 1 of 16 | 1.90 |"
    assert f"| m | shoal full, waves | {end} peer 2.00 (1.00-3.00) |" in text and f"| m | peer | {end}  |" in text
    assert "Not measured: x: why." in text and "shoal bench --shape 1b\n```" in text


def test_auto_beside_plain_decoding_has_a_line_per_kind(tool: ModuleType, tmp_path: Path) -> None:
    def row(kind: str, system: str, each: list[float]) -> dict[str, Any]:
        ratio = {"mean": 1.234, "low": 1.056, "high": 2.0, "each": each}
        return {"kind": kind, "system": system, "times_faster": ratio, "tokens_per_forward": 1.5}

    report = {"command": "shoal bench-drafts --model m", "date": "2030-01-02T00:00:00", "machine": {"cpu": "a chip"},
              "asked": {"model": "m.gguf", "new_tokens": 96, "rounds": 5},
              "results": [row("chat", "full", [0.1]), row("chat", "auto", [1.3, 0.95, 1.1]),
                          row("code", "auto", [1.0 + number / 100 for number in range(9)])],
              "lossless": {"answers": 12, "equal": 11}}
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / "m.json").write_text(json.dumps(report), encoding="utf-8")
    text = tool.documents(tmp_path / "results")[ROOT / "lab" / "reports" / "drafts" / "README.md"]
    assert "| chat | 1.23x (at least 1.06), 1.50 |" in text
    assert "| worst tenth of all texts | 1.000x |" in text and "| worst text | 0.950x |" in text
    assert "12 texts, 96 tokens, 5 rounds, 2030-01-02; 11 texts equal" in text
    assert "`shoal bench-drafts --model m`" in text
