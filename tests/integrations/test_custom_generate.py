from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation import MaxLengthCriteria, MaxTimeCriteria

import seers
import shoal
from families import FAMILIES, _build, fingerprint, tiny
from generate_calls import PAD, PROMPTS, an_eos, batch, both, cache_name, generate, single
from oracle import greedy_under_plan
from shoal import D3, EarlyExit, Unsupported
from shoal.integrations import hub
from shoal.integrations import transformers as adapter
from shoal.integrations._sequences import Ending, left_padding
from shoal.methods.full import Full


def test_one_prompt_gives_the_same_ids_in_every_family(model: PreTrainedModel) -> None:
    theirs, ours = both(model, **single())
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3", "hybrid", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_padded_batch_gives_the_same_tensor(family: str, dtype: torch.dtype) -> None:
    theirs, ours = both(tiny(family, dtype=dtype), **batch(), max_new_tokens=14)
    assert torch.equal(theirs, ours)
    assert ours.dtype == theirs.dtype and ours.shape == (3, len(PROMPTS[0]) + 14)


def test_rows_that_end_early_are_filled_with_the_pad_id(llama: PreTrainedModel) -> None:
    eos = [an_eos(llama, 1, 4), an_eos(llama, 2, 7)]
    theirs, ours = both(llama, **batch(), eos_token_id=eos, pad_token_id=93)
    assert torch.equal(theirs, ours)
    ends = (ours[:, len(PROMPTS[0]) :] != 93).sum(1)
    assert len(set(ends.tolist())) > 1, "no row ended before another"


def test_the_batch_shrinks_to_the_longest_answer(llama: PreTrainedModel) -> None:
    theirs, ours = both(llama, **single(1), eos_token_id=an_eos(llama, 1, 4))
    assert torch.equal(theirs, ours) and ours.shape[1] == len(PROMPTS[1]) + 5


def test_without_a_mask_padding_is_told_by_the_pad_id(llama: PreTrainedModel) -> None:
    inputs = batch()
    with_mask = generate(llama, **inputs, custom_generate=Full())
    theirs, ours = both(llama, input_ids=inputs["input_ids"], eos_token_id=95)
    assert torch.equal(theirs, ours)
    assert torch.equal(with_mask, ours)


def test_a_method_decodes_under_its_plan(llama: PreTrainedModel) -> None:
    method = D3(alpha=0.9)
    ours = generate(llama, **batch(), custom_generate=method)
    engine = shoal.load(llama)
    for row, prompt in enumerate(PROMPTS):
        plan = engine.recipe(method, 12).plan
        tokens, _ = greedy_under_plan(llama, list(prompt), plan, 12)
        assert ours[row, len(PROMPTS[0]) :].tolist() == tokens
    assert not torch.equal(ours, generate(llama, **batch()))


def test_max_new_tokens_is_the_horizon_of_the_schedule(llama: PreTrainedModel) -> None:
    engine, method = shoal.load(llama), D3(alpha=0.9, start=0.5)
    assert engine.plan(method, max_new_tokens=40)[:20] != engine.plan(method, max_new_tokens=20)
    for tokens in (20, 40):
        ours = generate(llama, **single(), custom_generate=method, max_new_tokens=tokens)
        expected = engine.generate(list(PROMPTS[0]), method=method, max_new_tokens=tokens)
        assert ours[0, len(PROMPTS[0]) :].tolist() == list(expected.tokens)


@pytest.mark.parametrize(
    ("mask", "hint"),
    [([[1, 1, 1, 1, 0]], "left"), ([[1, 1, 0, 1, 1]], "row 0"), ([[0, 1, 1, 0, 1]], "hides")],
)
def test_padding_that_is_not_on_the_left_is_refused(llama: PreTrainedModel, mask: Any, hint: str) -> None:
    inputs = {"input_ids": torch.tensor([[3, 4, 5, 6, 7]]), "attention_mask": torch.tensor(mask)}
    with pytest.raises(Unsupported, match=hint):
        generate(llama, **inputs, custom_generate=Full())


def test_a_prompt_of_padding_alone_is_refused(llama: PreTrainedModel) -> None:
    inputs = {"input_ids": torch.tensor([[3, 4], [5, 6]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])}
    with pytest.raises(ValueError, match="empty"):
        generate(llama, **inputs, custom_generate=Full())


def test_a_mask_that_is_longer_than_the_prompt_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(Unsupported, match=r"\(1, 6\)"):
        left_padding(torch.tensor([[3, 4, 5]]), {"attention_mask": torch.ones(1, 6)})


