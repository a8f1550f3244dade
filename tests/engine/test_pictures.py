"""Chats with pictures, on tiny models with random weights: equal to transformers, whatever shares forwards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import seers
import shoal
from folders import lasting
from seers import asked, inputs_of
from shared_models import STORIES, model_path
from shoal.depth.plan import DepthPlan
from shoal.engine.chats import read_chat
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import OutOfMemory, Unsupported
from shoal.model.layers.pictures import Pictures
from shoal.model.packed import native
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import SequenceChunk

KINDS = tuple(seers.MAKERS)
ROUNDED = {"gemma4": 2e-5, "gemma4_small": 3e-5, "qwen3_5_moe": 2e-5}
"""Those whose own logits in float32 are about that far from the ones in float64."""
ON_MODULES = seers.among("gemma3", "qwen3_5", "gemma4", "gemma4_small")


@cache
def made(kind: str, backend: str = "auto") -> tuple[shoal.Engine, Any, Any]:
    """An engine of a checkpoint, transformers' model and its processor."""
    folder = lasting("seer")
    model, processor = seers.write(folder, kind)
    return shoal.load(str(folder), dtype="float32", backend=backend), model, processor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_logits_are_those_of_transformers(kind: str, most: int) -> None:
    engine, model, _ = made(kind)
    images = [seers.picture(1), seers.picture(2, 90, 50)]
    messages = asked("See ", images[0], " and ", images[1], ". What?")
    ids, pictures = read_chat(engine, messages)
    inputs = inputs_of(made(kind)[2], messages, images)
    assert ids == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        wanted = model(**inputs).logits[0]
    assert pictures is not None
    atol = ROUNDED.get(kind, 1e-5)
    torch.testing.assert_close(seers.logits_of(engine, ids, pictures, most), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["full", "prompt_lookup", "d3_spec", "aded", "auto"])
def test_answers_are_those_of_transformers(kind: str, method: str) -> None:
    engine, model, _ = made(kind)
    image = seers.picture(3, 60, 33)
    messages = asked(image, "What is it? What is it?")
    inputs = inputs_of(made(kind)[2], messages, [image])
    wanted = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    found = list(engine.generate(messages, method=method, max_new_tokens=24, temperature=0.0).tokens)
    assert found == wanted[: len(found)] and (len(found) == 24 or wanted[len(found)] == engine.tokenizer.eos_token_id)


@pytest.mark.skipif("qwen3_vl_moe" not in seers.MAKERS, reason="of later transformers")
def test_experts_are_read_as_published_and_as_saved(tmp_path: Path) -> None:
    """Of Qwen3-VL's mixtures, whose published files have columns for outputs."""
    from safetensors.torch import load_file, save_file

    engine, _, _ = made("qwen3_vl_moe")
    seers.write(tmp_path, "qwen3_vl_moe")
    state = load_file(file := tmp_path / "model.safetensors")
    save_file({name: one.mT.contiguous() if ".experts." in name else one for name, one in state.items()}, file,
              {"format": "pt"})
    told = [one.generate(asked(seers.picture(1)), max_new_tokens=8, temperature=0.0, logprobs=2)
            for one in (engine, shoal.load(str(tmp_path), dtype="float32"))]
    assert told[0].tokens == told[1].tokens and told[0].logprobs == told[1].logprobs


@pytest.mark.parametrize("kind", [*seers.BARE])
def test_logits_are_those_of_transformers_without_a_processor(kind: str, tmp_path: Path) -> None:
    """Of types whose processors need torchvision: their encoders' inputs are made by hand."""
    model, inputs, token = seers.bare_seer(kind)
    model.save_pretrained(tmp_path)
    engine = shoal.load(str(tmp_path), dtype="float32")
    assert engine.vision is not None and engine.vision.token == token
    picture = engine.vision(inputs)
    ids = [5, 6, *[token] * len(picture.states), 7, 8, 9]
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([ids]), **inputs).logits[0]
        pictures, inputs["input_ids"] = Pictures((picture,), token), torch.tensor([ids])
        told = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, len(ids) :].tolist()
    for most in (1, 7, 1000):
        found = seers.logits_of(engine, ids, pictures, most)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    for method in ("full", "prompt_lookup"):
        answer = engine.generate(ids, source=pictures, method=method, max_new_tokens=12, temperature=0.0)
        assert list(answer.tokens) == told


