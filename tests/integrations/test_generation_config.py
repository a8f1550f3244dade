from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import PrefixConstrainedLogitsProcessor

from families import VOCAB, tiny
from generate_calls import PROMPTS, an_eos, batch, both, generate, single
from shoal import D3, Unsupported
from shoal.integrations import generation_config as table
from shoal.integrations._sequences import SequenceProcessors
from shoal.integrations.generation_config import HONOURED, MEANINGLESS, check
from shoal.methods.full import Full

REFUSED: dict[str, list[Any]] = {
    "num_beams": [2],
    "use_mtp": [True],
    "cache_implementation": ["static", "offloaded", "offloaded_static", "quantized"],
    "token_healing": [True],
    "guidance_scale": [1.5, 0.5],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "is_assistant": [True],
    "prompt_lookup_num_tokens": [3],
    "assistant_early_exit": [2],
    "speculation_type": ["dflash"],
    "penalty_alpha": [0.6],
    "dola_layers": ["low"],
    "num_beam_groups": [2],
    "constraints": [[object()]],
    "force_words_ids": [[[1]]],
}
"""Values that ask for something, for each refused field."""

ONE = torch.tensor([[3]])
REPEATING = torch.tensor([[70, 12, 44, 75, 61, 18, 36, 29]])
"""The greedy answer to this repeats tokens of it."""

GREEDY: dict[str, list[dict[str, Any]]] = {
    "max_length": [{"max_length": 12, "max_new_tokens": None}],
    "max_new_tokens": [{"max_new_tokens": 5}],
    "min_length": [{"min_length": 14, "eos": True}],
    "min_new_tokens": [{"min_new_tokens": 9, "eos": True}],
    "max_time": [{"max_time": 0.0, "eos_token_id": 96}],
    "repetition_penalty": [{"repetition_penalty": 1.8}, {"repetition_penalty": 0.6}],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 2.5}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2, "max_new_tokens": 60}],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": 1, "input_ids": REPEATING}],
    "bad_words_ids": [{"bad_words_ids": [[75], [38, 18], [6]], "eos_token_id": 96}],
    "forced_bos_token_id": [{"forced_bos_token_id": 7, "input_ids": ONE}],
    "forced_eos_token_id": [{"forced_eos_token_id": 22}],
    "remove_invalid_values": [{"remove_invalid_values": True, "sequence_bias": {(4,): float("nan")}}],
    "exponential_decay_length_penalty": [{"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 31}],
    "suppress_tokens": [{"suppress_tokens": [48, 18, 6]}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": [48, 75, *range(60)]}],
    "sequence_bias": [{"sequence_bias": {(4,): 5.0, (75, 38): 9.0}}],
    "watermarking_config": [
        {"watermarking_config": WatermarkingConfig(bias=6.0, context_width=2)},
        {"watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash")},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 14, 15, 92, 65])},
    ],
    "pad_token_id": [{"pad_token_id": 94, "eos": True}],
    "eos_token_id": [{"eos": True}],
}
"""For each field that greedy decoding can show: options whose output must be transformers' own."""

SAMPLED: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.3}, {"temperature": 2.0}],
    "top_k": [{"top_k": 7}],
    "top_p": [{"top_p": 0.4}],
    "min_p": [{"min_p": 0.2}],
    "top_h": [{"top_h": 0.4}],
    "typical_p": [{"typical_p": 0.3}],
    "epsilon_cutoff": [{"epsilon_cutoff": 0.02}],
    "eta_cutoff": [{"eta_cutoff": 0.05}],
    "renormalize_logits": [{"renormalize_logits": True}],
}
"""The same by the processed scores of the first token."""

