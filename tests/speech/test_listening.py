"""The rules of timestamps, beside transformers' own, and windows cut by them."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from shoal.errors import Unsupported
from shoal.speech import subtitles
from shoal.speech.listening import Listening, Times
from shoal.speech.transcribe import Segment, Wish
from toy_tokenizers import byte_level
from whispers import SPECIAL, VOCAB, tokenizer

OWN = Listening.of(tokenizer(), VOCAB)
LENGTH, ASKED = 3, 2


def test_special_tokens_are_found_by_their_names() -> None:
    known = tokenizer().get_added_vocab()
    assert (OWN.start, OWN.previous, OWN.silence) == (known[SPECIAL[1]], known[SPECIAL[6]], known[SPECIAL[7]])
    assert OWN.first_time == known["<|0.00|>"] and not OWN.tasks  # a small vocabulary: it knows one language
    several = Listening.of(tokenizer(), 51865)
    assert several.languages == {"en": known["<|en|>"]}
    assert several.prompt("en", "translate", True) == [OWN.start, known["<|en|>"], known["<|translate|>"]]
    assert OWN.prompt("en", "transcribe", False) == [OWN.start, OWN.untimed]
    with pytest.raises(Unsupported, match="lacks <|startoftranscript|>"):
        Listening.of(byte_level(), 300)


def test_timestamps_follow_transformers_rules() -> None:
    config = GenerationConfig(eos_token_id=OWN.end, bos_token_id=OWN.end, no_timestamps_token_id=OWN.untimed,
                              max_initial_timestamp_index=50)
    theirs, dice = WhisperTimeStampLogitsProcessor(config, begin_index=LENGTH), random.Random(0)
    ours, allowed = Times(OWN, ASKED), 0
    for case in range(400):
        torch.manual_seed(case)
        said = list[int]()
        for _ in range(dice.randrange(12)):
            timed = dice.random() < 0.4
            low = max([OWN.first_time, *(token for token in said if token >= OWN.first_time)])
            said.append(dice.randrange(low, VOCAB - 600) if timed else dice.randrange(250))
        ids = torch.tensor([[1, OWN.start, 3, *said]])
        scores = torch.randn(1, VOCAB) * dice.choice((1.0, 6.0))
        wanted, found = theirs(ids, scores.clone()), ours(ids, scores)
        assert torch.equal(found, wanted), said
        allowed += int(found.isfinite().sum())
    assert 0 < allowed < 400 * VOCAB


def test_what_cannot_be_wished_for_is_refused() -> None:
    with pytest.raises(ValueError, match="task is 'sing'"):
        Wish(task="sing")
    for wrong in ((), (-0.1,), (float("inf"),)):
        with pytest.raises(ValueError, match="temperatures are"):
            Wish(temperatures=wrong)


SAID = [Segment(0.0, 2.5, " Tom & <i>Ann</i>", (1, 2), 0.0, 0.0, -0.3, 1.0, 0.01),
        Segment(3599.999, 3661.04, "\n--> later\n\n on", (3,), 3590.0, 0.2, -0.4, 1.1, 0.02)]


def test_subtitles_are_well_formed() -> None:
    assert subtitles.subrip(SAID) == ("1\n00:00:00,000 --> 00:00:02,500\nTom & <i>Ann</i>\n\n"
                                      "2\n00:59:59,999 --> 01:01:01,040\n-> later on\n")
    assert subtitles.webvtt(SAID) == ("WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nTom &amp; &lt;i>Ann&lt;/i>\n\n"
                                      "00:59:59.999 --> 01:01:01.040\n-> later on\n")
    assert subtitles.webvtt([]) == "WEBVTT\n" and subtitles.subrip([]) == ""
    assert subtitles.timed_line(SAID[0]) == "[00:00:00.000 --> 00:00:02.500] Tom & <i>Ann</i>"
    report = subtitles.report(SAID, "en", 3700.0, "transcribe")
    assert report["text"] == "Tom & <i>Ann</i>\n--> later\n\n on" and report["segments"][1]["seek"] == 359000
    assert [one["id"] for one in report["segments"]] == [0, 1]