@pytest.mark.parametrize("kind", ON_MODULES)
@pytest.mark.parametrize("most", [7, 1000])
def test_modules_see_too(kind: str, most: int) -> None:
    engine, model, processor = made(kind, "hf")
    images = [seers.picture(4), seers.picture(2, 90, 50)]
    messages = asked("Look: ", images[0], " and ", images[1], "?")
    ids, pictures = read_chat(engine, messages)
    with torch.no_grad():
        wanted = model(**inputs_of(processor, messages, images)).logits[0]
    assert pictures is not None
    atol = ROUNDED.get(kind, 1e-5)
    torch.testing.assert_close(seers.logits_of(engine, ids, pictures, most), wanted, rtol=0, atol=atol)
    packed, modules = (made(kind, backend)[0].generate(messages, max_new_tokens=16, temperature=0.0)
                       for backend in ("auto", "hf"))
    assert packed.tokens == modules.tokens


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("most", [1, 7, 30])
@pytest.mark.parametrize("kind", seers.among("llava", "smolvlm", "gemma4_small", "qwen2_vl", "qwen2_5_vl", "qwen3_5"))
def test_pieces_of_a_prompt_change_no_bit(kind: str, most: int) -> None:
    """Where the kernels read pictures too."""
    engine, _, _ = made(kind)
    ids, pictures = read_chat(engine, asked("See ", seers.picture(1), " and ", seers.picture(2, 90, 50), ". What?"))
    assert pictures is not None
    assert torch.equal(seers.logits_of(engine, ids, pictures, most), seers.logits_of(engine, ids, pictures, 1000))


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen3_vl", *ON_MODULES])
def test_a_node_of_a_tree_behind_a_picture_has_the_bits_of_its_path(kind: str) -> None:
    engine, _, _ = made(kind)
    runner, full = engine.runner, DepthPlan.full(engine.runner.num_layers)
    ids, pictures = read_chat(engine, asked(seers.picture(2, 90, 50), "What?"))
    assert pictures is not None

    parents, depths, tokens = [-1, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3], [9, 20, 30, 21, 31, 22]
    tree = SequenceChunk(0, tokens, [1] * len(tokens), full, parents, depths, wanted=len(tokens))
    found = runner.forward([tree], seers.read(engine, ids, pictures, 1000)[1])
    for path in ([0, 1, 3, 5], [0, 2, 4]):
        cache = seers.read(engine, ids, pictures, 1000)[1]
        for node in path:
            alone = runner.forward([SequenceChunk(0, [tokens[node]], [1], full)], cache)
            cache.commit(0, range(1))
            assert torch.equal(found[node], alone[0])


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("kind", seers.among("qwen2_vl", "qwen3_5"))
def test_kernels_read_turned_pictures_beside_other_sequences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = made(kind)
    runner, plan = engine.runner, DepthPlan.full(engine.runner.num_layers)
    monkeypatch.setattr(PackedRunner, "forward", lambda *_, **__: pytest.fail("plain torch runs"))
    laid = list[Pictures]()
    cache, chunks = runner.new_cache(3), list[SequenceChunk]()
    for seq, size in enumerate((90, 40)):
        ids, pictures = read_chat(engine, asked(seers.picture(seq, size, 50), "What?"))
        assert pictures is not None
        laid.append(pictures.laid(ids))
        cache.attach(seq, laid[-1])
        chunks.append(SequenceChunk(seq, ids, [0] * len(ids), plan, wanted=len(ids)))
    chunks.append(SequenceChunk(2, ids[-9:], [0] * 9, plan, wanted=9))
    found = runner.forward(chunks, cache).split([len(chunk.tokens) for chunk in chunks])
    for chunk, own in zip(chunks, found, strict=True):
        alone = runner.new_cache(3)
        if chunk.seq < 2:
            alone.attach(chunk.seq, laid[chunk.seq])
        assert torch.equal(runner.forward([chunk], alone), own)


