"""A chat that keeps its KV answers as one that starts afresh each turn, and runs no prompt token twice in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from chat_tokenizer import SPECIALS, chat_tokenizer
from drive import Seen, gap
from families import fingerprint, tiny
from oracle import decoder_layers
from shoal.decode.prefixes import common
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.session import Session
from shoal.errors import Unsupported
from shoal.methods.d3 import D3

NEW = 12
WORDS = chat_tokenizer()
LETTERS_ONLY = dict.fromkeys(range(len(SPECIALS)), -1e4)
SHALLOW = D3(alpha=0.8, core=2)
METHODS = {"full": "full", "d3": SHALLOW, "d3, late": D3(alpha=0.7, core=2, start=6), "d3, no layer 1": D3(
    alpha=0.8, core=1, order="high_first")}
QUESTIONS = ["Hello there", "and 2+2?", "why, though", "ok"]
methods = pytest.mark.parametrize("method", METHODS)
names = pytest.mark.parametrize("name", ["llama", "hybrid", "mistral"])


def engine(name: str = "llama") -> Engine:
    return engine_for(tiny(name), WORDS)


def options(method: Any = "full", **others: Any) -> dict[str, Any]:
    return {"method": method, "max_new_tokens": NEW, "logit_bias": LETTERS_ONLY, **others}


def ids_of(messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = WORDS.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return ids


@contextmanager
def forwards(name: str) -> Iterator[list[int]]:
    """How many tokens each forward embeds."""
    sizes: list[int] = []
    handle = tiny(name).get_input_embeddings().register_forward_hook(lambda _m, _a, out: sizes.append(out.shape[1]))
    try:
        yield sizes
    finally:
        handle.remove()


def check_turn(chat: Session, question: str, **changes: Any) -> list[int]:
    """The next answer is that of a fresh generation: tokens and logits. Returns the sizes of the turn's forwards."""
    fresh, seen = Seen(), Seen()
    one, asked = chat._engine, [*chat.messages, {"role": "user", "content": question}]
    given = {**chat._options, **changes}
    expected = one.generate(ids_of(asked), **{**given, "logits_processor": [fresh]})
    with forwards(_names[id(one)]) as sizes:
        result = chat.send(question, **changes, logits_processor=[seen])
    assert result.tokens == expected.tokens
    assert result.text == expected.text
    assert gap(torch.stack(seen.logits), torch.stack(fresh.logits)) <= 1e-10
    assert chat.messages == [*asked, {"role": "assistant", "content": result.text}]
    return sizes


_names: dict[int, str] = {}


def begin(name: str = "llama", method: Any = "full", **others: Any) -> Session:
    one = engine(name)
    one.info()
    chat = one.session(**options(method, **others))
    _names[id(one)] = name
    return chat


@methods
@names
def test_turns_equal_fresh_generations(name: str, method: str) -> None:
    before = fingerprint(tiny(name))
    chat = begin(name, METHODS[method])
    for question in QUESTIONS:
        check_turn(chat, question)
    assert fingerprint(tiny(name)) == before


@names
def test_methods_may_change_between_turns(name: str) -> None:
    chat = begin(name)
    for question, method in zip(QUESTIONS, ["full", SHALLOW, METHODS["d3, late"], "full"], strict=True):
        check_turn(chat, question, method=method)


def test_special_tokens_in_answers() -> None:
    """Generated tokens that the transcript does not hold leave the cache again."""
    chat = begin("hybrid", SHALLOW, logit_bias=dict.fromkeys(range(len(SPECIALS)), 2.5))
    answers = [check_turn(chat, question) and chat._cached for question in QUESTIONS]
    assert any(token < len(SPECIALS) for cached in answers for token in cached[-NEW:])


def test_a_full_answer_is_not_run_again() -> None:
    chat = begin()
    first = ids_of([{"role": "user", "content": QUESTIONS[0]}])
    assert check_turn(chat, QUESTIONS[0]) == [len(first)] + [1] * (NEW - 1)
    whole = ids_of([*chat.messages, {"role": "user", "content": QUESTIONS[1]}])
    assert check_turn(chat, QUESTIONS[1])[0] == len(whole) - len(first) - (NEW - 1)


