"""Chats with films, on tiny models with random weights: equal to transformers, whatever shares forwards."""

from __future__ import annotations

import itertools
import json
import re
import struct
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import films
import mmproj_files
import seers
import shoal
from film_oracle import told_of
from folders import lasting
from shared_models import STORIES, model_path
from shoal.engine.chats import read_chat
from shoal.engine.film_files import FilmFile
from shoal.engine.films import FILMS, FilmSettings, ShownFilms, _in_words
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
TIMED = KINDS[2:]
"""Types whose texts tell the time of each frame."""
STILLS = ("smolvlm", "internvl")
"""Types that see films as pictures one after the other."""
SETTINGS = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "fps": 2, "min_frames": 4, "max_frames": 12,
            "size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.4, 0.5, 0.6],
            "image_std": [0.2, 0.25, 0.3], "cap_pixels_per_frame": True, "max_video_tokens": 24}
OF_STILLS = {
    "smolvlm": {"video_sampling": {"fps": 1, "max_frames": 5, "video_size": {"longest_edge": 64}},
                "max_image_size": {"longest_edge": 32}},
    "internvl": {"size": {"height": 32, "width": 32}, "num_frames": 3}}
LONG = films.noisy(3, 61, 56, 40, rate=10)


def settings_of(kind: str) -> dict[str, Any]:
    return SETTINGS if kind in KINDS else {**OF_STILLS[kind], "image_mean": [0.4, 0.5, 0.6],
                                           "image_std": [0.2, 0.25, 0.3]}


@cache
def made(kind: str) -> tuple[shoal.Engine, Any]:
    """An engine of a checkpoint, and transformers' model."""
    folder = lasting("seer")
    model, _ = seers.write(folder, kind)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings_of(kind)))
    return shoal.load(str(folder), dtype="float32"), model


@dataclass
class Told:
    """What transformers' video processors say of films, asked once."""

    found: dict[tuple[str, int], dict[str, Any]]

    def of(self, kind: str, *data: bytes) -> list[dict[str, Any]]:
        """Of each film."""
        return [self.found[kind, CLIPS.index(one)] for one in data]


