"""After kills at any point a job ends with each line answered once, and never changes another job's file."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_files import SETTINGS, echo, records, write_lines
from chat_tokenizer import chat_tokenizer
from families import tiny
from serving import MODEL, serving
from shoal.batch import job
from shoal.batch.job import BatchRunner
from shoal.batch.journal import Journal
from shoal.batch.lines import Line
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Interrupted
from tool_tokenizer import speaking
from turns import by_turns

WORDS = ["Ähre", "b", "\u2028", "d" * 50, "", "f", "\U0001f41f", "h", "i"]
WHOLE = {number: word for number, word in enumerate(WORDS, start=1)}


def made(folder: Path) -> tuple[Path, Path]:
    return write_lines(folder / "in.jsonl", ({"prompt": word} for word in WORDS)), folder / "out.jsonl"


def run(source: Path, target: Path, settings: Any = SETTINGS) -> job.Report:
    return job.run(source, target, settings, lambda: echo)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def said(path: Path) -> dict[int, str]:
    """The answer of each line; every line is in the file at most once."""
    found = records_of(path)
    assert len({record["line"] for record in found}) == len(found)
    return {record["line"]: record["text"] for record in found}


def records_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in lines_of(path)]


@given(cut=st.integers(0, 10_000), again=st.integers(0, 10_000))
@settings(max_examples=60)
def test_a_file_that_was_cut_anywhere_is_completed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, again: int
) -> None:
    source, target = made(tmp_path_factory.mktemp("job"))
    with mock.patch("os.fsync"):  # a disk is slow, and nothing is killed here
        cut_and_complete(source, target, cut, again)


def cut_and_complete(source: Path, target: Path, cut: int, again: int) -> None:
    run(source, target)
    for where in (cut, again):
        kept = target.read_bytes()[: where % (target.stat().st_size + 1)]
        target.write_bytes(kept)
        report = run(source, target)
        whole = kept[: kept.rfind(b"\n") + 1]
        assert target.read_bytes().startswith(whole), "what was written before has changed"
        assert report.before == whole.count(b"\n")
        assert report.before + report.written == report.lines == len(WORDS)
        assert said(target) == WHOLE


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@by_turns("seed", range(2))
def test_a_job_that_is_killed_while_it_writes_is_completed(tmp_path: Path, seed: int) -> None:
    source, target = made(tmp_path)
    draw, kills, codes = random.Random(seed), 0, []
    while not codes or codes[-1]:
        words = [sys.executable, str(Path(__file__).parents[1] / "batch_files.py"), source, target]
        codes.append(subprocess.run([*words, str(draw.randint(1, 400))], env=os.environ, timeout=60).returncode)
        assert codes[-1] in (0, -signal.SIGKILL)
        kills += codes[-1] != 0
        assert len(codes) < 60
    assert kills >= 1
    assert said(target) == WHOLE


def test_a_kill_before_the_first_line(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    target.touch()
    run(source, target)
    target.unlink()  # the note of the job is written before the first record
    assert run(source, target).written == len(WORDS)
    (tmp_path / "out.jsonl.job.part").write_text('{"opt')
    assert run(source, target).written == 0


def test_a_finished_job_asks_nobody(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    run(source, target)
    before = target.read_bytes()
    report = job.run(source, target, SETTINGS, lambda: pytest.fail("somebody was asked"))
    assert (report.before, report.written) == (len(WORDS), 0)
    assert target.read_bytes() == before


def refused(source: Path, target: Path, settings: Any = SETTINGS) -> str:
    before = target.read_bytes()
    with pytest.raises(ValueError) as caught:
        run(source, target, settings)
    assert target.read_bytes() == before, "a file that was refused has changed"
    return str(caught.value)


def test_a_file_of_another_job_is_left_alone(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    run(source, target)
    assert "option seed was 3 and now is 4" in refused(source, target, {"option": {"method": "full", "seed": 4}})
    assert "option more was None" in refused(source, target, {"option": {**SETTINGS["option"], "more": 1}})
    write_lines(source, [{"prompt": "other"}])
    assert "input hash was" in refused(source, target)


def test_a_file_of_no_job_is_left_alone(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    target.write_text("a letter\n")
    assert "was not written by a batch job" in refused(source, target)
    assert "is the input" in refused(source, source)
    target.unlink()
    run(source, target)
    (tmp_path / "out.jsonl.job").write_text("[]")
    assert "does not say" in refused(source, target)
    with pytest.raises(ValueError, match="no regular file"):
        run(source, tmp_path)
    with pytest.raises(ValueError, match="cannot write"):
        run(source, tmp_path / "none" / "out.jsonl")


@pytest.mark.parametrize(
    ("line", "why"), [(b"{}\n", "no record"), (b"\0\0\n", "no record"), (b'{"line": 99}\n', "none of the input's"),
                      (b'{"line": 2}\n', "twice"), (b'{"line": true}\n', "answers line True")]
)
def test_a_damaged_file_is_left_alone(tmp_path: Path, line: bytes, why: str) -> None:
    source, target = made(tmp_path)
    run(source, target)
    first, second, *rest = lines_of(target)
    assert b'"line": 2' in first
    target.write_bytes(b"\n".join([first, second, line[:-1], *rest[1:], b""]))
    assert why in refused(source, target)


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    source, target = made(tmp_path)
    with closing(Journal(target, SETTINGS, 9)), pytest.raises(ValueError, match="another process"):
        run(source, target)


def test_an_answer_that_comes_twice_is_written_once(tmp_path: Path) -> None:
    source, target = made(tmp_path)
    report = job.run(source, target, SETTINGS, lambda: lambda lines: (one for one in echo(lines) for _ in range(2)))
    assert report.written == len(WORDS)
    assert said(target) == WHOLE


def test_errors_are_counted_over_all_runs(tmp_path: Path) -> None:
    source, target = made(tmp_path)

    def answer(lines: Any) -> Any:
        for line in lines:
            yield {"line": line.number, "error": "no"}
            if line.number == 4:
                return

    assert job.run(source, target, SETTINGS, lambda: answer).errors == 4
    assert run(source, target).errors == 4
    assert len(records(target)) == len(WORDS)


DEFAULTS = {"max_new_tokens": 6, "temperature": 0.0, "method": {"method": "full"}}


def lines(fields: Iterable[Any]) -> list[Line]:
    given = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in fields]
    return [Line(number, raw) for number, raw in enumerate(given, start=1)]


def engine() -> Engine:
    return engine_for(tiny("llama", layers=4), chat_tokenizer())


def answers(engine: Engine, fields: Iterable[Any], **scheduling: Any) -> dict[int, Any]:
    with Scheduler(engine, **{"max_seqs": 3, **scheduling}) as scheduler:
        found = list(BatchRunner(scheduler, DEFAULTS).answers(lines(fields)))
    assert len({record["line"] for record in found}) == len(found)
    return {record["line"]: record for record in found}


def test_lines_get_what_the_engine_says_alone() -> None:
    model = engine()
    d3 = {"method": "d3", "method_args": {"alpha": 0.8, "core": 2}}
    given = [{"id": n, "prompt": "abcdefgh"[: n + 1], "max_new_tokens": 3 + n, **(d3 if n % 2 else {})}
             for n in range(8)]
    given.append({"id": "drawn", "prompt": "xyz", "temperature": 1.0, "seed": 5, "logprobs": 1})
    found = answers(model, given)
    for number, fields in enumerate(given, start=1):
        options = {"max_new_tokens": 6, **{k: v for k, v in fields.items() if k not in ("id", "prompt", "method_args")}}
        if "method" in fields:
            options["method"] = d3
        alone = model.generate(fields["prompt"], **options)
        record = found[number]
        said = (record["id"], record["text"], record["finish_reason"])
        assert said == (fields["id"], alone.text, alone.finish_reason)
        assert record["new_tokens"] == len(alone.tokens)
        assert record["mean_layers"] == pytest.approx(alone.stats.mean_layers, abs=1e-4)
    assert found[9]["seed"] == 5
    assert len(found[9]["logprobs"]) == 6
    json.dumps(list(found.values()), allow_nan=False)


@pytest.mark.parametrize("bias", [b'{"5": "nan"}', b'{"5": 1e999}', b'{"5": -1e9}', b'{"5": 1e9}'])
def test_a_bias_that_is_no_number_is_refused(bias: bytes) -> None:
    found = answers(engine(), [{"prompt": "ab"}, b'{"prompt": "ab", "logit_bias": ' + bias + b"}"])
    assert re.match(r"logit_bias\[5\] is .*; it must be a number in -1e\+08..1e\+08", found[2]["error"])
    assert "error" not in found[1]


REPLAYED: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}],
    [{"role": "developer", "content": "Be"}, {"role": "user", "content": "Hi", "name": "ann"}],
    [{"role": "user", "content": {"type": "text", "text": "Hi"}}, {"role": "assistant", "content": "Th"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "refusal": None, "audio": {"id": "x"},
      "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
     {"role": "tool", "tool_call_id": "c", "content": None}],
]


def test_messages_are_those_that_the_server_takes() -> None:
    model = speaking()
    found = answers(model, [{"messages": one} for one in REPLAYED])
    with serving(model) as server:
        for number, messages in enumerate(REPLAYED, start=1):
            body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}
            chat = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            record, said = found[number], chat.json()
            assert (record["text"], record["prompt_tokens"]) == (
                said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"])
            named = chat.headers.get("x-shoal-ignored")
            assert record.get("ignored") == (None if named is None else named.split(", "))
    assert found[4]["ignored"] == ["messages.audio"]


def test_lines_say_what_their_answers_must_look_like() -> None:
    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
             "additionalProperties": False}
    given: list[dict[str, Any]] = [
        {"guided_json": shape}, {"constraint": shape}, {"guided_regex": "[0-9]{3}"}, {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'start: "ab" "c"'}, {}, {"guided_regex": 5}, {"guided_choice": []},
        {"guided_regex": "a", "guided_choice": ["b"]}, {"guided_regex": "("},
    ]
    found = answers(speaking(), [{"prompt": "x", "max_new_tokens": 60, **fields} for fields in given])
    texts = [found[number].get("text", "") for number in range(1, 7)]
    assert [json.loads(text).keys() for text in texts[:2]] == [{"a"}, {"a"}]
    assert re.fullmatch("[0-9]{3}", texts[2]) and texts[3] in ("yes", "no") and texts[4] == "abc"
    assert texts[5] == speaking().generate("x", max_new_tokens=60).text
    said = [found[number]["error"] for number in range(7, 11)]
    assert ["guided_regex is 5" in said[0], "guided_choice is []" in said[1], "give one" in said[2],
            "Regex('(')" in said[3]] == [True] * 4, said


def test_lines_in_error_stop_nobody() -> None:
    given = [{"prompt": "a"}, {"id": 7, "prompt": ""}, b"\xff", {"prompt": [1, 99999]}, {"prompt": "b", "id": [1]},
             {"prompt": "b", "method": "d4"}, {"prompt": "b", "temperature": -1}, {"prompt": "a" * 5000},
             {"prompt": "c"}]
    found = answers(engine(), given)
    assert [number for number, record in sorted(found.items()) if "text" in record] == [1, 9]
    assert found[2]["id"] == 7
    assert "99999" in found[4]["error"]
    assert "d4" in found[6]["error"]
    assert "-1" in found[7]["error"]


def test_what_a_search_cost_is_said_and_nothing_where_there_is_none() -> None:
    search = {"method": "best_of", "method_args": {"n": 3}}
    asked = {"prompt": "abc", "temperature": 1.0, "seed": 2, "max_new_tokens": 6}
    found = answers(engine(), [{**asked, **search}, asked])
    alone = engine().generate("abc", method=search, temperature=1.0, seed=2, max_new_tokens=6)
    assert alone.stats.extra == {"branches": 3, "thrown_away": 12}
    assert (found[1]["branches"], found[1]["thrown_away"]) == (3, 12)
    assert not {"branches", "thrown_away", "switches", "second_tokens"} & set(found[2])


def test_a_line_that_fails_while_it_runs_stops_nobody() -> None:
    model = engine()
    inner = model.runner.forward

    def forward(chunks: Any, *rest: Any) -> torch.Tensor:
        if any(9 in chunk.tokens for chunk in chunks):
            raise RuntimeError("an unlucky token")
        return inner(chunks, *rest)

    model.runner.forward = forward
    found = answers(model, [{"prompt": [5, 4]}, {"prompt": [9, 4], "max_new_tokens": 1}, {"prompt": [6, 4]}])
    assert found[2]["error"] == "RuntimeError: an unlucky token"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_scheduler_that_fails_ends_the_job() -> None:
    model = engine()
    with Scheduler(model) as scheduler:
        handler = BatchRunner(scheduler, DEFAULTS)

        def broken() -> None:
            raise SystemError("the machine is on fire")

        scheduler._admit = broken
        with pytest.raises(Interrupted, match="interrupted"):  # it began anew once, in vain
            list(handler.answers(lines([{"prompt": "a"}])))


def test_without_a_tokenizer_answers_are_token_ids() -> None:
    model = engine_for(tiny("llama", layers=4))
    with Scheduler(model) as scheduler:
        (record,) = BatchRunner(scheduler, DEFAULTS).answers(lines([{"prompt": [5, 6]}]))
    assert record["tokens"] == model.generate([5, 6], max_new_tokens=6).tokens