@pytest.mark.parametrize("start", [0, 1, 5, 30])
def test_a_shallow_answer_is_run_again_from_its_first_shallow_token(start: int) -> None:
    method = D3(alpha=0.8, core=2, start=start, horizon=NEW)
    chat = begin(method=method)
    check_turn(chat, QUESTIONS[0])
    first = len(ids_of(chat.messages[:1]))
    sets = engine().plan(method, max_new_tokens=NEW)
    deep = sum(len(kept) == 6 for kept in sets)
    whole = ids_of([*chat.messages, {"role": "user", "content": QUESTIONS[1]}])
    reused = first + min(deep, NEW) - 1
    assert check_turn(chat, QUESTIONS[1])[0] == len(whole) - reused
    assert (start == 30) == (deep == NEW)


def test_another_system_prompt_or_transcript_reuses_what_is_common() -> None:
    chat = begin()
    check_turn(chat, QUESTIONS[0])
    chat.messages = [{"role": "user", "content": "Hello thermometer"}, {"role": "assistant", "content": "x"}]
    whole = ids_of([*chat.messages, {"role": "user", "content": QUESTIONS[1]}])
    assert check_turn(chat, QUESTIONS[1])[0] == len(whole) - len("Hello ther") - 1
    chat.messages = []
    assert check_turn(chat, "Hello the")[0] == 2


def test_the_same_question_again_runs_one_token() -> None:
    chat = begin()
    check_turn(chat, "Hi")
    chat.messages = []
    assert check_turn(chat, "Hi")[0] == 1


def test_a_window_that_has_moved_on_starts_over() -> None:
    """What a shallow answer needs again has left the window, so everything is run again."""
    chat = begin("mistral", SHALLOW, max_new_tokens=60)
    check_turn(chat, QUESTIONS[0])
    whole = ids_of([*chat.messages, {"role": "user", "content": QUESTIONS[1]}])
    assert check_turn(chat, QUESTIONS[1])[0] == len(whole)


