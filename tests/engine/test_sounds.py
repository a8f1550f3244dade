"""Chats with sounds, on tiny models with random weights: equal to transformers, whatever shares forwards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version

import hearers
import seers
import shoal
from folders import lasting
from hearers import KINDS, asked, inputs_of, sound
from shared_models import STORIES, model_path
from shoal.engine.chats import read_chat
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import OutOfMemory, Unsupported

SEVERAL = tuple(kind for kind in KINDS if kind != "qwen2_audio")
"""Those whose sounds may have several windows."""


@cache
def made(kind: str) -> tuple[shoal.Engine, Any, Any]:
    """An engine of a checkpoint, transformers' model and its tokenizer."""
    folder = lasting("hearer")
    model, spoken = hearers.write(folder, kind)
    return shoal.load(str(folder), dtype="float32"), model, spoken


@pytest.mark.parametrize(("kind", "longer"), [*((kind, 1.7) for kind in KINDS), *((kind, 4.3) for kind in SEVERAL)])
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_logits_are_those_of_transformers(kind: str, longer: float, most: int) -> None:
    engine, model, spoken = made(kind)
    sounds = [sound(1, 0.73), sound(2, longer)]
    messages = asked("Hear ", sounds[0], " and ", sounds[1], ". What?")
    ids, heard = read_chat(engine, messages)
    inputs = inputs_of(kind, spoken, messages, sounds)
    assert ids == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        wanted = model(**inputs).logits[0]
    assert heard is not None
    torch.testing.assert_close(seers.logits_of(engine, ids, heard, most), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["full", "prompt_lookup", "auto"])
