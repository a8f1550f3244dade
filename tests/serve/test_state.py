"""Metrics, of one server and of several replicas, health, logs, and the OpenAPI schema under a fuzzer."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from serving import MODEL, Running, serving, tiny_engine, wait
from shoal.serve import replicas
from shoal.serve.metrics import Together
from shoal.serve.replicas import Board

NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_inference_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket spec_decode_num_drafts_total
prefix_cache_queries_total prefix_cache_hits_total prefix_cache_misses_total prefix_cache_bytes
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
layers_executed_total layers_skipped_total decode_depth_bucket
"""
BODY: dict[str, Any] = {"model": MODEL, "prompt": "A secret", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine(), max_tokens=20, max_n=4) as running:
        yield running


def metrics(server: Running) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(shoal:\w+)\{[^}]*\} (\S+)$", text, re.M)}


def test_layers_and_tokens_are_counted(server: Running) -> None:
    before = metrics(server)
    spec = {"method": "early_exit", "method_args": {"exit_layer": 2}}
    answer = httpx.post(f"{server.url}/v1/completions", json={**BODY, **spec}).json()
    after = metrics(server)
    read, made = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert (grown["shoal:prompt_tokens_total"], grown["shoal:generation_tokens_total"]) == (read, made) == (8, 6)
    assert grown["shoal:layers_executed_total"] == 4 + 2 * 5
    assert grown["shoal:layers_skipped_total"] == 2 * 5
    assert grown["shoal:decode_depth_count"] == 6
    assert grown["shoal:time_to_first_token_seconds_count"] == 1
    assert 4 <= grown["shoal:inter_token_latency_seconds_count"] <= 5  # the first two may come together
    assert grown["shoal:request_decode_time_seconds_sum"] == pytest.approx(
        grown["shoal:inter_token_latency_seconds_sum"], rel=0.5, abs=0.05
    )
    assert (after["shoal:num_requests_running"], after["shoal:kv_cache_usage_perc"]) == (0, 0)


def test_a_prompt_that_was_read_is_found_again(server: Running) -> None:
    body = {**BODY, "prompt": "Once upon a time"}
    first, second = (httpx.post(f"{server.url}/v1/completions", json=body).json() for _ in range(2))
    read = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": read - 1}
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert metrics(server)["shoal:prefix_cache_hits_total"] >= read - 1


def test_what_was_not_found_is_counted_by_reason(server: Running) -> None:
    def counted() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        found = re.findall(r'^shoal:prefix_cache_misses_total\{.*reason="(\w+)"\} (\S+)$', text, re.M)
        return {reason: float(value) for reason, value in found}

    body, before = {**BODY, "prompt": "Twice upon a time"}, counted()
    read = [httpx.post(f"{server.url}/v1/completions", json={**body, **more}).json()["usage"]["prompt_tokens"]
            for more in ({}, {}, {"method": "kv_int8"})]
    grown = {reason: value - before.get(reason, 0) for reason, value in counted().items()}
    assert grown == {"new": read[0] + 1, "window": 0, "method": read[0]}, "the last token is always read"


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_what_was_read_with_another_salt_is_not_found(server: Running, route: str) -> None:
    """So that a client cannot learn from the speed what another one asked."""
    ask = {"completions": {"prompt": "A text"}, "responses": {"input": "A text"}}.get(
        route, {"messages": [{"role": "user", "content": "A text"}]})
    body = {"model": MODEL, **ask, "temperature": 0, "method": "full"}
    answers = [httpx.post(f"{server.url}/v1/{route}", json={**body, "cache_salt": f"{route} {salt}"}).json()
               for salt in ("mine", "mine", "yours", "mine")]
    details = [(one["usage"].get("prompt_tokens_details") or one["usage"]["input_tokens_details"])["cached_tokens"]
               for one in answers]
    assert details[0] == details[2] == 0 < details[1] == details[3]


def test_the_names_are_those_that_dashboards_know(server: Running) -> None:
    spec = {"method": "d3_spec", "method_args": {"mean": 0.8, "core": 2, "length": 2}}
    body, before = {**BODY, "max_tokens": 12, "metrics": True, **spec}, metrics(server)
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    text = httpx.get(f"{server.url}/metrics").text
    found = set(re.findall(r"^shoal:(\w+)\{", text, re.M))
    assert set(NAMES.split()) <= found, set(NAMES.split()) - found
    kept = dict(re.findall(r'per_pos_total\{model_name="tiny",position="(\d+)"\} (\S+)', text))
    said, told = answer["metrics"]["speculative_decoding"], metrics(server)
    counts = [float(kept[place]) for place in sorted(kept, key=int)]
    assert counts == sorted(counts, reverse=True), "a guess is kept after those before it"
    assert sum(map(float, kept.values())) == told["shoal:spec_decode_num_accepted_tokens_total"]
    drafts = "shoal:spec_decode_num_drafts_total"
    assert told[drafts] - before.get(drafts, 0) == said["num_spec_steps"]
    assert said["mean_acceptance_length"] == pytest.approx(
        1 + said["num_accepted_draft_tokens"] / said["num_spec_steps"]
    )