ELSEWHERE = {
    "stop_strings": "test_streaming.py",
    "do_sample": "test_custom_generate.py",
    "output_scores": "test_custom_generate.py",
    "output_logits": "test_custom_generate.py",
    "return_dict_in_generate": "test_custom_generate.py",
    "num_return_sequences": "here",
    "prefill_chunk_size": "here",
    "bos_token_id": "here",
    "_bos_token_tensor": "derived",
    "_eos_token_tensor": "derived",
    "_pad_token_tensor": "derived",
}



def _cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, case, id=f"{name}-{i}") for name, them in table.items() for i, case in enumerate(them)]


def attributes() -> set[str]:
    """All fields of the installed GenerationConfig: set by its constructor, declared, or public in the class."""
    config = GenerationConfig()
    public = {n for n, v in vars(GenerationConfig).items() if not n.startswith("_") and not callable(v)
              and not isinstance(v, classmethod | staticmethod | property)}
    return {*vars(config), *config.to_dict(), *GenerationConfig.__dict__.get("__annotations__", {}), *public}


def test_every_attribute_of_the_installed_version_is_in_the_table() -> None:
    assert attributes() - {*HONOURED, *MEANINGLESS, *table.REFUSED} == set()
    assert len(attributes()) > 60


def test_every_field_is_tested() -> None:
    assert set(table.REFUSED) == set(REFUSED) and all(field.why and field.remedy for field in table.REFUSED.values())
    assert {*GREEDY, *SAMPLED, *ELSEWHERE} == HONOURED and not HONOURED & MEANINGLESS


def test_defaults_pass() -> None:
    check(GenerationConfig())
    config = GenerationConfig()
    config.update(**config._get_default_generation_params())
    check(config)