def test_a_cache_of_the_callers_is_refused(llama: PreTrainedModel) -> None:
    cache = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(torch.tensor([[3, 4, 5]]), **{cache_name(llama): cache})
    with pytest.raises(Unsupported, match="(past_key_values|cache) of your own.*session"):
        name = cache_name(llama)
        generate(llama, input_ids=torch.tensor([[3, 4, 5, 6]]), **{name: cache}, custom_generate=Full())
    assert cache.get_seq_length() == 3
    cache._is_user_defined = False
    with pytest.raises(Unsupported, match="DynamicCache"):
        left_padding(torch.tensor([[3]]), {"past_key_values": cache})


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params", "whatever_comes_next"])
def test_the_cache_that_transformers_hands_over_is_known_by_what_it_does(llama: PreTrainedModel, name: str) -> None:
    """Its name differs between releases; if transformers marks it as the caller's, it is refused even if empty."""
    cache = DynamicCache(config=llama.config)
    assert left_padding(torch.tensor([[3]]), {name: cache}) == [0]
    cache._is_user_defined = True
    with pytest.raises(Unsupported, match=f"{name} of your own"):
        left_padding(torch.tensor([[3]]), {name: cache})


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_what_is_no_cache_is_refused_in_its_place(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"{name} of your own \(tuple\)"):
        left_padding(torch.tensor([[3]]), {name: ((torch.zeros(1, 2, 3, 4),) * 2,)})


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([3, 4]), r"shape \(2,\) and dtype int64.*\[rows, tokens\].*input_ids\[None\]"),
        (torch.tensor(3), r"shape \(\)"),
        (torch.tensor([[[3, 4]]]), r"shape \(1, 1, 2\)"),
        (torch.tensor([[0.5, 4]]), r"shape \(1, 2\) and dtype float32"),
        ([[3, 4]], "input_ids are a list; they must be a tensor"),
    ],
)
def test_ids_that_are_no_rows_of_tokens(llama: PreTrainedModel, ids: Any, words: str) -> None:
    """Transformers fails on most of these before it calls a method; given to a method, they are named."""
    with pytest.raises(ValueError, match=words):
        Full()(llama, ids, generation_config=llama.generation_config)
    with pytest.raises(ValueError, match=words):
        hub.generate(llama, ids)
    with pytest.raises(ValueError, match=words):
        hub.generate(llama, input_ids=ids)


def test_a_static_cache_is_refused() -> None:
    model = _build("llama", 0, torch.float64, 2, {})
    with pytest.raises(Unsupported, match="cache_implementation"):
        generate(model, **single(), cache_implementation="static", custom_generate=Full())
    with pytest.raises(Unsupported, match="StaticCache"):
        cache = StaticCache(config=model.config, max_cache_len=32)
        cache._is_user_defined = True
        generate(model, **single(), **{cache_name(model): cache}, custom_generate=Full())


