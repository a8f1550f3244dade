"""Windows decoded together say what each says alone, and words that a smaller model heard change none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import shoal
from shoal.audio import RATE, Samples, quietest
from shoal.engine.engine import Engine
from shoal.speech import drafts
from shoal.speech.drafts import Followed
from shoal.speech.listening import Listening, Speller
from shoal.speech.transcribe import Segment, Transcriber, Wish
from whispers import VOCAB, tokenizer, tone, whisper, write

OWN = Listening.of(tokenizer(), VOCAB)


def loaded(folder: Path, seed: int) -> Engine:
    return shoal.load(write(folder, whisper(seed)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return loaded(tmp_path_factory.mktemp("whisper") / "model", 2)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return loaded(tmp_path_factory.mktemp("whisper") / "model", 5)


def sound(seconds: float, hertz: float = 440.0) -> Iterator[Samples]:
    for _ in range(2):
        yield tone(seconds / 2, hertz).astype(np.float32) / 32768


def alone(engine: Engine, sounds: list[tuple[float, float]], **wish: Any) -> list[list[Segment]]:
    return [[*Transcriber(engine).begin(sound(*one), Wish(**wish)).segments()] for one in sounds]


def together(
    engine: Engine, sounds: list[tuple[float, float]], size: int, **wish: Any
) -> list[list[Segment]]:
    found: list[list[Segment]] = [[] for _ in sounds]
    for number, course, segments in Transcriber(engine).together((sound(*one) for one in sounds), Wish(**wish), size):
        assert not (course.ended and segments)
        found[number] += segments
    return found


SOUNDS = [(35.0, 440.0), (2.0, 700.0), (64.0, 300.0), (3.0, 150.0)]


@pytest.mark.parametrize("wish", [
    {"temperatures": (0.0,)}, {"temperatures": (0.0, 0.4), "least_likely": -0.01}, {"timed": False, "prompt": "Ann"},
    {"method": "prompt_lookup", "word_times": True}], ids=["timed", "hotter", "untimed", "words"])
@pytest.mark.parametrize("size", [1, 3])
def test_files_share_a_batch_and_no_word_changes(engine: Engine, wish: dict[str, Any], size: int) -> None:
    assert together(engine, SOUNDS, size, silent=1.0, **wish) == alone(engine, SOUNDS, silent=1.0, **wish)


def test_windows_apart_say_what_each_says_as_a_file(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window is cut out and heard alone; a batch of 4 takes several of the file."""
    wish = {"goes_on": False, "apart": True, "silent": 1.0, "temperatures": (0.0,)}
    sizes, generate = list[int](), engine.generate
    monkeypatch.setattr(engine, "generate", lambda prompt, **asked: (
        sizes.append(len(prompt) if isinstance(prompt[0], list) else 1), generate(prompt, **asked))[1])
    found = together(engine, [SOUNDS[2]], 4, **wish)
    assert sizes == [3]
    assert found == together(engine, [SOUNDS[2]], 1, **wish)
    whole, at, wanted = np.concatenate([*sound(*SOUNDS[2])]), 0, list[Segment]()
    while len(rest := whole[at : at + 30 * RATE]):
        rest = rest[: quietest(rest, 20 * RATE)] if len(rest) == 30 * RATE else rest
        one = Transcriber(engine).begin(iter([rest]), Wish(goes_on=False, silent=1.0, temperatures=(0.0,)))
        pieces = one.take()
        heard = one.transcriber.hear(pieces)[0]
        wanted += [replace(part, start=round(part.start + at / RATE, 2), end=round(part.end + at / RATE, 2),
                           window=at / RATE) for part in heard]
        at += len(rest)
    texts = ["".join(one.text for one in found[0] if one.window == window) for window in {w.window: 0 for w in wanted}]
    assert all(text.startswith("".join(one.text for one in wanted if one.window == window))
               for text, window in zip(texts, {w.window: 0 for w in wanted}, strict=True))