def test_graphs_are_not_asked_for_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin with embeddings alone."""
    seers.write(tmp_path, "llava")
    engine = shoal.load(str(tmp_path), dtype="float32")
    asked_of = seers.asked_of_graphs(engine, monkeypatch)
    engine.generate(asked(seers.picture(1), "What?"), max_new_tokens=4, temperature=0.0)
    assert asked_of == [1, 1, 1]  # steps after the prompt


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", *seers.among("paligemma2"), *ON_MODULES])
def test_a_batch_is_each_alone(kind: str) -> None:
    engine, _, _ = made(kind)
    bare = "No picture" if kind == "paligemma2" else [{"role": "user", "content": "No picture"}]  # it has no template
    prompts: list[Any] = [asked("One ", seers.picture(1)), bare,
                          asked(seers.picture(2), seers.picture(5, 70, 40), "Two, and more words")]
    together = engine.generate(prompts, max_new_tokens=12, temperature=0.0)
    alone = [engine.generate(prompt, max_new_tokens=12, temperature=0.0) for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("kind", ON_MODULES)
def test_depth_decays_after_a_picture_as_after_text(kind: str) -> None:
    messages, method = asked(seers.picture(1), "Go on"), shoal.D3(alpha=0.9, core=2)
    packed, modules = (made(kind, backend)[0].generate(messages, method=method, max_new_tokens=12, temperature=0.0)
                       for backend in ("auto", "hf"))
    assert packed.tokens == modules.tokens and packed.stats.mean_layers < 3


def read_by(scheduler: Scheduler, *parts: Any) -> tuple[list[int], int]:
    """The answer to a message, and how many tokens of it were known."""
    ids, pictures = read_chat(scheduler.engine, asked(*parts))
    handle = scheduler.submit(ids, max_new_tokens=8, temperature=0.0, source=pictures)
    list(handle)
    return list(handle.results[0].tokens), handle.entries[0].seq.cached


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", *ON_MODULES])
def test_prefixes_know_pictures_by_content(kind: str) -> None:
    engine, _, _ = made(kind)
    one, other, text = seers.picture(1), seers.picture(2), " and a text behind it"
    before = len(read_chat(engine, asked("See "))[0]) - len("[assistant]")
    known = len(read_chat(engine, asked("See ", one, text))[0]) - len("[assistant]")
    with Scheduler(engine, prefix_bytes=1 << 26) as scheduler:
        assert read_by(scheduler, "See ", one, text)[1] == 0
        again, changed = read_by(scheduler, "See ", one, text, " indeed"), read_by(scheduler, "See ", other, text)
    states = engine.runner.state_bytes  # of which one is kept behind the last picture
    assert again[1] == known - (len(text) + 1) * bool(states)
    assert changed[1] <= before + 8  # a token may begin every picture
    assert changed[1] >= before or any(engine.runner.windows) or states  # a window has moved on, or a state
    for (found, _), parts in ((again, (one, text, " indeed")), (changed, (other, text))):
        alone = engine.generate(asked("See ", *parts), max_new_tokens=8, temperature=0.0)
        assert found == list(alone.tokens)


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", *ON_MODULES])
def test_a_session_keeps_what_it_has_seen(kind: str) -> None:
    engine, _, _ = made(kind)
    session = engine.session(temperature=0.0, max_new_tokens=6)
    for said in ([seers.said("See ", seers.picture(1))], "And now?", [seers.said("Another ", seers.picture(2))]):
        turn = session.stream(said)
        list(turn)
        assert turn.result.tokens == engine.generate(session.messages[:-1], temperature=0.0, max_new_tokens=6).tokens


@pytest.mark.skipif("paligemma" not in seers.MAKERS, reason="of later transformers")
def test_a_model_without_a_chat_template_reads_one_message() -> None:
    with pytest.raises(ValueError, match="reads one message, with its pictures"):
        read_chat(made("paligemma")[0], [*asked(seers.picture(1)), {"role": "assistant", "content": "A"},
                                         *asked("And?")])


@pytest.mark.skipif("paligemma" not in seers.MAKERS, reason="of later transformers")
def test_a_prompt_that_sees_itself_is_no_other_ones_prefix() -> None:
    engine, _, _ = made("paligemma")
    with Scheduler(engine, prefix_bytes=1 << 26) as scheduler:
        first, again = read_by(scheduler, "See ", seers.picture(1)), read_by(scheduler, "See ", seers.picture(1))
        assert first == again and again[1] == 0
        longer = read_by(scheduler, "See ", seers.picture(1), " and more")
    assert longer[0] == list(engine.generate(asked("See ", seers.picture(1), " and more"), max_new_tokens=8,
                                             temperature=0.0).tokens)


def test_a_chat_reads_no_picture_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = made("llava")
    session, runner, sizes = engine.session(temperature=0.0, max_new_tokens=6), engine.runner, list[int]()
    list(session.stream([seers.said("See ", seers.picture(1), " and a text that takes many tokens by itself")]))
    forward = runner.argmax
    monkeypatch.setattr(runner, "argmax", lambda chunks, *rest: sizes.append(
        sum(len(chunk.tokens) for chunk in chunks)) or forward(chunks, *rest))
    list(session.stream("And now?"))
    assert max(sizes) <= len("[user]And now?[assistant]") + 6 * 4  # an answer may be spelled otherwise in a prompt


def test_equal_pictures_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = made("llava")
    assert engine.vision is not None
    asked_of, module = list[int](), engine.vision.module
    own = module.get_image_features
    monkeypatch.setattr(module, "get_image_features", lambda **given: asked_of.append(1) or own(**given))
    image = seers.picture(77)
    for _ in range(3):
        read_chat(engine, asked(image, "What?"))
    assert len(asked_of) == 1


def test_an_encoder_is_read_with_the_first_picture_and_within_the_memory(tmp_path: Path) -> None:
    seers.write(tmp_path, "llava")
    engine = shoal.load(str(tmp_path), dtype="float32")
    assert engine.vision is not None and engine.vision.nbytes == 0
    read_chat(engine, asked(seers.picture(1)))
    assert engine.vision.nbytes > 0
    other = shoal.load(str(tmp_path), dtype="float32", memory="4GiB")
    assert other.limit is not None
    other.limit = replace(other.limit, memory=1)
    with pytest.raises(OutOfMemory, match="the encoder of pictures"):
        read_chat(other, asked(seers.picture(1)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    seers.write(tmp_path, "llava")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state["multi_modal_projector.linear_1.weight"]
    save_file(state, file, {"format": "pt"})
    engine = shoal.load(str(tmp_path), dtype="float32")
    with pytest.raises(Unsupported, match=r"without model\.multi_modal_projector\.linear_1\.weight"):
        read_chat(engine, asked(seers.picture(1)))


def test_models_of_text_refuse_pictures() -> None:
    engine = shoal.load(str(model_path(STORIES)))
    for ask in (partial(read_chat, engine), engine.generate):
        with pytest.raises(Unsupported, match="Shoal reads text alone with it"):
            ask(asked(seers.picture(1)))


@pytest.mark.skipif("qwen3_5" not in seers.MAKERS, reason="of later transformers")
def test_turns_must_fit_the_rotated_dimensions(tmp_path: Path) -> None:
    model, _ = seers.seer("qwen3_5")
    model.config.text_config.rope_parameters["mrope_section"] = [3, 3, 2]
    model.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=r"mrope_section is \[3, 3, 2\], which must be 4 together"):
        shoal.load(str(tmp_path), dtype="float32", backend="packed")


def test_pictures_must_fit_the_prompt() -> None:
    engine, _, _ = made("llava")
    ids, pictures = read_chat(engine, asked(seers.picture(1), "What?"))
    assert engine.vision is not None
    del ids[ids.index(engine.vision.token)]
    with pytest.raises(ValueError, match="15 times for 1 pictures, films or sounds of 16 tokens"):
        engine.generate(ids, source=pictures)
    with pytest.raises(ValueError, match="it may have 64"):
        read_chat(engine, asked(*[seers.picture(1)] * 65))
