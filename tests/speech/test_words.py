"""When words were spoken: against transformers' alignment, and how tokens become words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

import shoal
from shoal.audio import RATE
from shoal.speech.listening import STEP, Listening
from shoal.speech.transcribe import Segment, Transcriber, Wish
from shoal.speech.words import Aligner, Word, first_frames, placed, smoothed
from whispers import LAYERS, features, tokenizer, tone, whisper, write

KNOWN = tokenizer().get_added_vocab()
START, UNTIMED, END = (KNOWN[f"<|{name}|>"] for name in ("startoftranscript", "notimestamps", "endoftext"))
HEADS = [[0, 1], [2, 0], [2, 3]]


def their_jumps(weights: Tensor) -> list[int]:
    """The first frame of each token by transformers' warping."""
    texts, times = _dynamic_time_warping(-weights.double().numpy())
    jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
    return [int(time) for time in times[jumps]]


@pytest.mark.parametrize("tokens, frames", [(1, 1), (1, 9), (5, 5), (7, 60), (30, 11), (40, 300)])
def test_warping_is_that_of_transformers(tokens: int, frames: int) -> None:
    weights = torch.randn(tokens, frames, generator=torch.Generator().manual_seed(tokens * frames))
    assert first_frames(weights).tolist() == their_jumps(weights)


@pytest.mark.parametrize("frames", [3, 4, 50])
def test_smoothing_is_that_of_transformers(frames: int) -> None:
    weights = torch.rand(4, 6, frames).softmax(-1)
    spread, mean = torch.std_mean(weights, -2, keepdim=True, unbiased=False)
    torch.testing.assert_close(smoothed(weights), _median_filter((weights - mean) / spread, 7).mean(0))


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_last_moment_of_a_sound_has_a_frame_at_which_all_look(tokens: int) -> None:
    weights = smoothed(torch.ones(3, tokens, 1))
    assert torch.equal(weights, torch.zeros(tokens, 1)) and first_frames(weights).tolist() == [0] * tokens


@pytest.mark.parametrize("named", [True, False])
def test_times_are_those_of_transformers_attention(named: bool, tmp_path: Path) -> None:
    """By heads that the files name, or by all of the later half of the layers."""
    model = whisper(3)
    model.config._attn_implementation = "eager"
    folder = write(tmp_path / "model", model)
    config = json.loads((folder / "generation_config.json").read_text("utf-8"))
    config.pop("_from_model_config")  # else it is left out what no model's config has
    (folder / "generation_config.json").write_text(json.dumps(config | ({"alignment_heads": HEADS} if named else {})))
    heads = HEADS if named else [[layer, head] for layer in range(LAYERS // 2, LAYERS) for head in range(4)]
    engine, tokens, seconds = shoal.load(folder), [70, 71, 32, 72, 90, 32, 75], 4.0
    assert engine.encoder is not None
    source = engine.encoder(features(2))
    listening = Listening.of(engine.tokenizer, engine.runner.vocab_size)
    found = Aligner(engine, listening).align(source, tokens, "en", "transcribe", 100.0, seconds)
    fed = torch.tensor([[START, UNTIMED, *tokens, END]])
    with torch.no_grad():
        wanted = model(features(2)[None], decoder_input_ids=fed, output_attentions=True)
    weights = torch.stack([wanted.cross_attentions[layer][0, head] for layer, head in heads])
    weights = weights[..., : round(seconds / STEP)]
    weights = weights / weights.sum(-1, keepdim=True)
    spread, mean = torch.std_mean(weights, -2, keepdim=True, unbiased=False)
    jumps = their_jumps(_median_filter((weights - mean) / spread, 7).mean(0)[1:-1])
    chances = wanted.logits[0, 1:-2, :END].softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert sum(count for _, count in found) == len(tokens) and len(found) > 1
    at = 0
    for word, count in found:
        assert (word.start, word.end) == tuple(round(100 + STEP * jumps[place], 2) for place in (at, at + count))
        assert word.probability == pytest.approx(chances[at : at + count].mean().item(), rel=1e-3)
        at += count


def split(pieces: list[str], language: str = "en") -> list[str]:
    """The words of a text whose tokens are these pieces."""
    decoder = SimpleNamespace(decode=lambda tokens: "".join(pieces[token] for token in tokens))
    aligner = Aligner(SimpleNamespace(tokenizer=decoder), None)  # type: ignore[arg-type]
    parts = aligner._split(range(len(pieces)), language)
    assert sum(part.tokens for part in parts) == len(pieces) and "".join(part.text for part in parts) == "".join(pieces)
    return [part.text for part in parts]


def test_marks_belong_to_words() -> None:
    assert split([" He", " sa", "id", ":", " yes", "!"]) == [" He", " said:", " yes!"]
    assert split([" a", ' "', "b", '"', " (", "c", ")", ",", " d"]) == [" a", ' "b"', " (c),", " d"]
    assert split([" I", " don", "'t", " go", "."]) == [" I", " don't", " go."]
    assert split(["Well", ",", " cold", "-", "he", "arted"]) == ["Well,", " cold", "-hearted"]


def test_languages_without_spaces_have_a_word_for_each_sign() -> None:
    assert split(["\u4f60", "\u597d", "\u3002"], "zh") == ["\u4f60", "\u597d\u3002"]


def test_a_sign_of_several_tokens_is_not_cut() -> None:
    """The tiny tokenizer has a token for each byte."""
    own = tokenizer()
    aligner = Aligner(SimpleNamespace(tokenizer=own), None)  # type: ignore[arg-type]
    tokens = own.encode(" caf\u00e9 \u00fcber", add_special_tokens=False)
    assert [(part.text, part.tokens) for part in aligner._split(tokens, "de")] == [(" caf\u00e9", 6), (" \u00fcber", 6)]


def segment(*tokens: int) -> Segment:
    return Segment(0.0, 1.0, "x", tokens, 0.0, 0.0, 0.0, 1.0, 0.0)


def test_words_go_to_the_segments_of_their_tokens() -> None:
    words = [(Word(0.0, 0.1, f"{number}", 1.0), count) for number, count in enumerate((2, 1, 1, 3))]
    found = placed([segment(300, 1, 2, 3, 301), segment(301, 4, 302), segment(302, 5, 6, 7)], words, END)
    assert [[word.text for word in one.spoken] for one in found] == [["0", "1"], ["2"], ["3"]]
    assert [one.spoken for one in placed([segment(1), segment(2)], words[:1], END)] == [(words[0][0],), ()]


def test_every_segment_has_words_in_order(tmp_path: Path) -> None:
    engine = shoal.load(write(tmp_path / "model", whisper(2)))

    def segments(**wish: Any) -> list[Segment]:
        sound = iter([tone(3.0).astype(np.float32) / 32768])
        return [*Transcriber(engine).begin(sound, Wish(**wish)).segments()]

    bare, timed = segments(), segments(word_times=True)
    assert [one.text for one in timed] == [one.text for one in bare] and not any(one.spoken for one in bare)
    assert timed and timed[0].spoken
    ends = [time for one in timed for word in one.spoken for time in (word.start, word.end)]
    assert ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= 3.0 + 1 / RATE
