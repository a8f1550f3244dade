"""The official client: chats, completions, streams, errors, and disconnects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serving import MODEL, Running, serving, tiny_engine, wait

ASK = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine(), scheduling={"max_seqs": 4}) as running:
        yield running


def ids(server: Running, messages: list[dict[str, str]] = ASK) -> list[int]:
    words = server.engine.tokenizer
    return list(words.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def test_a_chat_equals_the_engine(server: Running) -> None:
    answer = server.client().chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, temperature=0)
    expected = server.engine.generate(ids(server), max_new_tokens=12)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (choice.finish_reason, answer.object, answer.model) == ("length", "chat.completion", MODEL)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids(server)), 12)


def counts(usage: Any) -> tuple[int, int, int]:
    """Usage without the number of cached tokens, which is 0 the first time."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_a_stream_joins_to_the_whole(server: Running) -> None:
    client = server.client()
    options: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, last = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == ["length", "length"]
    assert last is not None and last.choices == [] and counts(last.usage) == counts(whole.usage)


def test_a_stream_says_no_usage_unasked(server: Running) -> None:
    chunks = list(server.client().chat.completions.create(model=MODEL, messages=ASK, max_tokens=3, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"


def test_stop_strings_end_and_are_cut(server: Running) -> None:
    client = server.client()
    whole = server.engine.generate(ids(server), max_new_tokens=20).text
    stop = whole[6:8]
    options: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 20, "temperature": 0}
    options["stop"] = [stop, "@@@"]
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def test_completions_of_all_kinds_of_prompts(server: Running) -> None:
    client = server.client()
    tokens = server.engine.tokenizer("Some words")["input_ids"]
    expected = server.engine.generate("Some words", max_new_tokens=16).text
    for prompt in ("Some words", tokens, ["Some words", "Some words"], [tokens]):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
        assert {choice.text for choice in answer.choices} == {expected}
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    echoed = client.completions.create(model=MODEL, prompt="Some words", temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in echoed) == "Some words" + expected


def test_logprobs(server: Running) -> None:
    client = server.client()
    chat = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    expected = server.engine.generate(ids(server), max_new_tokens=5, logprobs=3)
    content = chat.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in expected.logprobs])
    assert all(len(entry.top_logprobs) == 3 and entry.token == entry.top_logprobs[0].token for entry in content)
    plain = client.completions.create(model=MODEL, prompt="Some words", max_tokens=4, temperature=0, logprobs=2)
    found = plain.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 4
    assert found.text_offset[0] == 0


def test_penalties_and_bias_act(server: Running) -> None:
    client = server.client()
    options: dict[str, Any] = {"model": MODEL, "prompt": "Some words", "temperature": 0, "max_tokens": 20}
    biased = client.completions.create(**options, logit_bias={"40": 100})
    assert biased.choices[0].text == server.engine.tokenizer.decode([40]) * 20
    for name in ("presence_penalty", "frequency_penalty"):
        expected = server.engine.generate("Some words", max_new_tokens=20, **{name: 2.0}).text
        assert client.completions.create(**options, **{name: 2.0}).choices[0].text == expected