def test_the_quietest_place_is_found() -> None:
    samples = np.ones(30 * RATE, np.float32)
    samples[: 5 * RATE] = samples[24 * RATE : 24 * RATE + RATE // 2] = 0.0
    assert 24 * RATE < quietest(samples, 20 * RATE) < 24 * RATE + RATE // 2


def test_what_cannot_be_had_together_is_refused(engine: Engine, other: Engine) -> None:
    with pytest.raises(ValueError, match="apart is True, and so is goes_on"):
        Wish(apart=True)
    with pytest.raises(ValueError, match="batch size is 0"):
        next(Transcriber(engine).together([sound(1.0)], Wish(), 0))
    with pytest.raises(ValueError, match="method is 'prompt_lookup' beside a smaller model"):
        Transcriber(engine, Transcriber(other)).begin(sound(1.0), Wish(method="prompt_lookup"))


@pytest.mark.parametrize("wish", [
    {}, {"timed": False, "temperatures": (0.0,)}, {"temperatures": (0.0, 0.6), "least_likely": -0.01}])
@pytest.mark.parametrize("helper", ["itself", "other"])
def test_words_that_a_smaller_model_heard_change_none(
    engine: Engine, other: Engine, helper: str, wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, generate = list[tuple[int, int]](), engine.generate

    def counted(prompt: Any, **asked: Any) -> Any:
        result = generate(prompt, **asked)
        kept.extend((one.stats.accepted, one.stats.new_tokens) for one in (result if isinstance(result, list)
                                                                           else [result]))
        return result

    monkeypatch.setattr(engine, "generate", counted)
    if helper == "itself":  # a model of random weights says no text
        monkeypatch.setattr(drafts.Translation, "larger", lambda _, tokens, timed: [*tokens])
    wish = {"silent": 1.0, **wish}
    plain = alone(engine, SOUNDS[:2], **wish)
    kept.clear()
    transcriber = Transcriber(engine, Transcriber(engine if helper == "itself" else other))
    found = [[*transcriber.begin(sound(*one), Wish(**wish)).segments()] for one in SOUNDS[:2]]
    assert found == plain
    if helper == "itself" and not wish.get("timed", True):
        assert sum(one for one, _ in kept) > 0.8 * sum(size for _, size in kept)
    batch: list[list[Segment]] = [[], []]
    for number, _, segments in transcriber.together((sound(*one) for one in SOUNDS[:2]), Wish(**wish), 2):
        batch[number] += segments
    assert batch == plain


def test_a_text_is_followed_past_what_is_replaced_put_in_and_left_out() -> None:
    text = [*range(10, 40)]
    followed, answer = Followed(text), list[int]()
    assert followed.next(answer, 100) == text[:16]
    answer += [*text[:5], 99]  # one token replaced
    assert followed.next(answer, 100) == text[6:10]
    answer += text[6:8]
    answer += [98, 97, text[8], text[9]]  # two put in
    assert followed.next(answer, 100) == text[10:14]
    answer += text[10:15]
    assert followed.next(answer, 100) == text[15:23]  # all were kept: twice as many
    answer += text[17:20]  # two left out
    assert followed.next(answer, 2) == text[20:22]
    assert Followed([]).next([1, 2], 5) == []


def test_text_is_spelled_as_the_model_learned_it() -> None:
    """By the least number first: as merges do it, where all of them are there, and right where one is missing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġt", "o"), ("r", "e"), ("he", "re")]
    numbers = {name: number for number, name in enumerate([*letters, *("".join(pair) for pair in merges)])}

    def made(pairs: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
        core = Tokenizer(models.BPE(numbers, pairs))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=core)

    for text in (" the there to here", "he to<|endoftext|> ü"):
        wanted = made(merges).encode(text, add_special_tokens=False)
        assert Speller(made(merges))(text) == wanted == Speller(made(merges[1:]))(text)
    assert made(merges[1:]).encode(" the", add_special_tokens=False) != Speller(made(merges[1:]))(" the")


def test_tokens_of_one_model_become_another_ones() -> None:
    wanted = replace(OWN, untimed=OWN.untimed + 7)
    between = drafts.Translation(tokenizer(), OWN, tokenizer(), wanted)
    words = tokenizer().encode(" Hi", add_special_tokens=False)
    said = [OWN.first_time, *words, OWN.first_time + 50]
    assert between.larger(said, True) == [OWN.first_time + 7, *words, OWN.first_time + 57]
    assert between.larger(said, False) == words == between.smaller([*words, wanted.first_time])


@torch.no_grad()
def test_what_is_kept_does_not_grow_with_windows(engine: Engine) -> None:
    """KV, sources and samples after many windows are those after a few; equal windows are encoded once."""
    transcriber, encoder = Transcriber(engine), engine.encoder
    assert encoder is not None
    encoded, sizes, forward = list[int](), list[tuple[int, int, int]](), encoder.module.forward

    def counted(*given: Any, **more: Any) -> Any:
        encoded.append(1)
        return forward(*given, **more)

    encoder.module.forward = counted
    try:
        pieces = (tone(30.0).astype(np.float32) / 32768 for _ in range(12))
        course = transcriber.begin(pieces, Wish(timed=False, silent=1.0, temperatures=(0.0,)))
        while taken := course.take():
            transcriber.hear(taken)
            sizes.append((sum(one.nbytes for one in encoder._known.values()), len(course.window._held),
                          len(course.said)))
    finally:
        del encoder.module.forward
    assert len(sizes) == 12 and len(encoded) == 1
    assert len(set(sizes[2:])) == 1


def test_published_models_spell_what_they_say() -> None:
    """The texts of the speech that tests run on, in whisper-base's tokens: none is split at its space."""
    from real_models import real_model

    known = AutoTokenizer.from_pretrained(real_model("whisper-base"))
    tokens = Speller(known)(" And so, my fellow Americans: ask not what the country can do there.")
    assert known.decode(tokens) == " And so, my fellow Americans: ask not what the country can do there."
    assert tokens[-2:] == [456, 13]  # " there" is one token; by the published merges it is two
