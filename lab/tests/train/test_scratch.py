"""A masked-diffusion model from scratch: its batches, learning, resuming, and loading."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.cli.entry import main
from shoal.types import MaskedModel
from shoal_lab.eval.sources import parallel
from shoal_lab.train import diffusion
from shoal_lab.train.diffusion import DiffusionTraining

SMALL = DiffusionTraining(steps=4, batch=12, hidden=16, layers=1, heads=2, inner=24)
TWIN = dataclasses.replace(SMALL, causal=True)
TOKENIZER = diffusion.tokenizer_of(parallel.vocabulary())


def test_words_come_back_as_they_were() -> None:
    for text in ("sum : 7 5 9 =", "7 + 5 = 12 \n 12 + 9 = 21", "the old hen is at the lake ."):
        ids = TOKENIZER(text)["input_ids"]
        assert len(ids) == len(text.split(" ")) and TOKENIZER.unk_token_id not in ids
        assert TOKENIZER.decode(ids) == text


def test_a_batch_masks_answers_alone() -> None:
    batch, mask = diffusion.batch_of(3, TOKENIZER, SMALL), TOKENIZER.mask_token_id
    assert torch.equal(batch.tokens, diffusion.batch_of(3, TOKENIZER, SMALL).tokens)
    assert not torch.equal(batch.wanted, diffusion.batch_of(4, TOKENIZER, SMALL).wanted)
    assert torch.equal(batch.tokens == mask, batch.wanted >= 0) and bool((batch.wanted >= 0).any(1).all())
    assert bool(batch.inside[batch.wanted >= 0].all())
    equals = TOKENIZER.convert_tokens_to_ids("=")
    for tokens, wanted, inside in zip(batch.tokens.tolist(), batch.wanted.tolist(), batch.inside.tolist(), strict=True):
        first = tokens.index(equals) + 1
        assert all(label < 0 for label in wanted[:first])
        whole = [label if label >= 0 else word for word, label in zip(tokens, wanted, strict=True)]
        length = sum(inside)
        answer = whole[first:length]
        assert answer[-1] == TOKENIZER.eos_token_id and not any(inside[length:])
        prompt = TOKENIZER.decode(whole[:first])
        digest = hashlib.sha256(prompt.encode()).digest()
        assert digest[0] % 5, "a prompt that is for evaluation was trained on"


def test_shares_are_spread_evenly() -> None:
    """Stratified: the k-th text of a batch has about a share k of its tokens masked; all numbers occur."""
    batch = diffusion.batch_of(0, TOKENIZER, dataclasses.replace(SMALL, batch=400))
    equals = TOKENIZER.convert_tokens_to_ids("=")
    first = torch.tensor([tokens.index(equals) + 1 for tokens in batch.tokens.tolist()])
    length = batch.inside.sum(1) - first
    masked = (batch.wanted >= 0).sum(1)
    assert float((masked / length - torch.arange(1, 401) / 400).abs().max()) <= 1 / 5 + 0.01  # one word of the shortest
    assert {(int(k), int(n)) for k, n in zip(masked, length, strict=True) if n == 5} == {(k, 5) for k in range(1, 6)}


def test_the_twin_reads_the_same_texts_and_learns_each_next_word() -> None:
    """The loss covers every answer and its first end, and neither prompt nor padding; first weights are equal."""
    causal, masked = diffusion.batch_of(3, TOKENIZER, TWIN), diffusion.batch_of(3, TOKENIZER, SMALL)
    assert torch.equal(causal.tokens, torch.where(masked.wanted >= 0, masked.wanted, masked.tokens))
    equals, eos = TOKENIZER.convert_tokens_to_ids("="), TOKENIZER.eos_token_id
    for tokens, wanted in zip(causal.tokens.tolist(), causal.wanted.tolist(), strict=True):
        first, end = tokens.index(equals), tokens.index(eos)
        assert wanted[first:end] == tokens[first + 1 : end + 1]
        assert {*wanted[:first], *wanted[end:]} == {-100}
    left, right = (diffusion.fresh_model(TOKENIZER, how).state_dict() for how in (TWIN, SMALL))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("causal", [False, True])
def test_the_loss_is_the_mean_over_texts_of_their_mean_cross_entropies(causal: bool) -> None:
    how = TWIN if causal else SMALL
    model = diffusion.fresh_model(TOKENIZER, how).eval()
    batch, total = diffusion.batch_of(0, TOKENIZER, how), 0.0
    with torch.no_grad():
        for row in range(SMALL.batch):
            length = int(batch.inside[row].sum())
            tokens = batch.tokens[row : row + 1, :length]
            seen = torch.ones(1, 1, length, length, dtype=torch.bool)
            seen = seen.tril() if causal else seen
            logs = model(tokens, attention_mask=seen, use_cache=False).logits[0].log_softmax(-1)
            places = [place for place in range(length) if batch.wanted[row, place] >= 0]
            total -= sum(float(logs[place, batch.wanted[row, place]]) for place in places) / len(places)
        assert diffusion.loss_of(model, batch).detach().item() == pytest.approx(total / SMALL.batch, rel=1e-4)


def test_a_first_word_is_predicted_from_words_behind_it() -> None:
    model = diffusion.fresh_model(TOKENIZER, SMALL).eval()
    batch = diffusion.batch_of(0, TOKENIZER, SMALL)
    other = batch.tokens.clone()
    other[0, int(batch.inside[0].sum()) - 1] = 7
    with torch.no_grad():
        moved = diffusion.loss_of(model, batch) - diffusion.loss_of(model, dataclasses.replace(batch, tokens=other))
    assert abs(float(moved)) > 1e-9


def train(folder: Path, how: DiffusionTraining, most: int | None = None) -> dict[str, Any]:
    asked = 0

    def late() -> bool:
        nonlocal asked
        asked += 1
        return most is not None and asked > most

    return diffusion.train(how, folder, lambda message: None, late)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, SMALL)["step"] == 4
    assert train(parts, SMALL, 2)["step"] == 2 and train(parts, SMALL)["step"] == 4
    left, right = (torch.load(folder / diffusion.CHECKPOINT, weights_only=True)["weights"] for folder in (whole, parts))
    assert all(torch.equal(left[name], right[name]) for name in left)
    with pytest.raises(ValueError, match="is of another run: batch was 12 and now is 13"):
        train(whole, dataclasses.replace(SMALL, batch=13))


def test_what_is_written_is_loaded_as_a_masked_model_and_answers(tmp_path: Path) -> None:
    train(tmp_path / "model", SMALL)
    for backend in ("hf", "packed"):
        engine = shoal.load(str(tmp_path / "model"), dtype="float32", backend=backend)
        assert engine.masked == MaskedModel(TOKENIZER.mask_token_id)
        assert engine.eos_token_ids == {TOKENIZER.eos_token_id}
        found = engine.generate("copy : ann bob cid dee =", method="diffusion", max_new_tokens=5)
        assert 1 <= len(found.tokens) <= 5


def test_it_learns(tmp_path: Path) -> None:
    """A few seconds are enough to see the loss fall well below that of a random guess."""
    how = dataclasses.replace(SMALL, steps=40, batch=32, hidden=32, rate=6e-3)
    train(tmp_path / "model", how)
    model = diffusion.fresh_model(TOKENIZER, how)
    before = diffusion.loss_of(model, diffusion.batch_of(0, TOKENIZER, how, "evaluation")).detach().item()
    model.load_state_dict(torch.load(tmp_path / "model" / diffusion.CHECKPOINT, weights_only=True)["weights"])
    after = diffusion.loss_of(model, diffusion.batch_of(0, TOKENIZER, how, "evaluation")).detach().item()
    assert before > 0.8 * math.log(len(TOKENIZER)) and after < 0.75 * before


def test_by_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["train", "diffusion", "--out", str(tmp_path / "model"), "--steps", "2", "--batch", "4", "--json"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert '"step": 2' in out.splitlines()[-1] and "--method diffusion" in err
    for more, said in (
        (["--epochs", "2"], "--epochs says nothing to diffusion"), (["--model", "x"], "--model says nothing to"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"), (["--rate", "0"], "--rate is 0.0"),
    ):
        assert main([*argv, *more]) == 2 and said in capsys.readouterr().err
    assert main(["train", "eagle", "--out", str(tmp_path / "x"), "--steps", "3"]) == 2
    assert "--steps belongs to diffusion" in capsys.readouterr().err
    asked = ["generate", "--model", str(tmp_path / "model"), "--raw", "--dtype", "float32", "--max-new-tokens", "6"]
    assert main([*asked, "--method", "diffusion", "--steps", "3", "copy : ann bob cid dee ="]) == 0
    capsys.readouterr()
    assert main([*asked, "copy : ann bob cid dee ="]) == 2
    assert 'full with a masked-diffusion model' in capsys.readouterr().err
    causal = ["train", "diffusion", "--causal", "--out", str(tmp_path / "twin"), "--steps", "2", "--batch", "4"]
    assert main(causal) == 0 and "--method full" in capsys.readouterr().err
    drafted = ["--method", "deer", "--draft", str(tmp_path / "model"), "copy : ann bob cid dee ="]
    assert main(["generate", "--model", str(tmp_path / "twin"), *asked[3:], *drafted]) == 0
    assert main(["train", "eagle", "--out", str(tmp_path / "x"), "--causal"]) == 2
    assert "--causal belongs to diffusion" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), [
    ({"steps": 0}, "steps is 0"), ({"hidden": 18, "heads": 2}, "hidden is 18; it must be a multiple of twice"),
])
def test_sizes_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
