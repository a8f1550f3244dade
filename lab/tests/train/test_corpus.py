"""Answers with their states: equal to transformers', whole after a kill, and of one kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drive import prompt
from shoal_lab.train import corpus, files
from shoal_lab.train.corpus import Corpus, CorpusWish
from tiny_corpus import PROMPTS, WISH, made
from trained_parts import states_of, target

ENGINE = target("llama")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_states_are_what_the_head_reads(tmp_path: Path) -> None:
    found = made(tmp_path)
    whole = [one for shard in range(len(found.shards)) for part in (True, False)
             for one in found.answers(shard, validation=part)]
    assert len(whole) == len(PROMPTS)
    for one in whole:
        expected = states_of(ENGINE, one.tokens.tolist())
        assert torch.allclose(one.states.double(), expected, atol=0.02, rtol=0.02)
        told = ENGINE.generate(one.tokens[: one.prompt].tolist(), max_new_tokens=WISH.max_new_tokens)
        assert one.tokens[one.prompt :].tolist() == list(told.tokens)


def test_a_killed_run_goes_on_and_is_the_same(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole")
    calls = iter([False, True])
    made(tmp_path / "killed", until=lambda: next(calls))
    (tmp_path / "killed" / "states-00001.safetensors.part").write_bytes(b"half")
    assert len(Corpus(tmp_path / "killed").shards) == 1
    again = made(tmp_path / "killed", prompts=pytest.fail)
    assert again.digest == whole.digest
    for path in whole.shards:
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes()


def test_it_leaves_off_where_there_is_enough(tmp_path: Path) -> None:
    few = CorpusWish(tokens=1, max_new_tokens=WISH.max_new_tokens)
    assert len(made(tmp_path, few).shards) == 1
    assert len(made(tmp_path, CorpusWish(WISH.tokens, WISH.max_new_tokens, gigabytes=1e-9)).shards) == 1
    assert len(made(tmp_path).shards) == 2


def test_other_answers_are_refused(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ValueError, match="temperature was 0.0 and now is 1.0"):
        made(tmp_path, CorpusWish(WISH.tokens, WISH.max_new_tokens, temperature=1.0))
    with pytest.raises(ValueError, match="fingerprint was"):
        corpus.make(tmp_path, target("hybrid"), lambda: PROMPTS, WISH)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    found = made(tmp_path)
    raw = found.shards[1].read_bytes()
    found.shards[1].write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match="states-00001.safetensors cannot be read"):
        found.answers(1, validation=False)


def test_validation_is_never_trained_on(tmp_path: Path) -> None:
    found = made(tmp_path)
    held = [one for shard in range(2) for one in found.answers(shard, validation=True)]
    trained = [one for shard in range(2) for one in found.answers(shard, validation=False)]
    assert len(held) == len(found.validation()) == 2 + 1
    assert not {tuple(one.tokens.tolist()) for one in held} & {tuple(one.tokens.tolist()) for one in trained}


def test_frequent_tokens_are_those_of_answers(tmp_path: Path) -> None:
    found = made(tmp_path)
    counts: dict[int, int] = {}
    for shard in range(2):
        for one in found.answers(shard, validation=False):
            for token in one.tokens[one.prompt :].tolist():
                counts[token] = counts.get(token, 0) + 1
    best = found.frequent(3)
    assert len(best) == 3 and sorted(best) == best
    assert min(counts[token] for token in best) >= max([0, *(counts[token] for token in counts if token not in best)])
    assert len(found.frequent(10_000)) == len(counts)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    files.write_json(path, {"is": "there"})

    def full(part: Path) -> None:
        part.write_text("ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="kept.json cannot be written .*what was there before is untouched"):
        files.write(path, full)
    assert files.read_json(path) == {"is": "there"} and names(tmp_path) == ["kept.json"]


def test_batches_hold_every_answer_once_within_their_room(tmp_path: Path) -> None:
    answers = made(tmp_path).answers(0, validation=False)
    batches = list(corpus.batches(answers, 200))
    assert sorted(id(one) for batch in batches for one in batch) == sorted(map(id, answers))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(one.tokens) for one in batch) <= 200
    assert prompt(3, 1)