@pytest.mark.parametrize("path", [
    "/", "/page/page.css", "/health", "/version", "/metrics", "/props", "/v1/models", f"/v1/models/{MODEL}",
    "/openapi.json", "/docs", "/api/tags", "/playground/model", "/v1/completions", "/v1/nothing",
])
def test_head_answers_as_get_does_without_a_body(server: Running, path: str) -> None:
    whole, bare = httpx.get(server.url + path), httpx.head(server.url + path)
    assert bare.status_code == whole.status_code and bare.content == b""
    assert bare.headers["content-type"] == whole.headers["content-type"]
    assert whole.status_code == {"/v1/completions": 405, "/v1/nothing": 404}.get(path, 200)


def test_the_page_of_routes_asks_nothing_of_others(server: Running) -> None:
    answer, schema = httpx.get(f"{server.url}/docs"), httpx.get(f"{server.url}/openapi.json").json()
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    for path, methods in schema["paths"].items():
        assert all(f"<h2>{method.upper()} {path}</h2>" in answer.text for method in methods)
    for told in ("<td><code>messages</code><td>list of object<td>required",
                 "<code>stop</code><td>string or list of string<td>", "<code>seed</code><td>integer<td>",
                 '<td><code>encoding_format</code><td>&quot;float&quot;, &quot;base64&quot;<td>&quot;float&quot;'):
        assert told in answer.text
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.S)
    said = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{said}'" in answer.headers["content-security-policy"]
    assert "http" not in answer.text.replace("<!doctype html>", "") and "<script" not in answer.text


def test_every_route_that_reads_a_text_asks_for_a_key() -> None:
    with serving(tiny_engine(), api_keys=("right",)) as server:
        paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
        asked = {path: httpx.post(server.url + path, json={}).status_code
                 for path, methods in paths.items() if "post" in methods}
        assert len(asked) > 12 and set(asked.values()) == {401}, asked


@pytest.mark.parametrize(("route", "body"), [
    ("v1/completions", {"prompt": "Hi"}), ("v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("v1/responses", {"input": "Hi"}), ("v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("api/generate", {"prompt": "Hi", "stream": False}), ("v1/embeddings", {"input": "Hi"}),
    ("api/embed", {"input": "Hi"})])
def test_a_request_may_leave_the_model_and_the_limit_out(route: str, body: dict[str, Any]) -> None:
    with serving(tiny_engine(), default_max_tokens=4) as server:
        for more in ({}, {"model": None}):
            answer = httpx.post(f"{server.url}/{route}", json={**body, **more}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == MODEL


def test_health_tells_when_nothing_decodes_any_more() -> None:
    with serving(tiny_engine()) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "version" in httpx.get(f"{server.url}/version").json()
        server.scheduler.close()
        assert httpx.get(f"{server.url}/health").status_code == 503
        refused = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_health_is_bad_while_a_step_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_engine(), stall=5.0) as server:
        for busy, status in ((0.0, 200), (4.9, 200), (5.1, 503)):
            monkeypatch.setattr(type(server.scheduler), "busy", property(lambda _, busy=busy: busy))
            answer = httpx.get(f"{server.url}/health")
            assert (answer.status_code, answer.json()["status"] == "ok") == (status, status == 200)


@pytest.mark.parametrize("log_prompts", [False, True])
def test_logs_hold_text_only_when_told(log_prompts: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.serve")
    with serving(tiny_engine(), log_prompts=log_prompts) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"x-request-id": "mine-1"})
        wait(lambda: any("mine-1" in record.message for record in caplog.records))
    assert answer.headers["x-request-id"] == "mine-1"
    lines = [json.loads(record.message) for record in caplog.records if record.name == "shoal.serve"]
    (line,) = [line for line in lines if line["id"] == "mine-1"]
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == (200, 8, 6)
    assert ("A secret" in json.dumps(lines)) == log_prompts


@pytest.mark.parametrize("examples", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_a_fuzzer_finds_no_server_error(server: Running, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 7
    for operation in operations:

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def fuzz(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL  # beyond the first check
            answer = case.call(timeout=60)
            assert answer.status_code < 500, answer.text

        fuzz()


def registry(amount: float) -> CollectorRegistry:
    found = CollectorRegistry()
    Counter("made", "What was made.", ["kind"], registry=found).labels("a").inc(amount)
    Histogram("seconds", "How long.", buckets=[1, 5], registry=found).observe(amount)
    return found


def test_samples_say_whose_they_are_and_families_come_once() -> None:
    families = {name: [*registry(amount).collect()] for name, amount in (("y", 2.0), ("x", 3.0))}
    lines = generate_latest(Together(families, "replica")).decode().splitlines()
    assert [line for line in lines if line.startswith("made_total")] == [
        'made_total{kind="a",replica="x"} 3.0', 'made_total{kind="a",replica="y"} 2.0'
    ]
    assert 'seconds_bucket{le="5.0",replica="y"} 1.0' in lines
    assert [line for line in lines if line.startswith("# TYPE")] == [
        "# TYPE made_total counter", "# TYPE made_created gauge",
        "# TYPE seconds histogram", "# TYPE seconds_created gauge",
    ]


def test_the_board_forgets_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now[0])
    board, one, two = Board(), [*registry(1).collect()], [*registry(2).collect()]
    board.swap("one", one)
    assert board.swap("two", two) == {"one": one, "two": two}
    now[0] += 6
    assert board.swap("two", one) == {"one": one, "two": one}
    now[0] += 6
    found: dict[str, Any] = board.swap("two", two)
    assert found == {"two": two}
