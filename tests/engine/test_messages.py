"""Chat messages as prompts: the same as their text through the template, alone, in a batch, streamed and scheduled."""

from __future__ import annotations

import pytest

from chat_tokenizer import chat_tokenizer
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.request import chat_ids
from shoal.engine.scheduling.scheduler import Scheduler

TALK = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_for(tiny("llama"), chat_tokenizer())


def test_messages_are_their_template(engine: Engine) -> None:
    expected = engine.generate(chat_ids(TALK, engine.tokenizer), max_new_tokens=6)
    assert engine.generate(TALK, max_new_tokens=6).tokens == expected.tokens
    assert expected.tokens != engine.generate(chat_ids(TALK[:1], engine.tokenizer), max_new_tokens=6).tokens
    steps = [*engine.stream(TALK, max_new_tokens=6)]
    assert tuple(step.token for step in steps) == expected.tokens
    assert {(step.seq, step.row) for step in steps} == {(0, 0)}, "row is the older name"
    with Scheduler(engine) as scheduler:
        assert tuple(step.token for step in scheduler.submit(TALK, max_new_tokens=6)) == expected.tokens


def test_a_batch_of_talks(engine: Engine) -> None:
    alone = [engine.generate(talk, max_new_tokens=6).tokens for talk in (TALK, TALK[:1])]
    assert [found.tokens for found in engine.generate([TALK, TALK[:1]], max_new_tokens=6)] == alone


def test_messages_need_a_template() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        engine_for(tiny("llama")).generate(TALK)


def test_a_template_may_refuse(engine: Engine) -> None:
    with pytest.raises(ValueError, match="refuses these messages"):
        engine.generate([{"role": "user"}])


def test_messages_and_words_do_not_mix(engine: Engine) -> None:
    with pytest.raises(ValueError, match="chat messages, or"):
        engine.generate([5, {"role": "user", "content": "one"}])
