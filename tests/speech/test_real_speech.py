"""Published models on real speech: the words are those of transformers' greedy decoding, whatever runs the decoder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from eagle_part import write_eagle_for
from real_models import real_model
from shared_models import data_path
from shoal.audio import RATE, Audio, Samples
from shoal.engine.engine import Engine
from shoal.methods.eagle import Eagle
from shoal.speech.transcribe import Segment, Transcriber, Wish

pytest.importorskip("av")
MODELS = ("whisper-base", "whisper-tiny.en")


@cache
def engine_of(name: str) -> Engine:
    return shoal.load(real_model(name))


@cache
def sounds() -> dict[str, Samples]:
    """The short files."""
    lines = data_path("speech", "transcripts.jsonl").read_text("utf-8").splitlines()
    files = [one["file"] for one in map(json.loads, lines) if one["seconds"] < 30]
    return {name: sound_of(name) for name in files}


def sound_of(name: str) -> Samples:
    with data_path("speech", name).open("rb") as file, Audio(file, name) as audio:
        return np.concatenate([*audio.pieces()])


def heard(name: str, sound: Samples, **wish: Any) -> list[Segment]:
    language = None if name.endswith(".en") else "en"
    course = Transcriber(engine_of(name)).begin(iter([sound]), Wish(language, **wish))
    return [*course.segments()]


@cache
def theirs(name: str) -> dict[str, str]:
    """Transcripts by transformers."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    path = real_model(name)
    processor = WhisperProcessor.from_pretrained(path)
    model = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    asked = {} if name.endswith(".en") else {"language": "en", "task": "transcribe"}
    found = {}
    for file, sound in sounds().items():
        features = processor(sound, sampling_rate=RATE, return_tensors="pt").input_features
        ids = model.generate(features, do_sample=False, num_beams=1, **asked)
        found[file] = processor.batch_decode(ids, skip_special_tokens=True)[0].strip()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_words_are_those_of_transformers(name: str) -> None:
    ours = {file: "".join(one.text for one in heard(name, sound, timed=False, temperatures=(0.0,), silent=1.0)).strip()
            for file, sound in sounds().items()}
    assert ours == theirs(name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "prompt_lookup", "d3_spec"])
def test_drafts_change_no_word_of_a_long_file(method: str) -> None:
    sound = sound_of("sonnet1-long.flac")
    assert heard("whisper-base", sound, method=method) == heard("whisper-base", sound)


@pytest.mark.slow
def test_a_layer_that_guesses_badly_changes_no_word_of_a_long_file(tmp_path: Path) -> None:
    part = write_eagle_for(engine_of("whisper-base"), tmp_path, tuple(range(220, 4000)))
    sound, method = sound_of("sonnet1-long.flac"), Eagle(part=str(part), stop=0.0)
    assert heard("whisper-base", sound, method=method) == heard("whisper-base", sound)


@pytest.mark.slow
def test_words_of_a_model_with_another_vocabulary_change_none() -> None:
    sound, wish = sound_of("sonnet1-long.flac"), Wish("en")
    transcriber = Transcriber(engine_of("whisper-base"), Transcriber(engine_of("whisper-tiny.en")))
    assert [*transcriber.begin(iter([sound]), wish).segments()] == heard("whisper-base", sound)


@pytest.mark.slow
def test_the_language_is_heard_and_silence_stays_silent() -> None:
    transcriber = Transcriber(engine_of("whisper-base"))
    course = transcriber.begin(iter([sounds()["jfk.flac"]]), Wish())
    assert "ask not what your country can do for you" in "".join(one.text for one in course.segments())
    assert course.language == "en"
    silent = transcriber.begin(iter([np.zeros(45 * RATE, np.float32)]), Wish())
    assert [*silent.segments()] == []
    for loud in (1e-3, 1e-2, 5e-2):
        noise = np.random.default_rng(0).normal(0, loud, 20 * RATE).astype(np.float32)
        assert [*transcriber.begin(iter([noise]), Wish()).segments()] == []
    noise = np.random.default_rng(0).normal(0, 1e-2, 20 * RATE).astype(np.float32)
    noise[15 * RATE :] += np.pad(sounds()["goforward.flac"], (0, 5 * RATE))[: 5 * RATE]
    assert "go forward" in "".join(one.text for one in transcriber.begin(iter([noise]), Wish()).segments()).lower()


@pytest.mark.slow
def test_the_end_of_a_window_loses_no_word() -> None:
    """The four parts of a sonnet, and the whole, which two windows cut elsewhere."""
    whole = "".join(one.text for one in heard("whisper-base", sound_of("sonnet1-long.flac"))).lower()
    for words in ("from fairest creatures", "contracted to thy own bright eyes", "fresh ornament", "pity the world"):
        assert words in whole
    segments = heard("whisper-base", sound_of("sonnet1-long.flac"))
    assert all(0 <= one.start < one.end <= 51 for one in segments)
    assert [one.start for one in segments] == sorted(one.start for one in segments)