def test_embeddings_and_unknown_model_arguments_are_refused(llama: PreTrainedModel) -> None:
    embeds = llama.get_input_embeddings()(single()["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds"):
        generate(llama, inputs_embeds=embeds, custom_generate=Full())
    with pytest.raises(Unsupported, match="token_type_ids"):
        generate(tiny("gpt2"), **single(), token_type_ids=torch.zeros(1, 8).long(), custom_generate=Full())


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_pictures_are_refused_with_the_way_that_works(kind: str) -> None:
    model, processor = seers.seer(kind)
    inputs = seers.inputs_of(processor, seers.asked(seers.picture(1), "What?"), [seers.picture(1)])
    with pytest.raises(Unsupported, match=r'pictures in model.generate: .* Give the chat.*"type": "image_url"'):
        model.generate(**inputs, custom_generate=Full(), max_new_tokens=2)


def test_positions_are_taken_if_they_are_the_usual_ones(llama: PreTrainedModel) -> None:
    inputs = batch()
    usual = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = generate(llama, **inputs, custom_generate=Full())
    assert torch.equal(generate(llama, **inputs, position_ids=usual, custom_generate=Full()), expected)
    with pytest.raises(Unsupported, match="position_ids"):
        generate(llama, **inputs, position_ids=usual + 1, custom_generate=Full())


def test_use_cache_does_not_matter(llama: PreTrainedModel) -> None:
    theirs, ours = both(llama, **batch(), use_cache=False)
    assert torch.equal(theirs, ours)


def test_a_direct_call_says_how_to_call(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="model.generate"):
        Full()(llama, torch.tensor([[1, 2]]))


def test_training_mode_is_refused_though_the_engine_is_known(llama: PreTrainedModel) -> None:
    generate(llama, **single(), custom_generate=Full())
    llama.train()
    try:
        with pytest.raises(Unsupported, match="eval"):
            generate(llama, **single(), custom_generate=Full())
    finally:
        llama.eval()


def test_stopping_criteria_see_one_row_with_its_padding(llama: PreTrainedModel) -> None:
    seen: list[tuple[int, ...]] = []

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        seen.append(tuple(ids.shape))
        return torch.full((ids.shape[0],), int(ids[0, -1]) == stop, dtype=torch.bool)

    stop = an_eos(llama, 1, 3)
    ours = generate(llama, **batch(), stopping_criteria=[criterion], custom_generate=Full(), eos_token_id=96)
    answer = ours[1, len(PROMPTS[0]) :].tolist()
    assert answer.index(stop) == 3 and set(answer[4:]) == {PAD}
    assert {rows for rows, _ in seen} == {1} and min(length for _, length in seen) == len(PROMPTS[0]) + 1


def test_criteria_that_look_at_every_row_end_rows_as_in_transformers(llama: PreTrainedModel) -> None:
    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids[:, -1] % 7 == 3

    theirs, ours = both(llama, **batch(), stopping_criteria=[criterion], eos_token_id=96, max_new_tokens=30)
    assert torch.equal(theirs, ours) and ours.shape[1] < len(PROMPTS[0]) + 30


def test_criteria_get_the_scores_that_were_asked_for(llama: PreTrainedModel) -> None:
    def confident(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return scores[-1].softmax(-1).amax(-1) > 0.5

    options = {"stopping_criteria": [confident], "output_scores": True, "return_dict_in_generate": True}
    theirs, ours = both(llama, **single(), eos_token_id=96, max_new_tokens=40, **options)
    assert torch.equal(theirs.sequences, ours.sequences) and len(ours.scores) < 40


def test_lengths_and_times_of_ones_own_criteria(llama: PreTrainedModel) -> None:
    for criterion in (MaxLengthCriteria(11), MaxLengthCriteria(3), MaxTimeCriteria(0.0)):
        theirs, ours = both(llama, **single(), stopping_criteria=[criterion])
        assert torch.equal(theirs, ours)


def test_criteria_for_several_rows_need_a_pad_id(llama: PreTrainedModel) -> None:
    with pytest.raises(Unsupported, match="pad_token_id"):
        generate(llama, **batch(), pad_token_id=None, max_time=9.0, custom_generate=Full())
    generate(llama, **batch(), pad_token_id=None, custom_generate=Full())


def test_beyond_the_context_decoding_goes_on_as_in_transformers() -> None:
    model = tiny("llama", max_position_embeddings=12)
    theirs, ours = both(model, **single(), max_new_tokens=8)
    assert torch.equal(theirs, ours)


def test_the_criterion_that_warns_beyond_the_context_is_called() -> None:
    warns = MaxLengthCriteria(16, max_position_embeddings=12)
    assert Ending.of([warns], None, 8) == Ending(frozenset(), 8, (warns,))
    assert Ending.of([MaxLengthCriteria(12, max_position_embeddings=12)], None, 8).criteria == ()


def test_scores_and_logits_are_returned(llama: PreTrainedModel) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    eos = an_eos(llama, 1, 4)
    theirs, ours = both(llama, **batch(), repetition_penalty=1.5, eos_token_id=eos, **wanted)
    assert torch.equal(theirs.sequences, ours.sequences)
    assert type(ours) is type(theirs) and getattr(ours, cache_name(llama)) is None
    alive = torch.ones(3, dtype=torch.bool)
    for step, token in enumerate(ours.sequences[:, len(PROMPTS[0]) :].T):
        for name in ("scores", "logits"):
            mine, his = getattr(ours, name)[step], getattr(theirs, name)[step]
            assert mine.shape == his.shape and mine.dtype == his.dtype
            torch.testing.assert_close(mine[alive], his[alive], rtol=1e-6, atol=1e-6)
            assert not mine[~alive].any()
        alive &= token != eos
    assert not alive.all()


def test_a_record_without_scores(llama: PreTrainedModel) -> None:
    ours = generate(llama, **batch(), return_dict_in_generate=True, custom_generate=Full())
    assert ours.scores is None and ours.logits is None
    assert torch.equal(ours.sequences, generate(llama, **batch()))


def test_the_seed_is_torchs(llama: PreTrainedModel) -> None:
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return generate(llama, **batch(), do_sample=True, custom_generate=Full())

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    torch.manual_seed(1)
    first, second = (generate(llama, **single(), do_sample=True, custom_generate=Full()) for _ in range(2))
    assert not torch.equal(first, second)


def test_greedy_decoding_leaves_the_generator_alone(llama: PreTrainedModel) -> None:
    before = torch.random.get_rng_state()
    generate(llama, **single(), custom_generate=Full())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_the_law_of_samples_is_that_of_the_scores(llama: PreTrainedModel) -> None:
    from scipy.stats import chisquare

    options = {"do_sample": True, "temperature": 1.3, "top_k": 5, "max_new_tokens": 1, "num_return_sequences": 4000}
    out = generate(
        llama, **single(), **options, return_dict_in_generate=True, output_scores=True, custom_generate=Full()
    )
    probs = out.scores[0][0].double().softmax(-1)
    counts = torch.bincount(out.sequences[:, -1], minlength=probs.numel())
    assert not counts[probs == 0].any()
    kept = probs > 0
    assert kept.sum() == 5 and chisquare(counts[kept], 4000 * probs[kept]).pvalue > 1e-4


def test_temperature_is_applied_once(llama: PreTrainedModel) -> None:
    out = generate(
        llama, **single(), do_sample=True, temperature=0.25, top_k=0, max_new_tokens=1, output_scores=True,
        output_logits=True, return_dict_in_generate=True, custom_generate=Full(),
    )
    torch.testing.assert_close(out.scores[0], out.logits[0] / 0.25)


def test_the_engine_is_made_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("llama", 0, torch.float64, 2, {})
    made: list[Any] = []
    engine_for = adapter.engine_for
    monkeypatch.setattr(adapter, "engine_for", lambda *a, **k: made.append(a) or engine_for(*a, **k))
    for _ in range(3):
        generate(model, **single(), custom_generate=Full())
    assert len(made) == 1
    model.float()
    generate(model, **single(), custom_generate=Full())
    assert len(made) == 2, "the engine of the fp64 model was used for the fp32 model"


def test_an_exchanged_layer_is_noticed() -> None:
    model = _build("llama", 0, torch.float64, 3, {})
    generate(model, **single(), custom_generate=Full())
    other = _build("llama", 1, torch.float64, 3, {})
    model.model.layers[1] = other.model.layers[1]
    theirs, ours = both(model, **single())
    assert torch.equal(theirs, ours)


def test_a_model_is_freed_with_its_engine() -> None:
    model = _build("llama", 0, torch.float64, 2, {})
    generate(model, **single(), custom_generate=D3(alpha=0.9))
    known = len(adapter._ENGINES)
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None and len(adapter._ENGINES) == known - 1


def test_a_processor_that_raises_leaves_model_and_engine_as_they_were(llama: PreTrainedModel) -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(PROMPTS[0]) + 3:
            raise RuntimeError("broken")
        return scores

    before = fingerprint(llama)
    with pytest.raises(RuntimeError, match="broken"):
        generate(llama, **batch(), logits_processor=[broken], custom_generate=D3(alpha=0.8))
    assert fingerprint(llama) == before
    theirs, ours = both(llama, **batch())
    assert torch.equal(theirs, ours)


def test_threads_do_not_disturb_each_other(llama: PreTrainedModel) -> None:
    methods = [Full(), D3(alpha=0.9), EarlyExit(3), D3(alpha=0.8)]
    alone = [generate(llama, **batch(), max_new_tokens=20, custom_generate=m) for m in methods]
    together: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        together[index] = generate(llama, **batch(), max_new_tokens=20, custom_generate=methods[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(methods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(alone[i], together[i]) for i in range(len(methods)))


def test_threads_that_come_first_share_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("llama", 0, torch.float64, 2, {})
    made: list[Any] = []
    engine_for = adapter.engine_for
    monkeypatch.setattr(adapter, "engine_for", lambda *a, **k: made.append(a) or engine_for(*a, **k))
    threads = [
        threading.Thread(target=generate, args=(model,), kwargs={**single(), "custom_generate": Full()})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_other_models_are_told_from_each_other() -> None:
    assert {"llama", "gpt2"} <= set(FAMILIES)
    for family in ("llama", "gpt2", "llama"):
        theirs, ours = both(tiny(family), **single())
        assert torch.equal(theirs, ours)


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = LongT5ForConditionalGeneration(LongT5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(Unsupported):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, custom_generate=Full())
