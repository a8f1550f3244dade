"""A masked-diffusion model as a drafter: its inputs, its guesses, and which models are allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from drive import prompt
from families import VOCAB, fingerprint, tiny
from masked import MASK, masked_model, seen_by_all
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal_lab.drafts.masked import MaskedDrafter
from shoal_lab.methods.deer import DEER
from shoal_lab.methods.foreal import FoReaL

PROMPTS = [prompt(9, 1), prompt(4, 2)]
NEW, K = 14, 5
HUB = Path(__file__).parents[3] / "hub"


def home(**options: Any) -> Engine:
    return engine_for(tiny("llama", dtype=torch.float64), **options)


def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int, Any]]:
    """Filled while decoding: a sequence's tokens, places left in its answer, and the drafted tree."""
    seen: list[tuple[list[int], int, Any]] = []
    real = MaskedDrafter.propose

    def propose(self: MaskedDrafter, seqs: Any, limits: Any) -> Any:
        before = [(list(seq.tokens), seq.stop.room) for seq in seqs]
        trees = real(self, seqs, limits)
        seen.extend((*known, tree) for known, tree in zip(before, trees, strict=True))
        return trees

    monkeypatch.setattr(MaskedDrafter, "propose", propose)
    return seen


def slow(draft: Any, shift: int, tokens: list[int], masks: int) -> Tensor:
    """Logits [masks, V] of each place by itself, from transformers' own forward over the text with its masks."""
    logits = seen_by_all(draft, [*tokens, *[MASK] * masks], shift)[len(tokens) :].clone()
    logits[:, MASK] = -torch.inf
    return logits


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 3}], ids=["greedy", "sampled"])
def test_guesses_are_those_of_the_places_by_themselves(
    shift: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No place's distribution depends on draws at others; the last block has no more masks than places are left."""
    seen, draft = proposals(monkeypatch), masked_model(shift=shift, dtype=torch.float64)
    home().generate(PROMPTS, method=DEER(draft, length=K, rule="rejection"), max_new_tokens=NEW, **options)
    for tokens, room, tree in seen:
        logits = slow(draft, shift, tokens, min(K, room))
        assert tree.is_chain and len(tree) - 1 == min(K, room - 1)
        for place, guess in enumerate(tree.tokens[1:]):
            if options:
                drawn = tree.draft_probs[place + 1]
                assert float((drawn - (logits[place] / 1.3).softmax(-1)).abs().max()) < 1e-9 and drawn[guess] > 0
            else:
                assert guess == int(logits[place].argmax())
    assert len(seen) >= 2 * NEW / (K + 1) and {min(K, room) for _, room, _ in seen} > {K}


def test_a_draft_that_knows_the_answer_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, draft = home(), masked_model(dtype=torch.float64)
    options: dict[str, Any] = {"max_new_tokens": NEW, "logit_bias": {MASK: -99.0}}
    plain = engine.generate(PROMPTS[0], **options)
    text = [*PROMPTS[0], *plain.tokens]

    def knows(chunks: Any, cache: Any) -> Tensor:
        (chunk,) = chunks
        assert chunk.mutual and chunk.wanted == list(chunk.tokens).count(MASK)
        first = len(chunk.tokens) - chunk.wanted
        return torch.nn.functional.one_hot(torch.tensor(text[first : len(chunk.tokens)]), VOCAB).double()

    companion = engine.info().draft_engine
    assert companion is not None
    monkeypatch.setattr(companion(draft).runner, "forward", knows)
    found = engine.generate(PROMPTS[0], method=DEER(draft, length=K), **options)
    assert found.tokens == plain.tokens and found.stats.accepted == found.stats.drafted
    assert found.stats.target_forwards == 1 + -(-(NEW - 1) // (K + 1))
    end = plain.tokens[4]
    short = engine.generate(PROMPTS[0], method=DEER(draft, length=K), stop_token_ids=[end], **options)
    assert short.tokens == plain.tokens[: plain.tokens.index(end) + 1]
    assert short.stats.drafted == len(short.tokens) - 1, "nothing is guessed behind an end"


def test_rows_that_do_not_fit_into_a_forward_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, draft = home(), masked_model(dtype=torch.float64)
    companion = engine.info().draft_engine
    assert companion is not None
    runner, counts = companion(draft).runner, list[int]()
    forward = runner.forward
    monkeypatch.setattr(runner, "prefill_chunk", 30, raising=False)
    monkeypatch.setattr(runner, "forward", lambda chunks, cache: counts.append(len(chunks)) or forward(chunks, cache))
    prompts = [*PROMPTS, prompt(20, 3)]
    found = engine.generate(prompts, method=DEER(draft, length=K), max_new_tokens=NEW)
    assert {1, 2} <= {*counts}
    assert [one.tokens for one in found] == [one.tokens for one in engine.generate(prompts, max_new_tokens=NEW)]


def test_what_does_not_fit_is_refused() -> None:
    engine, masked = home(), masked_model()
    before = fingerprint(masked)
    cases: list[tuple[Method, str]] = [
        (DEER(tiny("llama")), "deer with .* as its draft: it writes from left to right.*or use draft_model"),
        (DEER(tiny("hybrid", mask_token_id=MASK)), "deer with .* as its draft: its sliding windows"),
        (DEER(), "deer has no draft model; give draft"),
        (DEER(masked_model(vocab_size=98)), "has 98 tokens and the model 97"),
        (DEER(masked_model(max_position_embeddings=20)), "up to 24 tokens.*context is 20"),
        *((made(draft=masked), "as its draft: it is a masked-diffusion model.*or use deer")
          for made in (DraftModel, FoReaL, Auto)),
    ]
    for method, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompt(10), method=method, max_new_tokens=NEW)
    with pytest.raises(Unsupported, match="deer with a masked-diffusion model"):
        engine_for(masked).generate(prompt(10), method=DEER(masked))
    for length in (0, 65):
        with pytest.raises(ValueError, match=f"length is {length}; it must be 1 to 64 tokens"):
            DEER(masked, length=length)
    engine.generate(prompt(10), method=DEER(masked), max_new_tokens=3)
    assert fingerprint(masked) == before


def test_the_pair_that_ships() -> None:
    """Most tokens of an answer that follows from the prompt are guessed right, and no guess changes the answer."""
    engine = shoal.load(str(HUB / "shoal-canvas-twin"), dtype="float32")
    prompts = ["copy : ann bob cid dee =", "reverse : ann bob cid dee =", "shuffle : ann bob cid dee ="]
    plain = engine.generate(prompts, max_new_tokens=5)
    found = engine.generate(prompts, method=DEER(str(HUB / "shoal-canvas")), max_new_tokens=5)
    assert [one.text for one in found] == [one.text for one in plain]
    assert [one.text for one in plain[:2]] == ["ann bob cid dee", "dee cid bob ann"]
    assert found[0].stats.target_forwards == found[1].stats.target_forwards == 2