@contextmanager
def failing(name: str, at: int, error: BaseException) -> Iterator[None]:
    """Layer 3 raises in its call number `at`."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    handle = decoder_layers(tiny(name))[3].register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@names
def test_a_turn_that_fails_leaves_no_trace(name: str, error: BaseException, at: int) -> None:
    before = fingerprint(tiny(name))
    chat = begin(name, METHODS["d3, late"])
    check_turn(chat, QUESTIONS[0])
    said = list(chat.messages)
    with failing(name, at, error):
        turn = chat.stream(QUESTIONS[1])
        with pytest.raises(type(error)):
            list(turn)
        assert list(turn) == []
        turn.close()
    assert chat.messages == said
    check_turn(chat, QUESTIONS[2])
    check_turn(chat, QUESTIONS[3])
    assert fingerprint(tiny(name)) == before


def test_a_turn_that_fails_in_another_transcript() -> None:
    """What the cache held before is gone, though the turn that replaced it left no trace."""
    chat = begin()
    check_turn(chat, QUESTIONS[0])
    said, chat.messages = list(chat.messages), []
    with failing("llama", 2, RuntimeError("broken")), pytest.raises(RuntimeError):
        chat.send("Something else, and longer than all that was said before")
    chat.messages = said
    check_turn(chat, QUESTIONS[1])


@methods
@names
def test_a_turn_that_is_closed_keeps_what_it_said(name: str, method: str) -> None:
    chat = begin(name, METHODS[method])
    check_turn(chat, QUESTIONS[0])
    turn = chat.stream(QUESTIONS[1])
    said = "".join(next(turn).text for _ in range(5))
    turn.close()
    turn.close()
    assert chat.messages[-2:] == [{"role": "user", "content": QUESTIONS[1]}, {"role": "assistant", "content": said}]
    assert turn.result.finish_reason == "cancelled"
    assert list(turn) == []
    check_turn(chat, QUESTIONS[2])


def test_a_turn_that_is_merely_left_is_closed_by_the_next() -> None:
    chat = begin("llama", SHALLOW)
    said = ""
    turn = chat.stream(QUESTIONS[0])
    for step in turn:
        said += step.text
        if step.index == 3:
            break
    check = chat.stream(QUESTIONS[1])
    assert list(turn) == []
    assert chat.messages == [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": said}]
    check.close()
    check_turn(chat, QUESTIONS[2])


def test_a_turn_that_said_nothing_leaves_no_trace() -> None:
    chat = begin()
    check_turn(chat, QUESTIONS[0])
    said = list(chat.messages)
    chat.stream(QUESTIONS[1]).close()
    with chat.stream(QUESTIONS[1]):
        pass
    assert chat.messages == said
    check_turn(chat, QUESTIONS[1])


@pytest.mark.parametrize(
    "bad", [{"max_new_token": 3}, {"method": "d4"}, {"method": D3(alpha=0.5, core=9)}, {"top_p": 2.0}]
)
def test_a_turn_with_bad_options_leaves_no_trace(bad: dict[str, Any]) -> None:
    chat = begin("llama", SHALLOW)
    check_turn(chat, QUESTIONS[0])
    said = list(chat.messages)
    with pytest.raises(ValueError):
        chat.send(QUESTIONS[1], **bad)
    assert chat.messages == said
    check_turn(chat, QUESTIONS[1])


def test_a_conversation_that_outgrows_the_context_is_refused() -> None:
    chat = begin()
    check_turn(chat, QUESTIONS[0])
    said = list(chat.messages)
    with pytest.raises(ValueError, match="context"):
        chat.send("x" * 600)
    assert chat.messages == said
    check_turn(chat, QUESTIONS[1])


def test_a_turn_stops_at_the_end_of_the_context() -> None:
    chat = begin(max_new_tokens=400)
    chat.send("x" * 480)
    assert len(chat.messages[-1]["content"]) == 512 - 480 - len(SPECIALS[3:6])


def test_sessions_of_one_engine_are_apart() -> None:
    one = engine("hybrid")
    chats = [one.session(**options(method)) for method in ("full", SHALLOW)]
    _names[id(one)] = "hybrid"
    turns = [chat.stream(QUESTIONS[0]) for chat in chats]
    for _ in range(NEW):
        for turn in turns:
            next(turn)
    for turn in turns:
        assert list(turn) == []
    alone = [one.session(**options(method)).send(QUESTIONS[0]) for method in ("full", SHALLOW)]
    assert [turn.result.tokens for turn in turns] == [result.tokens for result in alone]
    for chat in chats:
        check_turn(chat, QUESTIONS[1])


def test_the_system_prompt_comes_first() -> None:
    chat = engine().session(system="Be brief", **options())
    assert chat.messages == [{"role": "system", "content": "Be brief"}]
    chat.send("Hi")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_without_a_chat_template_there_is_no_chat() -> None:
    with pytest.raises(Unsupported, match="no chat template"):
        engine_for(tiny("llama")).session()


def test_copies_are_of_the_nearest_layer_below_that_ran_the_token() -> None:
    """With `fill="copy"` the next turn begins with a transformers cache that is made so, and reads no token again."""
    method = D3(alpha=0.8, core=2, fill="copy")
    chat = begin(method=method)
    first = chat.send(QUESTIONS[0])
    assert first.tokens == begin(method=SHALLOW).send(QUESTIONS[0]).tokens  # within an answer nothing reads copies
    plan, prompt = chat._engine.recipe(method, NEW).plan, first.stats.prompt_tokens
    cache, held = chat._cache, chat._cache.positions[0]
    depth = [len(plan.layers(max(0, position - prompt + 1))) for position in range(held)]
    assert min(depth) < plan.num_layers
    copied = DynamicCache()
    for layer, store in enumerate(cache.layers):
        keys, values = store.read(0, held, torch.float64)
        assert store.stored(0) == held
        for position in range(held):
            ran = plan.layers(max(0, position - prompt + 1))
            below = cache.layers[max(one for one in ran if one <= layer)].read(0, held, torch.float64)
            assert torch.equal(keys[:, position], below[0][:, position])
            assert torch.equal(values[:, position], below[1][:, position])
        copied.update(keys[None].clone(), values[None].clone(), layer)
    asked = [*chat.messages, {"role": "user", "content": QUESTIONS[1]}]
    ids, seen = ids_of(asked), Seen()
    known = common(chat._cached, ids)
    if known < held:
        copied.crop(known - held)
    with torch.no_grad():
        expected = tiny("llama")(torch.tensor([ids[known:]]), past_key_values=copied).logits[0, -1]
    with forwards("llama") as sizes:
        chat.send(QUESTIONS[1], method="full", logit_bias={}, logits_processor=[seen])
    assert sizes[0] == len(ids) - known
    assert gap(seen.logits[0], expected) <= 1e-10


def test_copies_are_refused_where_layers_differ_or_the_kv_is_altered() -> None:
    with pytest.raises(Unsupported, match="do not all store the same"):
        begin("hybrid", D3(fill="copy")).send("Hi")
    with pytest.raises(Unsupported, match="copies of dropped layers' KV"):
        begin(method=[D3(alpha=0.8, core=2, fill="copy"), "kv_int8"]).send("Hi")