def test_answers_are_those_of_transformers(kind: str, method: str) -> None:
    engine, model, spoken = made(kind)
    messages = asked(sound(3, 1.9), "What is it? What is it?")
    inputs = inputs_of(kind, spoken, messages, [sound(3, 1.9)])
    wanted = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    found = list(engine.generate(messages, method=method, max_new_tokens=24, temperature=0.0).tokens)
    assert found == wanted[: len(found)] and (len(found) == 24 or wanted[len(found)] == engine.tokenizer.eos_token_id)
    other = engine.generate(asked(sound(4, 1.9), "What is it? What is it?"), max_new_tokens=24, temperature=0.0)
    assert found != list(other.tokens)  # it depends on the sound


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_each_alone(kind: str) -> None:
    engine, _, _ = made(kind)
    prompts: list[Any] = [asked("One ", sound(1, 0.4)), [{"role": "user", "content": "No sound"}],
                          asked(sound(2, 1.9), sound(5, 1.2), "Two, and more words")]
    together = engine.generate(prompts, max_new_tokens=12, temperature=0.0)
    alone = [engine.generate(prompt, max_new_tokens=12, temperature=0.0) for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def read_by(scheduler: Scheduler, *parts: Any) -> tuple[list[int], int]:
    """The answer to a message, and how many tokens of it were known."""
    ids, heard = read_chat(scheduler.engine, asked(*parts))
    handle = scheduler.submit(ids, max_new_tokens=8, temperature=0.0, source=heard)
    list(handle)
    return list(handle.results[0].tokens), handle.entries[0].seq.cached


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_know_sounds_by_content(kind: str) -> None:
    engine, _, _ = made(kind)
    one, other, text = sound(1), sound(2), " and a text behind it"
    before = read_chat(engine, asked("Hear ", one))[0].index(engine.hearing.token)  # type: ignore[union-attr]
    known = len(read_chat(engine, asked("Hear ", one, text))[0]) - len("[assistant]")
    with Scheduler(engine, prefix_bytes=1 << 26) as scheduler:
        assert read_by(scheduler, "Hear ", one, text)[1] == 0
        again, changed = read_by(scheduler, "Hear ", one, text, " indeed"), read_by(scheduler, "Hear ", other, text)
    assert again[1] == known and changed[1] == before
    for (found, _), parts in ((again, (one, text, " indeed")), (changed, (other, text))):
        assert found == list(engine.generate(asked("Hear ", *parts), max_new_tokens=8, temperature=0.0).tokens)


def test_a_session_keeps_what_it_has_heard() -> None:
    engine, _, _ = made("qwen2_audio")
    session = engine.session(temperature=0.0, max_new_tokens=6)
    for said in (asked("Hear ", sound(1)), "And now?", asked("Another ", sound(2))):
        turn = session.stream(said)
        list(turn)
        assert turn.result.tokens == engine.generate(session.messages[:-1], temperature=0.0, max_new_tokens=6).tokens


def test_equal_sounds_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = made("voxtral")
    assert engine.hearing is not None
    asked_of, module = list[int](), engine.hearing.module
    own = module.get_audio_features
    monkeypatch.setattr(module, "get_audio_features", lambda *given: asked_of.append(1) or own(*given))
    for _ in range(3):
        read_chat(engine, asked(sound(77, 3.5), "What?", sound(77, 3.5)))
    assert len(asked_of) == 2  # of its two windows


def test_windows_are_heard_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' steps come between them."""
    engine, _, _ = made("audioflamingo3")
    turns, own = list[int](), engine.turn
    monkeypatch.setattr(engine, "turn", lambda: turns.append(1) or own())
    read_chat(engine, asked(sound(78, 5.5), "What?"))
    assert len(turns) == 3


def test_an_encoder_is_read_with_the_first_sound_and_within_the_memory(tmp_path: Path) -> None:
    engine = hearers.engine(tmp_path)
    assert engine.hearing is not None and engine.hearing.nbytes == 0
    read_chat(engine, asked(sound(1)))
    assert engine.hearing.nbytes > 0
    other = shoal.load(str(tmp_path), dtype="float32", memory="4GiB")
    assert other.limit is not None
    other.limit = replace(other.limit, memory=1)
    with pytest.raises(OutOfMemory, match="the encoder of sounds"):
        read_chat(other, asked(sound(1)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hearers.write(tmp_path, "voxtral")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state["multi_modal_projector.linear_1.weight"]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=r"without .*multi_modal_projector\.linear_1\.weight"):
        read_chat(shoal.load(str(tmp_path), dtype="float32"), asked(sound(1)))


def test_without_a_feature_extractor_it_is_refused(tmp_path: Path) -> None:
    hearers.write(tmp_path, "voxtral")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(Unsupported, match="its feature extractor cannot be made"):
        read_chat(shoal.load(str(tmp_path), dtype="float32"), asked(sound(1)))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    hearers.write(tmp_path, "voxtral")
    engine = shoal.load(str(tmp_path), hearers.tokenizer("<sound>", "[AUDIO]"), dtype="float32")
    with pytest.raises(Unsupported, match=r"its tokenizer has no token \[AUDIO\] of number 24"):
        read_chat(engine, asked(sound(1)))


def test_what_a_file_adds_to_a_window_is_left_out() -> None:
    engine, _, _ = made("qwen2_audio")
    assert read_chat(engine, asked(sound(1, 2.09)))[0] == read_chat(engine, asked(sound(1, 2.0)))[0]


def test_models_say_that_they_do_not_hear_or_see(tmp_path: Path) -> None:
    text, seer, (hearer, _, _) = shoal.load(str(model_path(STORIES))), seers.engine(tmp_path), made("qwen2_audio")
    for engine, messages, why in (
        (text, asked(sound(1)), "a sound for .*Shoal reads text alone with it"), (seer, asked(sound(1)), "it sees"),
        (seer, asked(sound(1), "") + seers.asked(seers.picture(1)), "a sound for .*it sees"),
        (hearer, seers.asked(seers.picture(1)), "a picture for .*it hears"),
    ):
        with pytest.raises(Unsupported, match=why):
            read_chat(engine, messages)
        with pytest.raises(Unsupported, match=why):
            engine.generate(messages)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = made(kind)
    monkeypatch.setattr(type(engine.hearing), "__call__", lambda *_: pytest.fail("it was heard"))
    with pytest.raises(ValueError, match=r"sound 2 is 0\.05 s long; it must have 0\.1 s"):
        read_chat(engine, asked(sound(1), sound(1, 0.05)))
    with pytest.raises(ValueError, match=r"sound 1 is \d+ s long; it must be at most"):
        read_chat(engine, asked(sound(1, 100.0 if kind in SEVERAL else 2.2)))
    with pytest.raises(ValueError, match="the conversation has more than 3 s of sound"):
        read_chat(engine, asked(sound(1, 1.9), sound(1, 1.9)), seconds=3.0)
    with pytest.raises(ValueError, match="and the model's context 1024"):
        read_chat(engine, asked(sound(1), "x" * 1100))
    with pytest.raises(ValueError, match="it may have 64"):
        read_chat(engine, asked(*[sound(1, 0.1)] * 65))


def test_a_text_that_names_the_token_is_refused() -> None:
    engine, _, _ = made("qwen2_audio")
    with pytest.raises(ValueError, match="leave it out of messages"):
        read_chat(engine, asked(sound(1), "<|AUDIO|>"))


def test_a_template_of_text_alone_is_given_what_transformers_writes() -> None:
    """As Qwen2-Audio's tokenizers have it; its processor brings one that numbers sounds."""
    engine, _, _ = made("qwen2_audio")
    own = engine.tokenizer.chat_template
    plain = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
             "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    system: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    messages = [*system, *asked(sound(1), "What? ", sound(2)), {"role": "assistant", "content": "A"}, *asked(sound(3))]
    try:
        engine.tokenizer.chat_template = plain
        found = read_chat(engine, messages)[0]
    finally:
        engine.tokenizer.chat_template = own
    spoken = hearers.tokenizer("")
    spoken.chat_template = hearers.qwen2_audio_template()
    assert found == inputs_of("qwen2_audio", spoken, messages, [sound(1), sound(2), sound(3)])["input_ids"][0].tolist()


def test_voxtral_is_spoken_to_as_by_mistral_common(tmp_path: Path) -> None:
    """By its `tekken.json` alone; the texts are what mistral-common 1.13 makes of these messages."""
    _, spoken = hearers.write(tmp_path, "voxtral")
    for file in tmp_path.glob("*token*"):
        file.unlink()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tekken.json").write_text(hearers.tekken())
    if Version(hf.__version__) < Version("5.1"):
        with pytest.raises(Unsupported, match="nothing of it but the vocabulary. Update transformers"):
            shoal.load(str(tmp_path), dtype="float32")
        return
    engine = shoal.load(str(tmp_path), dtype="float32")
    engine.generate(asked(sound(1), "What is it?"), max_new_tokens=2)
    talk: list[Any] = [*asked(sound(1, 2.5), "What is it?"), {"role": "assistant", "content": "A tone."},
                       {"role": "user", "content": "And?"}]
    system = [{"role": "system", "content": "Be brief."}]
    for messages, wanted in (
        (talk, f"<s>[INST][BEGIN_AUDIO]{'[AUDIO]' * 50}What is it?[/INST]A tone.</s>[INST]And?[/INST]"),
        ([*system, {"role": "user", "content": "Hi"}], "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]"),
        ([*system, *talk[:1]], f"<s>[INST]Be brief.\n[BEGIN_AUDIO]{'[AUDIO]' * 50}What is it?[/INST]"),
    ):  # mistral-common refuses the last one
        ids = read_chat(engine, messages)[0]
        assert engine.tokenizer.decode(ids) == wanted
        assert ids == spoken(wanted, add_special_tokens=False)["input_ids"]
