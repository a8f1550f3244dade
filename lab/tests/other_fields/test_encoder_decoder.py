"""A pair and a decoder of equal size: what is counted and measured, and that only the story tells its summary."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from shoal_lab.other_fields import Options, encoder_decoder
from shoal_lab.other_fields.encoder_decoder import (
    ALONE,
    PAIR,
    SIZES,
    WORDS,
    Sizes,
    Tale,
    batch,
    learn,
    logits,
    measured,
    right,
)

TINY = Sizes(32, 48, 6, len(WORDS), 16)


@pytest.mark.parametrize("sizes", [*SIZES.values(), TINY])
def test_two_thirds_encode_and_the_decoder_alone_has_as_many_numbers(sizes: Sizes) -> None:
    with torch.device("meta"):
        made = sizes.models(0)
    numbers = {name: sum(one.numel() for one in model.parameters()) for name, model in made.items()}
    assert abs(numbers[PAIR] / numbers[ALONE] - 1) < 0.05
    assert made[PAIR].config.num_layers == 2 * made[PAIR].config.num_decoder_layers


def test_a_summary_is_what_the_story_tells_and_no_word_of_it_can_be_guessed() -> None:
    draw = random.Random(0)
    stories = [Tale.of(draw) for _ in range(200)]
    for one in stories:
        sentence, = (some for some in one.text.split(" .") if "by night" in some)
        name, thing, place = re.findall(r"(\w+) hid (\w+) in (\w+)", sentence)[0]
        assert one.summary == f"{name} took {thing} to {place}"
    assert len({one.summary for one in stories}) > 150
    assert len({one.text.split().index("night") for one in stories}) == 8


@pytest.mark.parametrize("name", [PAIR, ALONE])
def test_a_word_sees_the_whole_story_and_only_the_summary_before_it(name: str) -> None:
    model = TINY.models(0)[name].double().eval()
    texts, summaries = batch([Tale.of(random.Random(0))])
    other = summaries.clone()
    other[0, 2] = 5
    with torch.no_grad():
        base, changed = logits(model, texts, summaries), logits(model, texts, other)
        for at in (0, texts.shape[1] - 2):
            story = texts.clone()
            story[0, at] = 7
            assert (logits(model, story, summaries) - base)[0, 0].abs().max() > 1e-9
    same = (changed - base).abs().amax(-1)[0] < 1e-12
    assert same.tolist() == [True] * 3 + [False] * (summaries.shape[1] - 3)


def test_training_lowers_the_surprise_and_the_score_counts_what_is_right() -> None:
    model = Sizes(32, 48, 3, len(WORDS), 16).models(0)[PAIR]
    texts, summaries = batch(stories := [Tale.of(random.Random(seed), 1) for seed in range(40)])
    before = cross_entropy(logits(model, texts, summaries).flatten(0, 1), summaries.flatten())
    learn(Options(), PAIR, model, 0, 25, deeds=1)
    with torch.no_grad():
        found = logits(model, texts, summaries)
    assert cross_entropy(found.flatten(0, 1), summaries.flatten()) < 0.7 * before
    hits = found.argmax(-1) == summaries
    assert right(model, stories) == pytest.approx({
        "right": sum(all(one) for one in hits.tolist()) / 40, "facts": hits[:, ::2].double().mean().item()})


def test_bytes_are_those_of_the_keys_that_are_kept(tmp_path: Path) -> None:
    """The pair keeps the prompt's keys in its two decoder layers, the decoder in all seven."""
    found = measured(TINY, ((24, 6),), 2, tmp_path)
    row, = found["shapes"]
    place = 2 * 2 * TINY.width
    """Bytes of a key and a value in bfloat16."""
    assert row[ALONE]["kv_bytes"] == TINY.alone * place * (24 + 5)
    assert row[PAIR]["kv_bytes"] == 2 * place * (24 + 1 + 5)  # with the token that begins
    for name in (PAIR, ALONE):
        assert len(row[name]["seconds"]) == 2
        assert all(first < last for first, last in zip(row[name]["first_seconds"], row[name]["seconds"], strict=True))
    ratios = [b / a for a, b in zip(row[PAIR]["first_seconds"], row[ALONE]["first_seconds"], strict=True)]
    assert row["times_sooner"]["min"] == min(ratios)


@pytest.mark.parametrize(("wrong", "told"), [
    ({"layers": 4}, "layers=4.*give 3"), ({"width": 40}, "width=40.*fill"), ({"vocabulary": 2}, "vocabulary=2"),
])
def test_what_is_wrong_is_refused(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Sizes(**{"width": 32, "inner": 48, "layers": 6, "head": 16, **wrong})
    with pytest.raises(ValueError, match="deeds=9.*1 to 8"):
        Tale.of(random.Random(0), 9)


@pytest.mark.slow
def test_the_study_runs(tmp_path: Path) -> None:
    found = {"speed": measured(TINY, ((8, 6), (24, 4)), 2, tmp_path),
             "learnt": encoder_decoder.lessons(Options(work=tmp_path), range(2), TINY, 5)}
    assert "first token" in encoder_decoder.headline(found)
    encoder_decoder.plot(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size < 150_000