CLIPS = (films.noisy(1), films.noisy(2, 9, 64, 24), LONG, films.noisy(4, 3, 32, 32, rate=1),
         films.noisy(5, 25, 400, 16, rate=12))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    if not hasattr(hf.Qwen2VLProcessor, "replace_video_token"):
        pytest.skip("these processors of transformers neither cap pixels nor tell alone what stands for a film")
    asked = [(kind, number) for kind in (*KINDS, *STILLS) for number in range(len(CLIPS))]
    found = told_of(tmp_path_factory.mktemp("oracle"), [
        {"kind": kind, "settings": settings_of(kind), "frames": films.frames_of(CLIPS[number]),
         "rate": FilmFile(CLIPS[number], "film").rate} for kind, number in asked])
    return Told(dict(zip(asked, found, strict=True)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", range(len(CLIPS)))
def test_frames_are_those_of_transformers(kind: str, clip: int, told: Told) -> None:
    engine, _ = made(kind)
    assert engine.vision is not None
    (wanted,), shown = told.of(kind, CLIPS[clip]), ShownFilms(engine.vision, engine.tokenizer, [CLIPS[clip]], None)
    (film,) = shown.films
    assert film.seen == wanted["frames_indices"][: len(film.seen)] and film.text == wanted["text"]
    inputs = film.inputs
    steps = [engine.vision._prepared(step, inputs["colours"]) for step in inputs["frames"].split(2)]
    patches = torch.cat([one["pixel_values"] for one in steps])
    torch.testing.assert_close(patches, wanted["pixel_values_videos"], rtol=0, atol=1e-5)
    assert [len(steps), *steps[0]["image_grid_thw"][0, 1:].tolist()] == wanted["video_grid_thw"][0].tolist()


def inputs_of(kind: str, messages: list[dict[str, Any]], told: list[dict[str, Any]], *images: Any) -> dict[str, Any]:
    """What transformers' model takes of a conversation, its films and pictures."""
    engine, model = made(kind)
    text, tokenizer = films.shown_text(messages, engine.tokenizer), engine.tokenizer
    mark = re.escape("<|vision_start|><|video_pad|><|vision_end|>") if kind in TIMED else r"<\|video_pad\|>"
    texts = iter([one["text"] for one in told])
    text = re.sub(mark, lambda _: next(texts), text)
    seen: dict[str, Any] = {}
    if images:
        seen = dict(seers.seer(kind)[1].pictures(images=[*images], return_tensors="pt"))
        counts = iter((seen["image_grid_thw"].prod(1) // 4).tolist())
        text = re.sub(r"<\|image_pad\|>", lambda found: found[0] * next(counts), text)
    ids = tokenizer([text], add_special_tokens=False, return_tensors="pt")["input_ids"]
    pads = [tokenizer.convert_tokens_to_ids(one) for one in ("<|image_pad|>", "<|video_pad|>")]
    kinds = [1 if one == pads[0] else 2 if one == pads[1] else 0 for one in ids[0].tolist()]
    grids = torch.cat([one["video_grid_thw"] for one in told])
    runs = grids.tolist() if kind not in TIMED else [[1, *grid[1:]] for grid in grids.tolist() for _ in range(grid[0])]
    pace = getattr(model.config.vision_config, "tokens_per_second", 1) if kind == "qwen2_5_vl" else 1
    paces = [float(pace * one["second_per_grid_ts"]) if kind == "qwen2_5_vl" else 1.0 for one in told]
    where = films.places(kinds, {1: seen.get("image_grid_thw", torch.empty(0, 3)).tolist(), 2: runs},
                         paces if kind not in TIMED else [1.0] * len(runs))
    return {**seen, "input_ids": ids, "pixel_values_videos": torch.cat([one["pixel_values_videos"] for one in told]),
            "video_grid_thw": grids, "position_ids": where}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_logits_are_those_of_transformers(kind: str, most: int, told: Told) -> None:
    """Films of both kinds of lengths, and a picture between them."""
    (engine, model), image = made(kind), seers.picture(2, 90, 50)
    messages = films.asked("See ", CLIPS[0], " and ", image, " and ", LONG, ". What?")
    ids, pictures = read_chat(engine, messages)
    inputs = inputs_of(kind, messages, told.of(kind, CLIPS[0], LONG), image)
    assert ids == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        wanted = model(**inputs).logits[0]
    assert pictures is not None
    far = 2e-5 if kind == "qwen3_5" else 1e-5  # as far as transformers' float32 is from float64
    torch.testing.assert_close(seers.logits_of(engine, ids, pictures, most), wanted, rtol=0, atol=far)


def own_inputs(kind: str, messages: list[dict[str, Any]], told: list[dict[str, Any]]) -> dict[str, Any]:
    """The same, from which transformers' model finds places itself."""
    inputs = inputs_of(kind, messages, told)
    del inputs["position_ids"]
    pad = made(kind)[0].tokenizer.convert_tokens_to_ids("<|video_pad|>")
    if "mm_token_type_ids" in seers._READ:  # not by transformers 5.0
        inputs["mm_token_type_ids"] = 2 * (inputs["input_ids"] == pad).int()
    seconds = {"second_per_grid_ts": torch.cat([one["second_per_grid_ts"] for one in told])}
    return {**inputs, **(seconds if kind == "qwen2_5_vl" else {})}


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_those_of_transformers(kind: str, told: Told) -> None:
    """Of a film that lasts no longer than it is wide: behind others transformers goes on too early."""
    engine, model = made(kind)
    messages = films.asked("See ", CLIPS[4], ". What?")
    ids, pictures = read_chat(engine, messages)
    with torch.no_grad():
        wanted = model(**own_inputs(kind, messages, told.of(kind, CLIPS[4]))).logits[0]
    assert pictures is not None
    torch.testing.assert_close(seers.logits_of(engine, ids, pictures, 1000), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["full", "prompt_lookup", "d3_spec", "auto"])
def test_answers_are_those_of_transformers(kind: str, method: str, told: Told) -> None:
    engine, model = made(kind)
    messages = films.asked(CLIPS[4], "What is it? What is it?")
    inputs = own_inputs(kind, messages, told.of(kind, CLIPS[4]))
    wanted = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    found = list(engine.generate(messages, method=method, max_new_tokens=16, temperature=0.0).tokens)
    assert found == wanted[: len(found)] and (len(found) == 16 or wanted[len(found)] == engine.tokenizer.eos_token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_each_alone(kind: str) -> None:
    engine, _ = made(kind)
    prompts: list[Any] = [films.asked("One ", CLIPS[0]), [{"role": "user", "content": "No film"}],
                          films.asked(seers.picture(2), LONG, CLIPS[1], "Two, and more words")]
    together = engine.generate(prompts, max_new_tokens=12, temperature=0.0)
    alone = [engine.generate(prompt, max_new_tokens=12, temperature=0.0) for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def read_by(scheduler: Scheduler, *parts: Any) -> tuple[list[int], int]:
    """The answer to a message, and how many tokens of it were known."""
    ids, pictures = read_chat(scheduler.engine, films.asked(*parts))
    handle = scheduler.submit(ids, max_new_tokens=8, temperature=0.0, source=pictures)
    list(handle)
    return list(handle.results[0].tokens), handle.entries[0].seq.cached


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_know_films_by_content(kind: str) -> None:
    engine, _ = made(kind)
    other, text = films.noisy(6), " and a text behind it"
    known = len(read_chat(engine, films.asked("See ", CLIPS[0], text))[0]) - len("[assistant]")
    with Scheduler(engine, prefix_bytes=1 << 26) as scheduler:
        assert read_by(scheduler, "See ", CLIPS[0], text)[1] == 0
        again, changed = (read_by(scheduler, "See ", one, text, " indeed") for one in (CLIPS[0], other))
    least = known - len(text) - 1 if kind == "qwen3_5" else known  # whose state is kept behind the film
    assert least <= again[1] <= known and changed[1] < known - len(text)
    for (found, _), one in ((again, CLIPS[0]), (changed, other)):
        alone = engine.generate(films.asked("See ", one, text, " indeed"), max_new_tokens=8, temperature=0.0)
        assert found == list(alone.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_goes_on_behind_a_film(kind: str) -> None:
    """And encodes it once; its later turns stand where the film's time has passed."""
    engine, _ = made(kind)
    assert engine.vision is not None
    session = engine.session(temperature=0.0, max_new_tokens=6)
    for said in (films.asked("See ", LONG), "And now?", films.asked("Another ", CLIPS[1])):
        turn = session.stream(said)
        list(turn)
        assert turn.result.tokens == engine.generate(session.messages[:-1], temperature=0.0, max_new_tokens=6).tokens


def test_equal_films_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps they have; and decoded once."""
    engine, _ = made("qwen3_vl")
    assert engine.vision is not None
    asked_of, module = list[int](), engine.vision.module
    own = module.get_image_features
    monkeypatch.setattr(module, "get_image_features", lambda **given: asked_of.append(1) or own(**given))
    clip, before = films.noisy(77, 61, 56, 40, rate=10), engine.vision.nbytes
    decoded, frames = list[int](), FilmFile.frames
    monkeypatch.setattr(FilmFile, "frames", lambda film, *given: decoded.append(1) or frames(film, *given))
    for _ in range(3):
        read_chat(engine, films.asked(clip, "What?", clip))
    assert len(asked_of) == 6 and len(decoded) == 1  # twelve frames, two at a time
    assert engine.vision.nbytes > before


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = made("qwen3_vl")
    assert engine.vision is not None
    monkeypatch.setattr("shoal.model.senses._KEPT_BYTES", 1)
    for seed in (1, 2):
        read_chat(engine, films.asked(films.noisy(seed)))
    assert len(engine.vision._known) == 1


def test_films_beyond_the_context_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = made("qwen2_vl")
    assert engine.vision is not None
    monkeypatch.setattr(FilmFile, "frames", lambda *_: pytest.fail("it looked"))
    with pytest.raises(ValueError, match=r"films have 12 tokens, more than the model's context 11"):
        ShownFilms(engine.vision, engine.tokenizer, [LONG], 11)
    with pytest.raises(ValueError, match="the model's context 1024"):
        read_chat(engine, films.asked(LONG, "x" * 1020))
    assert read_chat(engine, films.asked(LONG), look=False)[1] is None


def test_graphs_are_not_asked_for_what_a_film_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They turn tokens by their positions, also where the text has gone on behind a film."""
    seers.write(tmp_path, "qwen2_5_vl")
    engine = shoal.load(str(tmp_path), dtype="float32")
    asked_of = seers.asked_of_graphs(engine, monkeypatch)
    for content, wanted in ((films.asked(CLIPS[0]), []), ([{"role": "user", "content": "No film"}], [25, 1, 1, 1])):
        engine.generate(content, max_new_tokens=4, temperature=0.0)
        assert asked_of == wanted


def test_settings_that_make_no_sense_are_named(tmp_path: Path) -> None:
    seers.write(tmp_path, "qwen2_vl")
    place = tmp_path / "video_preprocessor_config.json"
    for broken, why in (({"fps": -1}, "make no sense"), ({"max_frames": "many"}, "many"), ({"size": 5}, "contradicts")):
        place.write_text(json.dumps({**SETTINGS, **broken}))
        with pytest.raises(ValueError, match=why):
            read_chat(shoal.load(str(tmp_path), dtype="float32"), films.asked(CLIPS[0]))


def test_models_without_films_say_so(tmp_path: Path) -> None:
    text = shoal.load(str(model_path(STORIES)))
    seer = seers.engine(tmp_path, "llava")
    for engine, why in ((text, "Shoal reads text alone with it"), (seer, "it sees pictures, one at a time")):
        for ask in (partial(read_chat, engine), engine.generate):
            with pytest.raises(Unsupported, match=f"a film for .*: {why}. Leave films out, or use a model that sees"):
                ask(films.asked(CLIPS[0]))


def test_marks_in_a_text_are_refused() -> None:
    engine, _ = made("qwen3_vl")
    with pytest.raises(ValueError, match=r"has <\|video_pad\|> 2 times, which stands for a film, and 1 films"):
        read_chat(engine, films.asked("<|video_pad|>", CLIPS[0]))


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"qwen3_vl_moe"}))
def test_a_gguf_file_sees_films_as_the_same_weights_in_safetensors_do(kind: str, tmp_path: Path) -> None:
    """By the settings that published models have, since such files say nothing of films."""
    model, processor = mmproj_files.write(tmp_path, kind, "F32")
    model.save_pretrained(tmp_path / "other")
    processor.save_pretrained(tmp_path / "other")
    usual = FILMS[kind].usual
    (tmp_path / "other" / "video_preprocessor_config.json").write_text(json.dumps({
        "size": {"shortest_edge": usual.least, "longest_edge": usual.most},
        "image_mean": processor.pictures.image_mean, "image_std": processor.pictures.image_std}))
    found = []
    for place in (tmp_path / "model.gguf", tmp_path / "other"):
        engine = shoal.load(str(place), dtype="float32")
        ids, pictures = read_chat(engine, films.asked("See ", films.noisy(8, 2), ". What?"))
        assert pictures is not None
        found.append((ids, seers.logits_of(engine, ids, pictures, 1000)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-5)


def still_engine(kind: str, tmp_path: Path) -> tuple[shoal.Engine, Any]:
    """An engine of a type that sees films as pictures, and transformers' model."""
    if kind == "smolvlm":
        return made(kind)
    model, _ = mmproj_files.write(tmp_path, kind, "F32")
    return shoal.load(str(tmp_path / "model.gguf"), dtype="float32"), model


@pytest.mark.parametrize("clip", range(len(CLIPS)))
@pytest.mark.parametrize("kind", STILLS)
def test_stills_are_those_of_transformers(
    kind: str, clip: int, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one type of safetensors, the other, whose processor needs torchvision, of a GGUF file."""
    (engine, model), (wanted,) = still_engine(kind, tmp_path), told.of(kind, CLIPS[clip])
    assert engine.vision is not None
    settings = FilmSettings.of(settings_of(kind), FILMS[kind].usual)
    monkeypatch.setattr("shoal.engine.films._settings", lambda vision, _: settings)
    branch = "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    for known in (branch.replace("<|vision_start|><|video_pad|><|vision_end|>", "<video>"), ""):
        template = seers.TEMPLATE.replace(branch, known).replace("PICTURE", "<image>")
        monkeypatch.setattr(engine.tokenizer, "chat_template", template)
        ids, pictures = read_chat(engine, films.asked("See ", CLIPS[clip], ". What?"))
        text = f"<s>[user]See {wanted['text']}. What?[assistant]"
        assert ids == engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    frames = wanted["pixel_values" if kind == "smolvlm" else "pixel_values_videos"]
    seen = ({"pixel_values": frames, "pixel_attention_mask": wanted["pixel_attention_mask"]} if kind == "smolvlm" else
            {"pixel_values": frames[0]})
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), **seen).logits[0]
    assert pictures is not None and len(pictures.pictures) == len(wanted["frames_indices"])
    torch.testing.assert_close(seers.logits_of(engine, ids, pictures, 7), logits, rtol=0, atol=1e-5)


def test_pictures_beside_stills_are_refused() -> None:
    engine, _ = made("smolvlm")
    with pytest.raises(Unsupported, match="pictures and films in one conversation .* Send one of both"):
        read_chat(engine, films.asked(seers.picture(1), CLIPS[0]))


def test_numbers_stand_in_words() -> None:
    """As SmolVLM learned how many frames there are."""
    assert [*map(_in_words, (1, 13, 20, 21, 40, 64, 99))] == [
        "one", "thirteen", "twenty", "twenty-one", "forty", "sixty-four", "ninety-nine"]


def test_a_film_is_turned_upright() -> None:
    """By the matrix of its track, as players show it."""
    frames = np.zeros((3, 48, 64, 3), np.uint8)
    frames[:, :24, :32] = 255
    data = films.film(frames)
    matrix = data.index(b"tkhd") + 4 + 40  # behind version, times, numbers and volume (ISO/IEC 14496-12, 8.3.2)
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)  # by 90 degrees, clockwise
    film = FilmFile(data[:matrix] + turned + data[matrix + 36 :], "film")
    assert (film.width, film.height) == (48, 64)
    seen = film.frames([1], (64, 48))[0, 0]
    assert seen[5, 43] > 200 and max(seen[5, 5], seen[60, 5], seen[60, 43]) < 50


def test_the_last_frame_stands_for_those_that_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    film = FilmFile(films.noisy(1), "film")
    whole, decoded = film.frames([0, 5, 11], (32, 48)), FilmFile._decoded
    monkeypatch.setattr(FilmFile, "_decoded", lambda *given: itertools.islice(decoded(*given), 6))
    assert torch.equal(film.frames([0, 5, 11], (32, 48)), whole[[0, 1, 1]])
    monkeypatch.setattr(FilmFile, "_decoded", lambda *given: iter(()))
    with pytest.raises(ValueError, match="film breaks off before the first frame"):
        film.frames([0], (32, 48))
    with pytest.raises(ValueError, match="has no frame that can be decoded"):
        FilmFile(films.noisy(1), "film")


@pytest.mark.parametrize("wanted", [[0], [11], [0, 1, 2, 7], [3, 3, 4], list(range(12))])
def test_frames_are_those_of_their_numbers(wanted: list[int]) -> None:
    film, each = FilmFile(films.noisy(1), "film"), films.frames_of(films.noisy(1))
    found = film.frames(wanted, (film.height, film.width))
    assert torch.equal(found, torch.from_numpy(each[wanted]).permute(0, 3, 1, 2))