@pytest.mark.parametrize(("name", "value"), _cases(REFUSED))
def test_what_is_refused(name: str, value: Any) -> None:
    config = GenerationConfig()
    setattr(config, name, value)
    with pytest.raises(Unsupported) as caught:
        check(config)
    assert name in caught.value.what and caught.value.remedy == table.REFUSED[name].remedy
    for neutral in (None, *table.REFUSED[name].neutral):
        setattr(config, name, neutral)
        check(config)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 2},
        {"guidance_scale": 1.5},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True},
        {"cache_implementation": "offloaded"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.1},
        {"force_words_ids": [[4]], "num_beams": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generate_lets_the_refusal_through(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    if "cache_implementation" in options:
        try:
            DynamicCache(config=llama.config, offloading=True)
        except RuntimeError as reason:  # torch for GPUs without their driver
            pytest.skip(f"transformers has no such cache here: {str(reason).splitlines()[0]}")
    with pytest.raises(Unsupported):
        generate(llama, **single(), **options, custom_generate=Full())


def test_token_healing_is_refused_by_whoever_sees_it_first(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        generate(llama, **single(), token_healing=True, custom_generate=Full())


def test_a_field_that_is_new_is_refused_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "HONOURED", HONOURED - {"no_repeat_ngram_size"})
    check(GenerationConfig())
    with pytest.raises(Unsupported, match="newer"):
        check(GenerationConfig(no_repeat_ngram_size=2))


def test_entries_that_transformers_does_not_know_are_left_alone(llama: PreTrainedModel) -> None:
    config = GenerationConfig(chat_format="chatml", max_new_tokens=3)
    check(config)
    theirs, ours = both(llama, **single(), max_new_tokens=3)
    assert torch.equal(theirs, ours)


_FIRST_SCORES = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 1}


def _resolved(model: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
    """Options, with tokens that end some rows early in place of `eos`."""
    options = {**options}
    if options.pop("eos", False):
        options["eos_token_id"] = [an_eos(model, 1, 4), an_eos(model, 2, 2)]
    return options


@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
@pytest.mark.parametrize(("name", "options"), _cases(GREEDY))
def test_what_is_honoured_gives_the_tokens_of_transformers(
    llama: PreTrainedModel, name: str, options: dict[str, Any], padded: bool
) -> None:
    options = _resolved(llama, options)
    inputs = {} if "input_ids" in options else batch() if padded else single(1)
    theirs, ours = both(llama, **copy.deepcopy({**inputs, **options}))
    assert torch.equal(theirs, ours)
    if padded or name != "pad_token_id":
        without = generate(llama, **inputs, **_extra(name, options))
        assert not _equal(without, ours), f"{name} had no effect, so equality shows nothing"


def _extra(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options that a case needs in addition to its own."""
    kept = {"eos_token_id", "input_ids", "max_new_tokens", "sequence_bias"} - {name}
    if name == "max_length":
        kept -= {"max_new_tokens"}
    return {option: value for option, value in options.items() if option in kept}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(("name", "options"), _cases(SAMPLED))
def test_what_shapes_the_law_gives_the_scores_of_transformers(
    llama: PreTrainedModel, name: str, options: dict[str, Any]
) -> None:
    common = {"do_sample": True, "top_k": 0, **_FIRST_SCORES}
    theirs, ours = both(llama, **batch(), **{**common, **options})
    torch.testing.assert_close(theirs.scores[0], ours.scores[0], rtol=1e-6, atol=1e-6)
    plain = generate(llama, **batch(), **common, custom_generate=Full())
    assert not torch.allclose(plain.scores[0], ours.scores[0]), f"{name} had no effect"


def test_the_default_top_k_is_that_of_transformers(llama: PreTrainedModel) -> None:
    _, ours = both(llama, **single(), do_sample=True, **_FIRST_SCORES)
    assert ours.scores[0].isfinite().sum() == 50


def test_the_chunks_of_the_prefill_have_the_size_asked_for(llama: PreTrainedModel) -> None:
    sizes: list[int] = []

    def note(module: Any, args: tuple[torch.Tensor, ...], kwargs: Any) -> None:
        sizes.append(args[0].shape[1])

    expected = generate(llama, **single(), custom_generate=Full(), max_new_tokens=2)
    with_hook = llama.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    try:
        ours = generate(llama, **single(), custom_generate=Full(), prefill_chunk_size=3, max_new_tokens=2)
    finally:
        with_hook.remove()
    assert torch.equal(ours, expected)
    assert sizes == [3, 3, 2, 1]


def test_each_returned_sequence_has_random_numbers_of_its_own(llama: PreTrainedModel) -> None:
    ours = generate(llama, **batch(), do_sample=True, num_return_sequences=3, custom_generate=Full())
    width = len(PROMPTS[0])
    assert ours.shape == (9, width + 12)
    for i, prompt in enumerate(PROMPTS):
        rows = ours[3 * i : 3 * i + 3]
        assert rows[0, width - len(prompt) : width].tolist() == list(prompt)
        assert len({tuple(row.tolist()) for row in rows}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 2.0},
        {"encoder_repetition_penalty": 2.0},
        {"encoder_no_repeat_ngram_size": 1},
        {"prefix_allowed_tokens_fn": lambda _, ids: [int(ids[0]) + 1, int(ids[-1]) % 50 + 30]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_kept_of_each_prompt_finds_its_rows_when_prompts_are_repeated(
    llama: PreTrainedModel, options: dict[str, Any]
) -> None:
    common = {**batch(), **_FIRST_SCORES, **options, "do_sample": True}
    once = generate(llama, **common)
    twice = generate(llama, **common, num_return_sequences=2, custom_generate=Full())
    torch.testing.assert_close(once.scores[0].repeat_interleave(2, 0), twice.scores[0], rtol=1e-6, atol=1e-6)


def test_allowed_tokens_go_by_the_number_that_transformers_gives(llama: PreTrainedModel) -> None:
    """The entry of the output's row, or of the prompt, depending on the release."""
    seen: list[int] = []

    def allowed(number: int, _: torch.Tensor) -> list[int]:
        seen.append(number)
        return [4]

    options = {"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed}
    generate(llama, **batch(), **options)
    theirs = sorted(seen)
    seen.clear()
    generate(llama, **batch(), **options, custom_generate=Full())
    assert sorted(seen) == theirs and set(theirs) in ({*range(6)}, {*range(3)})


@pytest.mark.parametrize("each", [1, 2])
def test_a_number_may_be_of_several_rows(llama: PreTrainedModel, each: int) -> None:
    one = PrefixConstrainedLogitsProcessor(lambda number, _: [10 * number + 10], each)
    inputs = {name: value.repeat_interleave(2, 0) for name, value in batch().items()}
    ids = generate(llama, **inputs, max_new_tokens=1, logits_processor=[one], custom_generate=Full())
    assert ids[:, -1].tolist() == ([10, 10, 20, 20, 30, 30] if each == 2 else [10, 20, 30, 40, 50, 60])


def test_allowed_tokens_may_depend_on_the_row(llama: PreTrainedModel) -> None:
    theirs, ours = both(llama, **batch(), prefix_allowed_tokens_fn=lambda row, ids: range(row * 30, row * 30 + 9))
    assert torch.equal(theirs, ours)


def test_without_a_prompt_the_bos_token_begins(llama: PreTrainedModel) -> None:
    theirs, ours = both(llama, bos_token_id=7)
    assert torch.equal(theirs, ours) and ours[0, 0] == 7


def test_processors_of_ones_own_act_after_those_of_the_configuration(llama: PreTrainedModel) -> None:
    def prefer(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, int(ids[0, -1] + 1) % VOCAB] += 3  # in place, as some do
        return scores

    inputs = {**single(), "repetition_penalty": 1.4, "logits_processor": [prefer]}
    theirs, ours = both(llama, **inputs)
    assert torch.equal(theirs, ours)


def test_classifier_free_guidance_is_refused_as_a_processor_too(llama: PreTrainedModel) -> None:
    from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance

    with pytest.raises(Unsupported, match="guidance"):
        generate(llama, **single(), logits_processor=[Guidance(1.5, llama)], custom_generate=Full())


def test_several_watermarked_rows_are_those_of_single_calls(llama: PreTrainedModel) -> None:
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 14, 15, 92, 65])
    together = generate(llama, **batch(), watermarking_config=config, custom_generate=D3(alpha=0.9))
    width = len(PROMPTS[0])
    for row, prompt in enumerate(PROMPTS):
        alone = generate(llama, **single(row), watermarking_config=config, custom_generate=D3(alpha=0.9))
        assert together[row, width:].tolist() == alone[0, len(prompt) :].tolist()


def test_half_precision_scores_are_processed_in_float32() -> None:
    seen: set[torch.dtype] = set()

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.add(scores.dtype)
        return scores

    generate(tiny("llama", dtype=torch.bfloat16), **single(), logits_processor=[note], custom_generate=Full())
    generate(tiny("llama"), **single(), logits_processor=[note], custom_generate=Full())
    assert seen == {torch.float32}


def test_the_page_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / "docs" / "generation_config.md").read_text(encoding="utf-8")
    _, honoured, refused, meaningless, _ = page.split("\n## ")
    rows = [f"| `{name}` | {', '.join(f'`{value!r}`' for value in (None, *field.neutral))} | {field.why} | "
            f"{field.remedy} |" for name, field in table.REFUSED.items()]
    assert refused.strip().splitlines()[4:] == rows
    for part, names in ((honoured, HONOURED), (meaningless, MEANINGLESS)):
        told = [line.split("`")[1] for line in part.splitlines() if line.startswith("| `")]
        assert sorted(told) == sorted(name for name in names if not name.startswith("_"))


def test_processors_run_where_the_prompt_is() -> None:
    devices: list[str] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        devices.extend([ids.device.type, scores.device.type])
        return scores

    padding = torch.zeros(1, 2, dtype=torch.long, device="meta")
    SequenceProcessors(padding, (note,))(torch.ones(1, 3).long(), torch.ones(1, 9))
    assert devices == ["meta", "meta"]
