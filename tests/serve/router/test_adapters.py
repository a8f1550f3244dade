"""Adapters of several models: whose they are, and that requests for them load their model and share its forwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import drawn, write_gguf_adapter, write_peft
from gguf_words import spoken
from serving import Routed, routing_files, wait
from shoal import load
from shoal.engine.loading.adapters import AdapterWish
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.model.lora.adapter import Adapter, Factors, Place
from shoal.serve.router.adapters import assigned
from shoal.serve.router.listing import Listed

PROMPT = "The quick brown"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_folder: str) -> dict[str, str]:
    """A folder `tiny`, a file `spoken` with other sizes, and adapters: two of the folder's, one of the file's."""
    root = tmp_path_factory.mktemp("adapters")
    model, file = AutoModelForCausalLM.from_pretrained(tiny_folder), spoken(root)
    other = Checkpoint(str(file), None, False).model(torch.float32)
    heads = {"q_proj": other.config.num_attention_heads, "k_proj": other.config.num_key_value_heads}
    return {
        "tiny": tiny_folder, "spoken": str(file), "one": write_peft(root / "one", drawn(model)),
        "two": write_peft(root / "two", drawn(model, seed=2)),
        "gguf": write_gguf_adapter(root / "gguf.gguf", drawn(other), "llama", heads),
        "alien": write_gguf_adapter(root / "alien.gguf", drawn(other), "qwen2", {}),
    }


def listed(places: dict[str, str], *wishes: tuple[str | None, str]) -> list[Listed]:
    models = [Listed(name, places[name]) for name in ("tiny", "spoken")] + [Listed("gone", "/nothing/there.gguf")]
    found = assigned(models, [(model, AdapterWish.read(word.format(**places))) for model, word in wishes],
                     lambda one: Checkpoint(str(one.source), None, False))
    return [one for one in found if one.adapters]


def test_an_adapter_finds_the_one_model_that_it_fits(places: dict[str, str]) -> None:
    tiny, file = listed(places, (None, "{one}"), (None, "second={two}:0.5"), (None, "{gguf}"), ("spoken", "x={gguf}"))
    assert (tiny.name, tiny.names) == ("tiny", ("tiny", "one", "second")) and tiny.adapters[1].scale == 0.5
    assert (file.name, file.names) == ("spoken", ("spoken", "gguf", "x"))
    assert [tiny.called(name) for name in ("tiny", "one", "one:latest", None)] == ["tiny", "one", "one", "tiny"]


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ([(None, "{alien}")], "fits none of the models tiny, spoken, gone: it is for the type qwen2, and"),
        ([("tiny", "{gguf}")], "is not for tiny: its 'self_attn.q_proj' of layer 0 is for a matrix"),
        ([("none", "{one}")], "--lora-for none: there is no such model; there are tiny, spoken, gone"),
        ([(None, "tiny={one}")], "would have the name 'tiny', which there is already"),
        ([(None, "x={one}"), (None, "x={two}")], "would have the name 'x', which there is already"),
        ([(None, "/nothing/there")], "there is no adapter at '/nothing/there'"),
    ],
)
def test_adapters_that_belong_to_none(
    places: dict[str, str], wishes: list[tuple[str | None, str]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        listed(places, *wishes)


@dataclass(frozen=True)
class Files:
    """What a model's files would say."""

    sizes: Callable[[], dict[Place, tuple[int, int]]]
    family: str = "llama"

    def config(self) -> Any:
        return SimpleNamespace(model_type=self.family)


Q = "self_attn.q_proj"
SIZES = {(0, Q): (8, 4), (1, Q): (8, 4)}
"""Of an adapter's matrices, of rank 2: rows and columns."""


def of_two(monkeypatch: pytest.MonkeyPatch, name: str | None, family: str = "llama", **sizes: Any) -> list[int]:
    """Adapters of two models, whose second has other matrices in places, such as `last=(8, 6)`, or None there."""
    parts = {place: Factors(torch.zeros(2, columns), torch.zeros(rows, 2)) for place, (rows, columns) in SIZES.items()}
    adapter = Adapter("x", parts, families=frozenset({"llama"}))
    monkeypatch.setattr(AdapterWish, "load", lambda _: adapter)
    given = {(("first", "last").index(end), Q): size for end, size in sizes.items()}
    other = {place: size for place, size in {**SIZES, **given}.items() if size is not None}
    files = {"a": Files(SIZES.copy), "b": Files(other.copy, family)}
    found = assigned([Listed("a", ""), Listed("b", "")], [(name, AdapterWish("x", "x"))],
                     lambda one: files[one.name])  # type: ignore[arg-type, return-value]
    return [len(one.adapters) for one in found]


@pytest.mark.parametrize(("sizes", "told"), [
    ({"first": (6, 4)}, "not for b: its 'self_attn.q_proj' of layer 0 is for a matrix [8, 4], and there it is [6, 4]"),
    ({"first": (8, 6)}, "layer 0 is for a matrix [8, 4], and there it is [8, 6]"),
    ({"last": (8, 6)}, "layer 1 is for a matrix [8, 4], and there it is [8, 6]"),
    ({"family": "qwen2"}, "is not for b: it is for the type llama, and that is qwen2"),
])
def test_every_size_and_the_type_must_be_the_adapters(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], told: str
) -> None:
    assert of_two(monkeypatch, None, **sizes) == [1, 0]
    with pytest.raises(ValueError, match=re.escape(told)):
        of_two(monkeypatch, "b", **sizes)


