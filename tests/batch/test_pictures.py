"""Lines of a batch whose messages hold pictures: answered as the server and the engine alone answer them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import seers
from batch_files import records, write_lines
from serving import MODEL, serving, tiny_engine
from shoal.batch.job import BatchRunner
from shoal.batch.lines import Line
from shoal.cli import main
from shoal.engine.engine import Engine
from shoal.engine.scheduling.scheduler import Scheduler

DEFAULTS = {"max_new_tokens": 8, "temperature": 0.0, "method": {"method": "full"}}
CHATS: list[list[dict[str, Any]]] = [
    [seers.said("Look: ", seers.picture(5, 60, 40), " what?")],
    [{"role": "user", "content": "No picture here?"}],
    [{"role": "system", "content": "Be"}, seers.said(seers.picture(5, 60, 40), seers.picture(6), "which?")],
    [seers.said(seers.picture(6), "what?"), {"role": "assistant", "content": "Th"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("seer") / "model"
    seers.write(found, "llava")
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield seers.engine(tmp_path_factory.mktemp("seer"))


def answers(engine: Engine, given: list[Any]) -> dict[int, Any]:
    lines = [Line(number, json.dumps(one).encode()) for number, one in enumerate(given, start=1)]
    with Scheduler(engine, max_seqs=8) as scheduler:
        found = list(BatchRunner(scheduler, DEFAULTS).answers(lines))
    return {record["line"]: record for record in found}


def test_lines_get_what_the_server_says(engine: Engine) -> None:
    found = answers(engine, [{"messages": one} for one in CHATS])
    with serving(engine, max_pictures=1 << 20) as server:
        for number, messages in enumerate(CHATS, start=1):
            body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
            said = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            assert (found[number]["text"], found[number]["prompt_tokens"]) == (
                said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"])
    assert len({record["text"] for record in found.values()}) == 4
    alone = engine.generate(CHATS[0], max_new_tokens=8, temperature=0.0)
    assert found[1]["text"] == alone.text


def watched(seen: list[int], inner: Any, chunks: Any, *rest: Any) -> Any:
    seen.append(len(chunks))
    return inner(chunks, *rest)


def test_lines_with_pictures_share_forwards_with_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    together = list[int]()
    for name in ("argmax", "argmax_steps"):
        inner = getattr(engine.runner, name)
        monkeypatch.setattr(engine.runner, name, partial(watched, together, inner))
    given = [json.dumps({"messages": one, "ignore_eos": True}).encode() for one in CHATS]
    with Scheduler(engine, max_seqs=8) as scheduler, ExitStack() as turn:
        turn.enter_context(engine.turn())

        def lines() -> Iterator[Line]:
            """The lines; no forward begins before the last one waits."""
            yield from map(Line, range(1, 5), given)
            turn.close()

        found = list(BatchRunner(scheduler, DEFAULTS).answers(lines()))
    assert [record["new_tokens"] for record in found] == [8] * 4
    assert max(together) == 4


def test_pictures_in_error_stop_nobody(engine: Engine) -> None:
    url = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    torn = {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}
    chats = [[{"role": "user", "content": [part]}] for part in (url, torn, {"type": "image_url"})]
    found = answers(engine, [*({"messages": one} for one in (*chats, CHATS[0])), {"prompt": "a", "source": "b"}])
    said = [found[number]["error"] for number in (1, 2, 3, 5)]
    assert ["fetches nothing" in said[0], "no valid base64" in said[1], "without image_url" in said[2],
            "unknown field 'source'" in said[3]] == [True] * 4, said
    assert "error" not in found[4]
    blind = answers(tiny_engine(), [{"messages": CHATS[0]}, {"messages": CHATS[1]}])
    assert "use a model that sees" in blind[1]["error"] and "error" not in blind[2]


def test_the_command_answers_them(folder: Path, engine: Engine, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [{"id": number, "messages": one} for number, one in enumerate(CHATS)])
    assert main(["batch", str(source), str(tmp_path / "out"), "--model", str(folder), "--dtype", "float32",
                 "--max-new-tokens", "8"]) == 0
    found = {record["id"]: record["text"] for record in records(tmp_path / "out")}
    assert found == {number: engine.generate(one, max_new_tokens=8, temperature=0.0).text
                     for number, one in enumerate(CHATS[:3])} | {3: found[3]}
