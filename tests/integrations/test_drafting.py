"""Methods that draft, under `generate`: one forward may give several tokens, and nothing else may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig

from drafts import draft_of
from families import VOCAB
from generate_calls import PROMPTS, an_eos, batch, generate, single
from method_matrix import drafting_of_lab
from shoal import Unsupported
from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer, StepReport
from shoal.depth.plan import DepthPlan
from shoal.methods.aded import ADED
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Foretell(Drafter, Proposer):
    """Proposes a sequence's own answer, with every fourth token wrong."""

    answers: tuple[tuple[int, ...], ...]

    def begin(self, runner: Any, cache: Any) -> Foretell:
        return self

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        return [TokenTree.chain([seq.tokens[-1], *self._guess(seq)]) for seq in seqs]

    def _guess(self, seq: SequenceState) -> list[int]:
        answer = self.answers[seq.number]
        places = range(seq.emitted, min(seq.emitted + 3, len(answer)))
        return [(answer[i] + (i % 4 == 3)) % VOCAB for i in places]

    def observe(self, report: StepReport) -> None:
        left_over.extend(len(tree) - len(outcome.path) for _, tree, outcome in report.guessed())


left_over: list[int] = []
"""Guesses of each draft that were not kept."""


@dataclass(frozen=True)
class Drafting(Method):
    """Full depth, with a given proposer."""

    name: ClassVar[str] = "drafting"
    answers: tuple[tuple[int, ...], ...]

    def recipe(self, info: ModelInfo) -> Recipe:
        return Recipe(DepthPlan.full(info.num_layers), proposer=Foretell(self.answers))


def _drafting(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Outputs without and with drafts, of which some are accepted and some are not."""
    torch.manual_seed(3)
    plain = generate(model, **inputs, **options, custom_generate=Full())
    ids = plain if isinstance(plain, torch.Tensor) else plain.sequences
    answers = tuple(tuple(seq[inputs["input_ids"].shape[1] :].tolist()) for seq in ids)
    left_over.clear()
    torch.manual_seed(3)
    drafted = generate(model, **inputs, **options, custom_generate=Drafting(answers))
    assert 0 in left_over and max(left_over) > 0
    return plain, drafted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "top_k": 20},
        {"min_new_tokens": 9},
    ],
    ids=str,
)
def test_drafts_change_no_token(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    eos = [an_eos(llama, 1, 6), an_eos(llama, 2, 9)]
    plain, drafted = _drafting(llama, batch(), eos_token_id=eos, max_new_tokens=24, **options)
    assert torch.equal(plain, drafted)


def test_scores_are_those_of_the_kept_tokens(llama: PreTrainedModel) -> None:
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    plain, drafted = _drafting(
        llama, batch(), eos_token_id=an_eos(llama, 1, 6), max_new_tokens=24, repetition_penalty=1.2, **wanted
    )
    assert len(plain.scores) == len(drafted.scores) == drafted.sequences.shape[1] - len(PROMPTS[0])
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(getattr(plain, name)), torch.stack(getattr(drafted, name)))


def test_criteria_see_each_token_of_a_block_with_its_scores(llama: PreTrainedModel) -> None:
    seen: list[tuple[int, int]] = []

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        seen.append((ids.shape[1], len(scores)))
        return ids[:, -1] == stop

    stop = an_eos(llama, 0, 6)
    wanted = {"output_scores": True, "return_dict_in_generate": True, "stopping_criteria": [criterion]}
    plain, drafted = _drafting(llama, single(), max_new_tokens=24, **wanted)
    assert torch.equal(plain.sequences, drafted.sequences) and drafted.sequences[0, -1] == stop
    half = len(seen) // 2
    assert seen[:half] == seen[half:] and all(length - scores == len(PROMPTS[0]) for length, scores in seen)


def test_a_streamer_gets_the_tokens_of_a_block_one_by_one(llama: PreTrainedModel) -> None:
    puts: list[list[int]] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            puts.append(value.flatten().tolist())

        def end(self) -> None:
            puts.append([])

    plain, _ = _drafting(llama, single())
    answer = plain[0, len(PROMPTS[0]) :].tolist()
    generate(llama, **single(), custom_generate=Drafting((tuple(answer),)).bind(streamer=Streamer()))
    assert puts == [list(PROMPTS[0]), *([token] for token in answer), []]


def test_a_watermark_that_counts_its_calls_is_refused(llama: PreTrainedModel) -> None:
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 14, 15])
    with pytest.raises(Unsupported, match="SynthID"):
        generate(llama, **single(), watermarking_config=config, custom_generate=Drafting(((1, 2, 3),)))


METHODS = {
    "auto": Auto(),
    "prompt_lookup": PromptLookup(min_ngram=1),
    "aded": ADED(),
    "draft_model": DraftModel(draft_of("llama")),
    **drafting_of_lab(draft_of("llama")),
}


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 20}], ids=str)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_generate_gives_the_same_ids(llama: PreTrainedModel, method: Method, options: dict[str, Any]) -> None:
    options = {"eos_token_id": [an_eos(llama, 1, 6)], "max_new_tokens": 24, **options}
    torch.manual_seed(3)
    inner = getattr(method, "inner", None)  # what a wrapped method's drafts are checked by
    plain = generate(llama, **batch(), **options, custom_generate=inner or Full())
    torch.manual_seed(3)
    assert torch.equal(generate(llama, **batch(), **options, custom_generate=method), plain)
    if inner is None and not options.get("do_sample"):
        assert torch.equal(generate(llama, **batch(), **options), plain)