@pytest.mark.parametrize("sizes", [{"last": None}, {"first": None, "last": None}])
def test_what_files_do_not_say_is_no_reason_against_the_model_that_is_named(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    assert of_two(monkeypatch, None, **sizes) == [1, 0] and of_two(monkeypatch, "b", **sizes) == [0, 1]
    assert of_two(monkeypatch, "b", family="") == [0, 1]
    with pytest.raises(ValueError, match="fits a and b alike"):
        of_two(monkeypatch, None, family="")


def test_an_adapter_of_two_models_asks_for_one(places: dict[str, str]) -> None:
    models, one = [Listed("a", places["tiny"]), Listed("b", places["tiny"])], AdapterWish.read(places["one"])

    def found(model: str | None) -> list[Listed]:
        return assigned(models, [(model, one)], lambda each: Checkpoint(str(each.source), None, False))

    with pytest.raises(ValueError, match=rf"fits a and b alike\. Say whose it is: --lora-for a=one={places['one']}"):
        found(None)
    assert [each.adapters for each in found("b")] == [(), (one,)]
    options = ("--model", places["tiny"], "--model", places["spoken"], "--lora", places["alien"])
    with pytest.raises(ValueError, match="fits none of the models"), routing_files(*options):
        pass


@pytest.fixture(scope="module")
def server(places: dict[str, str]) -> Iterator[Routed]:
    with routing_files("--model", places["spoken"], "--alias", f"tiny={places['tiny']}", "--lora", places["one"],
                       "--lora", places["two"], "--lora-for", f"spoken={places['gguf']}", "--dtype", "float32",
                       "--models-max", "1") as running:
        yield running


def complete(server: Routed, name: str) -> dict[str, Any]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_they_are_models_of_their_own_that_load_their_base(server: Routed, places: dict[str, str]) -> None:
    cards = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    parents = {"spoken": None, "gguf": "spoken", "tiny": None, "one": "tiny", "two": "tiny"}
    assert {one["id"]: one.get("parent") for one in cards} == parents and len(cards) == len(parents)
    lines = httpx.get(f"{server.url}/api/tags", timeout=60).json()["models"]
    assert {one["name"]: one["details"]["parent_model"] or None for one in lines} == parents
    shown = httpx.post(f"{server.url}/api/show", json={"model": "two"}, timeout=60).json()
    assert shown["details"]["parent_model"] == "tiny" and {one["state"] for one in cards} == {"unloaded"}
    for base in ("tiny", "spoken", "tiny"):
        engine = load(places[base], dtype="float32")
        said = {base: engine.generate(PROMPT, max_new_tokens=12).text}
        for name in (name for name, parent in parents.items() if parent == base):
            engine.add_adapter(places[name], name)
            said[name] = engine.generate(PROMPT, max_new_tokens=12, adapter=name).text
        assert len({*said.values()}) == len(said)
        for name, text in said.items():
            answer = complete(server, name)
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        loaded = [one.listed.name for one in server.shelf.models if one.state == "loaded"]
        assert loaded == [base] and httpx.get(f"{server.url}/v1/models/{name}", timeout=60).json()["state"] == "loaded"


def test_streams_of_one_model_share_forwards_whatever_their_adapter(
    server: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, sizes = ["one", "two", "tiny"] * 3, list[int]()
    alone = {name: complete(server, name)["choices"][0]["text"] for name in names}
    one, before = server.shelf.get("two"), server.shelf.counts["loads"].copy()
    scheduler, runner = one.held.scheduler, one.held.engine.runner

    def spy(run: Any, chunks: Any, *given: Any, **more: Any) -> Any:
        if not sizes:  # the first forward waits for all requests
            wait(lambda: scheduler.running + scheduler.waiting == len(names))
        sizes.append(len(chunks))
        return run(chunks, *given, **more)

    for kind in ("argmax", "forward"):
        monkeypatch.setattr(runner, kind, partial(spy, getattr(runner, kind)))
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: complete(server, name)["choices"][0]["text"], names))
    assert found == [alone[name] for name in names] and server.shelf.counts["loads"] == before
    assert max(sizes) == len(names), "those of all adapters run together"


def test_ollamas_routes_and_the_page_know_them(server: Routed) -> None:
    body = {"model": "one:latest", "prompt": PROMPT, "raw": True, "stream": False,
            "options": {"num_predict": 12, "temperature": 0}}
    answer = httpx.post(f"{server.url}/api/generate", json=body, timeout=60).json()
    assert (answer["model"], answer["response"]) == ("one", complete(server, "one")["choices"][0]["text"])
    plan = httpx.post(f"{server.url}/playground/plan", json={"model": "one", "method": "full"}, timeout=60)
    assert plan.json()["num_layers"] == 6
    answer = httpx.post(f"{server.url}/api/generate", json={"model": "one", "keep_alive": 0}, timeout=60).json()
    assert (answer["model"], answer["done_reason"]) == ("one", "unload")
    assert httpx.get(f"{server.url}/v1/models/tiny", timeout=60).json()["state"] == "unloaded"
    unknown = httpx.post(f"{server.url}/v1/completions", json={"model": "three", "prompt": "x"}, timeout=60)
    assert unknown.status_code == 404 and "there are spoken, gguf, tiny, one, two" in unknown.text
