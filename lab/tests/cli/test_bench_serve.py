"""`shoal bench-serve` from its options to its report: on a running server, and on one that it starts itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Running, serving, tiny_engine
from shoal.cli import main

SHORT = ["--new-tokens", "4", "--context", "5", "--rounds", "1"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


def report(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert main(["bench-serve", *argv]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_running_server_is_measured(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    argv = ["--url", server.url, "--concurrency", "1,3", "--rate", "50", "--requests", "4", "--slo", "ttft=60",
             "--methods", "full,early_exit:exit_layer=2", "--json", str(tmp_path / "a.json"), *SHORT,
             "--plot", str(tmp_path / "a.png")]
    found = report(capsys, *argv)
    assert found == json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert found["command"].startswith("shoal bench-serve --url")
    assert [one["load"] for one in found["results"]] == ["1 at once"] * 2 + ["3 at once"] * 2 + ["50 a second"] * 2
    for one in found["results"]:
        assert (one["requests"], one["errors"], one["tokens"]) == (4, 0, 16)
        assert one["goodput"]["share"] == 1.0 and one["queue_seconds"]["p99"] >= 0
        assert one["ttft_seconds"]["p50"] > 0 and one["gap_seconds"]["p50"] >= 0
        if sys.platform == "linux":
            assert one["memory"]["last"] > 2**20
    assert {one["label"] for one in found["results"]} == {"full", "early_exit:exit_layer=2"}
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_method_reaches_the_server(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    import httpx

    def layers() -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("shoal:layers_executed_total{"))

    report(capsys, "--url", server.url, "--requests", "1", *SHORT)
    before = layers()
    report(capsys, "--url", server.url, "--requests", "1", "--methods", "early_exit:exit_layer=1", *SHORT)
    assert layers() - before == 4 + 3 * 1


def test_errors_are_counted_not_raised(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--url", server.url, "--served-model", "nobody", "--requests", "2", *SHORT)
    (one,) = found["results"]
    assert (one["requests"], one["errors"], one["tokens"], one["ttft_seconds"]) == (2, 2, 0, None)
    assert "404" in next(iter(one["messages"]))


@pytest.mark.slow
def test_a_soak_judges_errors_and_memory(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    soak = ["--url", server.url, "--soak", "--concurrency", "2", "--minutes", "0.04", *SHORT]
    found = report(capsys, *soak, "--served-model", "nobody", "--plot", str(tmp_path / "a.png"), code=1)
    assert not found["verdict"]["passed"] and "failed" in found["verdict"]["why"][0]
    assert main(["bench-serve", *soak]) in (0, 1)
    out = capsys.readouterr().out
    assert "soak " in out and json.loads(out.splitlines()[-1])["results"][0]["errors"] == 0


@pytest.mark.slow
def test_a_server_is_started_and_ended(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", tiny_folder, "--dtype", "float32", "--concurrency", "2", "--threads", "1", *SHORT]
    (one,) = report(capsys, *argv, "--max-rows", "2", "--admission", "waves")["results"]
    assert (one["system"], one["requests"], one["errors"], one["tokens"]) == ("shoal", 4, 0, 16)
    assert one["label"] == "full, waves"
    if sys.platform == "linux":
        assert one["cores"]["median"] > 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--serve"], "leave it out"),
        (["--url", "nonsense"], "must look like"),
        (["--batch", "2"], "no option --batch"),
        (["--url", "http://127.0.0.1:9", "--peer", "transformers"], "no --model, --shape or --peer"),
        (["--peer", "vllm"], "vllm"),
        (["--concurrency", "x"], "--concurrency"),
        (["--rate", "2"], "need an end"),
        (["--soak", "--concurrency", "2"], "--minutes"),
        (["--soak", "--concurrency", "2,3", "--minutes", "1"], "one load"),
        (["--chat", "--peer", "llama.cpp"], "no chats"),
        (["--quant", "none,int8"], "invalid choice"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-serve", *argv]) == 2
    assert said in capsys.readouterr().err
