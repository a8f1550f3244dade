"""`shoal serve` as a process: it prints its address, and on SIGTERM finishes running requests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from shoal.cli import main


def test_a_terminated_server_finishes_its_streams(tiny_folder: str) -> None:
    words = ["serve", "--model", tiny_folder, "--served-model-name", "t", "--port", "0", "--dtype", "float32"]
    words += ["--max-rows", "2"]
    process = subprocess.Popen([sys.executable, "-m", "shoal", *words], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"at (http\S+)", line)))
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        options = {"model": "t", "prompt": "Some words", "max_tokens": 200, "temperature": 0}
        streams = [client.completions.create(**options, stream=True) for _ in range(5)]  # three of them wait
        next(iter(streams[0]))
        process.send_signal(signal.SIGTERM)
        texts = []
        for stream in streams:
            chunks = list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
            texts.append("".join(chunk.choices[0].text for chunk in chunks))
        assert len(set(texts[1:])) == 1 and texts[1].endswith(texts[0])
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(**options)
        client.close()
        process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "d4"], "d4"),
        (["--admission", "tides"], "tides"),
        (["--port", "99999"], "99999"),
        (["--max-rows", "0"], "--max-seqs"),
        (["--timeout", "-1"], "timeout"),
        (["--kv-gib", "0"], "kv"),
        (["--method", "best_of", "--max-rows", "3"], "--max-seqs is 3; best_of needs 4"),
        (["--method", "best_of", "--max-n", "1"], "--max-n is 1; best_of needs 4"),
    ],
)
def test_options_that_make_no_sense(
    tiny_folder: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--model", tiny_folder, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "{tiny}", "--served-model-name", "t"], "give --alias NAME=MODEL"),
        (["--model", "{other}", "--replicas", "2"], "--replicas is 2 with several models"),
        (["--keep-alive", "5m", "--lora", "a=none"], "there is no adapter at 'none'"),
        (["--lora-for", "none=a=none"], "--lora-for none: there is no such model; there are {name}"),
        (["--lora-for", "none"], "'none' is no NAME=VALUE"),
        (["--model", "{other}"], "would stand for both"),
        (["--alias", "x={tiny}", "--alias", "x=org/other"], "the name 'x' would stand for both"),
        (["--alias", "x=org/none", "--alias", "x=org/other"], "would stand for both org/none and org/other"),
        (["--models", "/nothing/there"], "--models /nothing/there: it is no folder"),
        (["--alias", "small=org/none"], "shoal pull org/none"),
        (["--keep-alive", "5m", "--memory", "1MiB"], "and 5% are kept back"),
        (["--keep-alive", "5m", "--method-for", "{name}=d4"], "d4"),
    ],
)
def test_several_models_that_cannot_be(
    tiny_folder: str, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = Path(tiny_folder).name
    other = tmp_path / name
    other.mkdir()
    given = [word.format(tiny=tiny_folder, other=other, name=name) for word in words]
    assert main(["serve", "--port", "0", "--model", tiny_folder, *given]) == 2
    assert said.format(name=name) in capsys.readouterr().err


def test_the_typed_model_takes_the_place_of_the_configured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shoal.toml").write_text('model = "configured"\n', "utf-8")
    monkeypatch.setenv("SHOAL_CONFIG", str(tmp_path / "shoal.toml"))
    assert main(["serve", "--port", "0", "--model", "org/typed"]) == 2
    said = capsys.readouterr().err
    assert "typed" in said and "configured" not in said
