"""Thoughts before an answer: told apart in every API, counted, bounded, hidden, and before what a constraint binds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import chat_tokenizer
from serving import MODEL, Running, serving
from shoal.engine.constraints.constraint import JsonSchema
from shoal.serve.protocol.thoughts import AnswerReader, ThoughtCount, ThoughtLimit, Thoughts, tags_of, thoughts_of
from shoal.types import Step
from tool_tokenizer import TAGS, WEATHER, thinking, tool_tokenizer

ASK = [{"role": "user", "content": "What is the weather?"}]
ROUTES = {"chat/completions": {"messages": ASK, "max_tokens": 40},
          "responses": {"input": "What is the weather?", "max_output_tokens": 40},
          "messages": {"messages": ASK, "max_tokens": 40}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(thinking()) as running:
        yield running


@pytest.fixture(scope="module")
def reader_alone() -> Iterator[Running]:
    with serving(thinking("")) as running:
        yield running


def post(server: Running, route: str = "chat/completions", **more: Any) -> Any:
    body = {"model": MODEL, "thinking_token_budget": 6, "ignore_eos": True, **ROUTES[route], **more}
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(server: Running, **more: Any) -> tuple[str | None, str]:
    message = post(server, **more)["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


def whole_twin(text: str, begun: bool) -> tuple[str, str]:
    """Thoughts and answer, from the whole text."""
    found = re.fullmatch(r"(?s)(.*?)</think>(.*)" if begun else r"(?s)\s*<think>(.*?)</think>(.*)", text)
    if found:
        return found[1].strip(), found[2].lstrip()
    opened = re.fullmatch(r"(?s)()(.*)" if begun else r"(?s)(\s*<think>)(.*)", text)
    return (opened[2].strip(), "") if opened else ("", text)


PARTS = ["<think>", "</think>", "<thi", "nk>", "</th", "ink>", " ", "\n", "a", "b c", "<", ">"]
PIECES = st.lists(st.sampled_from(PARTS))


@given(PIECES, st.booleans())
def test_any_pieces_give_what_the_whole_text_gives(pieces: list[str], begun: bool) -> None:
    reader = AnswerReader(None, Thoughts(TAGS, begun))
    found = [reader.read(piece, False) for piece in pieces] + [reader.read("", True)]
    told = ["".join(one.get(key, "") for one in found) for key in ("reasoning_content", "content")]
    expected = whole_twin("".join(pieces), begun)
    assert (told[0].strip(), told[1]) == expected


def test_thoughts_end_where_they_must_and_are_counted(server: Running) -> None:
    plain = server.engine.generate(ASK, max_new_tokens=6, ignore_eos=True).text
    found = post(server)
    message, usage = found["choices"][0]["message"], found["usage"]
    assert message["reasoning_content"] == plain.strip()
    assert len(message["content"]) > 10 and "think" not in message["content"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 6 + len("</think>")
    unbound = post(server, thinking_token_budget=-1)
    assert unbound["choices"][0]["message"]["content"] == ""
    assert unbound["usage"]["completion_tokens_details"]["reasoning_tokens"] == 40


@pytest.mark.parametrize("more", [{"reasoning_budget_tokens": 6}, {"reasoning": {"max_tokens": 6}},
                                  {"method": "prompt_lookup"}], ids=str)
def test_budgets_have_several_names_and_bind_drafts_too(server: Running, more: dict[str, Any]) -> None:
    left_out = {} if "method" in more else {"thinking_token_budget": None}
    assert said(server, **left_out, **more) == said(server)


def test_no_budget_at_all_ends_thoughts_at_once(server: Running) -> None:
    assert post(server, thinking_token_budget=0)["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8


def test_a_stream_joins_to_the_whole(server: Running) -> None:
    more = {"thinking_token_budget": 6, "ignore_eos": True}
    body: dict[str, Any] = {"model": MODEL, **ROUTES["chat/completions"], "extra_body": more}
    thought, text, usage = "", "", None
    for chunk in server.client().chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
    assert (thought, text) == said(server) and usage is not None
    assert usage.completion_tokens_details.reasoning_tokens == 14


def test_they_may_stay_in_the_text_or_out_of_sight(server: Running) -> None:
    thought, text = said(server)
    assert said(server, include_reasoning=False) == said(server, reasoning_format="hidden") == (None, text)
    assert said(server, reasoning={"exclude": True}) == (None, text)
    inside = {str(said(server, **more)) for more in ({"reasoning_format": "none"}, {"separate_reasoning": False},
                                                     {"reasoning_in_content": True})}
    ((none, within),) = map(eval, inside)
    assert none is None and re.sub(r"\s", "", within) == re.sub(r"\s", "", f"{thought}</think>{text}")


@pytest.mark.parametrize("off", [{"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False},
                                 {"reasoning_effort": "none"}, {"reasoning": {"enabled": False}}], ids=str)
def test_a_request_may_forbid_them(server: Running, off: dict[str, Any]) -> None:
    thought, text = said(server, **off)
    assert thought is None and len(text) > 20


SHAPE = {"type": "object", "properties": {"day": {"enum": ["today", "soon"]}}, "required": ["day"],
         "additionalProperties": False}


def test_a_constraint_binds_what_follows_them(server: Running) -> None:
    shape = {"type": "json_schema", "json_schema": {"schema": SHAPE}}
    given = {"response_format": shape, "ignore_eos": False, "max_tokens": 80}
    thought, text = said(server, **given)
    assert thought and json.loads(text)["day"] in ("today", "soon")
    assert json.loads(said(server, **given, reasoning_format="none")[1])  # then it binds all of the text


def test_a_call_follows_them(server: Running) -> None:
    found = post(server, tools=[WEATHER], tool_choice="required", ignore_eos=False, max_tokens=200,
                 parallel_tool_calls=False)
    message = found["choices"][0]["message"]
    assert message["reasoning_content"] and message["tool_calls"][0]["function"]["name"] == "weather"


def test_a_tag_in_the_answer_begins_them(reader_alone: Running) -> None:
    more = {"thinking_token_budget": None, "ignore_eos": False}
    pattern = r"<think>\n[ab]{3}\n</think>\n\n[cd]{2}"
    thought, text = said(reader_alone, guided_regex=pattern, **more)
    assert re.fullmatch("[ab]{3}", thought or "") and re.fullmatch("[cd]{2}", text)
    assert said(reader_alone, guided_regex="<thin[cd]{2}<think>", **more)[0] is None
    free = said(reader_alone, thinking_token_budget=None)
    assert free[0] is None and said(reader_alone) == free  # a bound on what there is not


def test_limits_of_thoughts_that_the_answer_begins() -> None:
    tokenizer = tool_tokenizer()
    limit = ThoughtLimit(Thoughts(TAGS), tokenizer, 2, 3)
    scores = torch.zeros(1, 97, dtype=torch.float64)
    spelled = [tokenizer(text)["input_ids"] for text in ("xy", "<think>", "abc", "</think>", "done")]
    ids = [token for part in spelled for token in part]
    free = len(spelled[0]) + len(spelled[1]) + len(spelled[2])
    for size in range(len(spelled[0]), len(ids)):
        found = limit(torch.tensor([ids[:size]]), scores)
        forced = free <= size < free + len(spelled[3])
        assert int((found[0] > -1).sum()) == (1 if forced else 97), size
        assert not forced or int(found[0].argmax()) == ids[size]


def test_anthropics_blocks(server: Running) -> None:
    more = {"thinking": {"type": "enabled", "budget_tokens": 6}, "thinking_token_budget": None}
    found = post(server, "messages", **more)
    thought, text = said(server)
    assert [(block["type"], block.get("thinking") or block.get("text")) for block in found["content"]] == [
        ("thinking", thought), ("text", text)]
    assert found["usage"]["output_tokens_details"]["thinking_tokens"] == 14
    for off in ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive", "display": "omitted"}}):
        assert [block["type"] for block in post(server, "messages", **off)["content"]] == ["text"]


def test_anthropics_events(server: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked = {"model": MODEL, **ROUTES["messages"], "thinking": {"type": "enabled", "budget_tokens": 6}}
        with client.messages.stream(**asked, extra_body={"ignore_eos": True}) as stream:
            final = stream.get_final_message()
    thought, text = said(server)
    told = [(block.type, getattr(block, block.type)) for block in final.content]
    assert told == [("thinking", thought), ("text", text)]


def test_items_of_responses(server: Running) -> None:
    from openai.types.responses import Response

    raw = post(server, "responses")
    Response.model_validate(raw)
    thoughts, message = raw["output"]
    assert (thoughts["type"], thoughts["content"][0]["text"]) == ("reasoning", said(server)[0])
    assert message["content"][0]["text"] == said(server)[1]
    assert raw["usage"]["output_tokens_details"]["reasoning_tokens"] == 14
    more = {"thinking_token_budget": 6, "ignore_eos": True}
    with server.client().responses.stream(model=MODEL, **ROUTES["responses"], extra_body=more) as stream:
        events = list(stream)
    assert events[-1].response.output_text == said(server)[1]
    assert "response.reasoning_text.done" in [event.type for event in events]


def test_tags_that_are_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = ("[THINK]", "[/THINK]")
    monkeypatch.setattr(chat_tokenizer, "SPECIALS", [*chat_tokenizer.SPECIALS, *tags])
    monkeypatch.setattr(chat_tokenizer, "ROLES", [*chat_tokenizer.ROLES, *tags])
    engine = thinking("{{ '[THINK]' }}", tags)
    found = thoughts_of(engine.tokenizer, engine.tokenizer("a[THINK]")["input_ids"], "beside")
    assert found == Thoughts(tags, True, "beside", {7: "[THINK]", 8: "[/THINK]"})
    with serving(engine) as server:
        thought, text = said(server)
        free = engine.generate(ASK, max_new_tokens=6, ignore_eos=True).tokens
        before = free[: free.index(8)] if 8 in free else free
        assert thought and text and thought == engine.tokenizer.decode(before, skip_special_tokens=True).strip()
        assert said(server, include_reasoning=False) == (None, text)
        body = {"model": MODEL, **ROUTES["chat/completions"], "thinking_token_budget": 6, "ignore_eos": True}
        lines = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60).text
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines.splitlines() if line[6:7] == "{"]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
        assert "".join(delta.get("content", "") for delta in deltas) == text
        shape = {"type": "json_schema", "json_schema": {"schema": SHAPE}}
        assert json.loads(said(server, response_format=shape, ignore_eos=False, max_tokens=80)[1])


def test_a_count_goes_on_where_it_was() -> None:
    steps = [Step(0, place, 9, text, 1.0) for place, text in enumerate("ab</think>cd")]
    count = ThoughtCount(Thoughts(TAGS, True))
    assert [count.of(steps[:size]) for size in (1, 5, 10, 12)] == [1, 5, 10, 10]
    assert ThoughtCount(Thoughts(TAGS)).of(steps) == 0


def test_templates_show_their_tags() -> None:
    assert tags_of("... content.split('</think>') ...") == TAGS
    assert tags_of("{{ '<|channel>thought\\n<channel|>' }}") == ("<|channel>thought\n", "<channel|>")
    assert tags_of("{{ messages }}") is None and tags_of(None) is None
    assert Thoughts(TAGS, True).before(None) is None
    assert Thoughts(TAGS).before(JsonSchema(SHAPE)) == JsonSchema(SHAPE)


@pytest.mark.parametrize(("more", "words"), [
    ({"reasoning_format": "all"}, "reasoning_format"), ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"reasoning": {"max_tokens": "x"}}, "reasoning.max_tokens"), ({"reasoning": {"max_tokens": -3}}, ">= -1"),
    ({"reasoning": {"colour": 1}}, "colour")], ids=str)
def test_what_is_wrong_is_refused(server: Running, more: dict[str, Any], words: str) -> None:
    body = {"model": MODEL, **ROUTES["chat/completions"], **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_completions_have_none(server: Running) -> None:
    def ask(**more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, **more}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    assert ask(reasoning_format="none", include_reasoning=True, reasoning_budget_tokens=-1).status_code == 200
    for more in ({"include_reasoning": False}, {"reasoning_budget_tokens": 5}, {"thinking_token_budget": 0},
                 {"reasoning_format": "hidden"}):
        assert "no chat template" in ask(**more).json()["error"]["message"], more