def test_a_method_per_request(server: Running) -> None:
    client = server.client()
    extra = {"method": "d3", "method_args": {"alpha": 0.8, "core": 2}, "metrics": True}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=10, temperature=0, extra_body=extra)
    from shoal.methods.d3 import D3

    expected = server.engine.generate(ids(server), max_new_tokens=10, method=D3(alpha=0.8, core=2))
    assert answer.choices[0].message.content == expected.text
    assert answer.metrics["depth"]["mean_layers"] == pytest.approx(expected.stats.mean_layers)
    assert answer.metrics["depth"]["full_layers"] == 4
    assert answer.metrics["beside"] == {}
    extra = {"method": "d3", "method_args": {"mean": 0.9, "core": 2}, "metrics": True}  # out of reach
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, extra_body=extra)
    assert answer.metrics["depth"]["mean_layers"] == server.engine.runner.num_layers
    extra = {"method": "best_of", "method_args": {"n": 3}, "metrics": True}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=10, temperature=1, extra_body=extra)
    assert answer.metrics["beside"]["branches"] == 3 and answer.metrics["beside"]["thrown_away"] > 0


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"method": "nonsense"}, 400),
        ({"method": "/etc/passwd.json"}, 400),
        ({"method": "d3", "method_args": {"alpha": 9}}, 400),
        ({"method": "d3", "method_args": {"nothing": 1}}, 400),
        ({"method_args": {"alpha": 0.9}}, 400),
        ({"method": "draft_model", "method_args": {"draft": "somewhere"}}, 403),
        ({"method": "prompt_lookup", "method_args": {"inner": {"method": "draft_model"}}}, 403),
        ({"method": "prompt_lookup", "method_args": {"inner": "/tmp/card.json"}}, 400),
    ],
)
def test_the_policy_of_methods(server: Running, extra: dict[str, Any], status: int) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        server.client().completions.create(model=MODEL, prompt="A", extra_body=extra)
    assert caught.value.status_code == status


def test_errors_are_openais(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="another", messages=ASK)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=3)
    with pytest.raises(openai.BadRequestError, match="context") as long:
        client.completions.create(model=MODEL, prompt="a" * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="role"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "judge", "content": "x"}])


def test_models(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_leaving_a_stream_frees_its_row(server: Running) -> None:
    client = server.client()
    with client.completions.create(model=MODEL, prompt="Some words", max_tokens=490, stream=True) as stream:
        next(iter(stream))
        assert server.scheduler.running == 1
    wait(lambda: server.scheduler.running == 0)
    assert server.scheduler._batches.plain.cache.seqs == 0


def test_leaving_a_whole_answer_frees_its_row(server: Running) -> None:
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.3).completions.create(model=MODEL, prompt="Some words", max_tokens=490)
    wait(lambda: server.scheduler.running == 0)


def test_keys() -> None:
    with serving(tiny_engine(), api_keys=("right", "also right")) as server:
        for key in ("wrong", "rightly", "ünï"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                server.client(api_key=key).models.list()
        for key in ("right", "also right"):
            assert list(server.client(api_key=key).models.list())


@pytest.mark.slow
def test_a_full_queue_is_429_and_harms_nobody() -> None:
    with serving(tiny_engine(), scheduling={"max_seqs": 1, "max_waiting": 1}) as server:
        client = server.client()
        options: dict[str, Any] = {"model": MODEL, "prompt": "Some words", "temperature": 0, "max_tokens": 120}
        first = client.completions.create(**options, stream=True)
        start = next(iter(first)).choices[0].text
        wait(lambda: server.scheduler.running == 1)
        second = client.completions.create(**options, stream=True)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**options)
        expected = server.engine.generate("Some words", max_new_tokens=120).text
        assert start + "".join(chunk.choices[0].text for chunk in first) == expected
        assert "".join(chunk.choices[0].text for chunk in second) == expected


def test_a_request_that_takes_too_long_is_504() -> None:
    with serving(tiny_engine(), timeout=0.3) as server:
        options: dict[str, Any] = {"model": MODEL, "prompt": "Some words", "max_tokens": 490}
        with pytest.raises(openai.APIStatusError) as caught:
            server.client().completions.create(**options)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match="longer than"):
            list(server.client().completions.create(**options, stream=True))
        wait(lambda: server.scheduler.running == 0)


def test_shutting_down_finishes_what_runs() -> None:
    with serving(tiny_engine()) as server:
        client = server.client()
        server.clients.clear()  # it outlives the server
        stream = client.completions.create(model=MODEL, prompt="Some words", temperature=0, max_tokens=60, stream=True)
        text = next(iter(stream)).choices[0].text
        import threading

        got: list[str] = []
        reader = threading.Thread(target=lambda: got.extend(chunk.choices[0].text for chunk in stream))
        reader.start()
    reader.join(30)
    client.close()
    assert text + "".join(got) == server.engine.generate("Some words", max_new_tokens=60).text
