from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from shoal.decode import sampling as s
from shoal.types import Sampling

V = 12
DTYPES = [torch.float32, torch.float64]


def logits_of(seed: int, dtype: torch.dtype = torch.float32, size: int = V, *, ties: bool = False) -> Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3
    return values.round() if ties else values


def oracle(logits: Tensor, history: Sequence[int], sampling: Sampling) -> Tensor:
    """Transformers' own processors and warpers in the order of its `generate`, then softmax."""
    steps: list[Any] = []
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor([[token for token in history if token < V]], dtype=torch.long)  # older releases take no others
    scores: Tensor = LogitsProcessorList(steps)(ids, logits[None].clone())
    return scores.softmax(-1)[0]


settings_of_a_law = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.5, 0.7, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, V, V + 5]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-12]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=300, deadline=None)
@given(
    sampling=settings_of_a_law,
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    history=st.lists(st.integers(0, V + 2), min_size=1, max_size=9),
)
def test_the_law_is_that_of_transformers(
    dtype: torch.dtype, sampling: Sampling, seed: int, ties: bool, history: list[int]
) -> None:
    logits = logits_of(seed, dtype, ties=ties)
    probs = s.probs_of(s.scores(logits, history, 1, sampling), sampling)
    expected = oracle(logits, history, sampling)
    assert probs.dtype == dtype and probs.shape == (V,)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=3),
        Sampling(1.0, top_p=0.6),
        Sampling(1.0, min_p=0.3),
        Sampling(0.4),
        Sampling(1.0, repetition_penalty=1.5),
        Sampling(1.0, logit_bias={2: 4.0, 5: -2.0}),
    ],
)
def test_each_transform_alone_changes_the_law_as_transformers_does(sampling: Sampling) -> None:
    changed = 0
    for seed in range(50):
        logits = logits_of(seed, ties=seed % 2 == 0)
        probs = s.probs_of(s.scores(logits, [1, 4, 4], 1, sampling), sampling)
        torch.testing.assert_close(probs, oracle(logits, [1, 4, 4], sampling))
        changed += not torch.allclose(probs, logits.softmax(-1))
    assert changed > 40


def test_top_k_keeps_ties() -> None:
    probs = s.probs_of(torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]), Sampling(1.0, top_k=2))
    assert (probs > 0).tolist() == [False, True, True, True, False]


def plain_penalties(logits: Tensor, generated: Sequence[int], presence: float, frequency: float) -> list[float]:
    values = logits.tolist()
    for token in range(len(values)):
        count = sum(1 for other in generated if other == token)
        values[token] -= frequency * count + (presence if count else 0.0)
    return values


@settings(max_examples=200, deadline=None)
@given(
    history=st.lists(st.integers(0, V - 1), max_size=20),
    prompt_len=st.integers(0, 20),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_presence_and_frequency_count_generated_tokens_only(
    history: list[int], prompt_len: int, presence: float, frequency: float
) -> None:
    logits = logits_of(3, torch.float64)
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    got = s.scores(logits, history, prompt_len, sampling)
    assert got.tolist() == pytest.approx(plain_penalties(logits, history[prompt_len:], presence, frequency), abs=1e-12)
    torch.testing.assert_close(got, s.scores(logits, torch.tensor(history, dtype=torch.long), prompt_len, sampling))


def test_the_order_is_bias_repetition_additive_then_processors() -> None:
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 3.0})
    seen: list[tuple[Any, Any]] = []

    def double(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((ids.tolist(), tuple(scores.shape)))
        return scores * 2

    logits = torch.tensor([1.0, -1.0, 4.0])
    got = s.scores(logits, [2, 0, 0], 1, sampling, [double, lambda ids, scores: scores + 1])
    assert got.tolist() == [((1 + 3) / 2 - 0.5 - 2 * 0.25) * 2 + 1, -1.0 * 2 + 1, (4 / 2) * 2 + 1]
    assert seen == [([[2, 0, 0]], (1, 3))]
    assert logits.tolist() == [1.0, -1.0, 4.0]


def test_a_processor_that_writes_in_place_does_not_reach_the_logits() -> None:
    logits = torch.zeros(3)
    assert s.scores(logits, [0], 1, Sampling(), [lambda ids, scores: scores.add_(1)]).tolist() == [1.0] * 3
    assert logits.tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_neutral_scores_are_the_logits_themselves(dtype: torch.dtype) -> None:
    logits = logits_of(1).to(dtype)
    assert s.scores(logits, [1, 2], 1, Sampling(top_k=3, top_p=0.5)) is logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"repetition_penalty": 1.2}, {"logit_bias": {1: 1.0}}, {"top_p": 0.9}])
def test_half_types_are_computed_in_float32(dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits, sampling = logits_of(1).to(dtype), Sampling(0.8, **options)
    probs = s.probs_of(s.scores(logits, [1, 2], 1, sampling), sampling)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, s.probs_of(s.scores(logits.float(), [1, 2], 1, sampling), sampling))
    assert s.logprob(logits, 1, 0) == s.logprob(logits.float(), 1, 0)


@pytest.mark.parametrize("token", [-1, V])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token}; .* 0..{V - 1}"):
        s.scores(logits_of(0), [0], 1, Sampling(logit_bias={token: 1.0}))


def test_a_batch_of_nodes_gets_the_laws_of_its_rows() -> None:
    sampling = Sampling(0.7, top_k=6, top_p=0.8, min_p=0.05, logit_bias={1: 2.0, 3: -1e8})
    batch = torch.stack([logits_of(seed, ties=seed > 3) for seed in range(6)])
    assert not s.needs_history(sampling)
    got = s.probs_of(s.biased(batch, sampling), sampling)
    alone = [s.probs_of(s.scores(row, [0], 1, sampling), sampling) for row in batch]
    torch.testing.assert_close(got, torch.stack(alone))
    assert (got[:, 3] == 0).all()
    assert s.greedy(batch) == [s.argmax(row) for row in batch]


def test_what_needs_the_history() -> None:
    for options in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert s.needs_history(Sampling(**options))
    assert s.needs_history(Sampling(), [lambda ids, scores: scores])
    assert not s.needs_history(Sampling(0.5, 4, 0.9, 0.1, logit_bias={1: 1.0}))


def test_greedy_is_a_law_too_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0])
    assert s.greedy(logits[None]) == [1]
    assert s.probs_of(logits, Sampling(0.0, top_k=1)).tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-45, 1e-300])
def test_a_tiny_temperature_is_the_greedy_law(temperature: float) -> None:
    probs = s.probs_of(logits_of(2) * 10, Sampling(temperature))
    torch.testing.assert_close(probs, s.probs_of(logits_of(2), Sampling(0.0)))


@pytest.mark.slow
def test_uniform_is_reproducible() -> None:
    """Constants from a separate computation with NumPy's uint64; they must never change."""
    assert [s.uniform(*key) for key in KEYS] == CONSTANTS
    code = "from shoal.decode.sampling import uniform; print(repr(uniform(7, 2, 11, 'accept')))"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; {code}"]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    assert float(run.stdout) == s.uniform(7, 2, 11, "accept")


KEYS = [(0, 0, 0, "sample"), (7, 2, 11, "accept"), (2**64 - 1, 1, 0, "draft"), (-1, 1, 0, "draft"), (1, 0, 0, "a" * 9)]
CONSTANTS = [0.9243199664371037, 0.4412604019425509, 0.5956830169918477, 0.5956830169918477, 0.11987866944239367]


def test_uniform_keys_do_not_collide() -> None:
    keys = [
        (seed, row, index, purpose)
        for seed in range(4)
        for row in range(8)
        for index in range(200)
        for purpose in ("sample", "accept", "draft", "draft\0", "")
    ]
    assert len({s.uniform(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("axis", range(4))
def test_uniform_is_uniform_along_each_axis(axis: int) -> None:
    keys: list[list[Any]] = [[5, 3, 2, "sample"] for _ in range(4000)]
    for count, key in enumerate(keys):
        key[axis] = f"p{count}" if axis == 3 else count
    values = [s.uniform(*key) for key in keys]
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    assert abs(stats.pearsonr(values[:-1], values[1:]).statistic) < 0.06
    assert all(0 <= value < 1 for value in values)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_p=0.9), Sampling(1.5, top_k=4)])
def test_draws_follow_the_law(seed: int, sampling: Sampling) -> None:
    probs = s.probs_of(logits_of(seed, size=8) / 3, sampling)
    count = 20_000
    tokens = s.draws(probs.expand(count, -1), [s.uniform(seed, 0, index, "sample") for index in range(count)])
    seen = torch.bincount(torch.tensor(tokens), minlength=8)
    possible = probs > 0
    assert int(seen[~possible].sum()) == 0
    assert (
        stats.chisquare(seen[possible].double(), probs[possible].double() / probs.double().sum() * count).pvalue > 1e-4
    )


def test_the_harness_sees_a_wrong_law() -> None:
    probs = s.probs_of(logits_of(0, size=8) / 3, Sampling(1.0))
    tokens = s.draws(probs.expand(20_000, -1), [s.uniform(0, 0, index, "sample") for index in range(20_000)])
    wrong = s.probs_of(logits_of(0, size=8) / 3, Sampling(1.05)).double()
    assert (
        stats.chisquare(torch.bincount(torch.tensor(tokens), minlength=8), wrong / wrong.sum() * 20_000).pvalue < 1e-4
    )


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-300, 1e-30, 1e-8, 0.1, 1 / 3, 1.0]) | st.floats(0, 1), min_size=1),
    u=st.sampled_from([0.0, 1 - 2**-53, 0.5, 2**-53]) | st.floats(0, 1, exclude_max=True),
    dtype=st.sampled_from(DTYPES),
)
def test_draw_is_the_inverse_cdf_and_never_impossible(weights: list[float], u: float, dtype: torch.dtype) -> None:
    probs = torch.tensor(weights, dtype=dtype)
    if not probs.any():
        with pytest.raises(ValueError, match="no token has a positive probability"):
            s.draw(probs, u)
        return
    token = s.draw(probs, u)
    assert probs[token] > 0
    ends = list(accumulate(map(Fraction, probs.tolist()), initial=Fraction(0)))
    nearly = ends[-1] * Fraction(len(weights), 2**50)
    assert ends[token] - nearly <= Fraction(u) * ends[-1] <= ends[token + 1] + nearly


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000, 4096])
def test_a_draw_over_blocks_finds_the_token_that_a_search_finds(size: int) -> None:
    probs = (logits_of(7, torch.float64, size) * 2).softmax(-1)
    probs[logits_of(8, size=size) < 0.3] = 0
    probs[-1] = 0.25
    us = torch.rand(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.searchsorted(probs.cumsum(-1), us * probs.sum(), right=True)
    assert s.draws(probs.expand(500, -1), us.tolist()) == found.tolist()


def test_draw_is_safe_where_rounding_puts_the_target_at_the_total() -> None:
    probs = torch.tensor([0.0, 5e-324, 0.0], dtype=torch.float64)
    assert s.draw(probs, 1 - 2**-53) == 1


def test_draw_refuses_what_is_no_law() -> None:
    with pytest.raises(ValueError, match="NaN"):
        s.draw(torch.full((4,), torch.nan), 0.5)
    with pytest.raises(ValueError, match="banned"):
        s.draw(s.probs_of(torch.full((4,), -torch.inf), Sampling(1.0)), 0.5)


@pytest.mark.parametrize("top", [0, 1, 3, V, V + 9])
def test_logprob_is_log_softmax_with_the_best_first(top: int) -> None:
    logits = logits_of(9, torch.float64)
    logs = (logits.exp() / logits.exp().sum()).log()
    got = s.logprob(logits, 4, top)
    assert (got.token, got.logprob) == (4, pytest.approx(float(logs[4])))
    best = sorted(range(V), key=lambda token: -float(logs[token]))[:top]
    assert [token for token, _ in got.top] == best
    assert [value for _, value in got.top] == pytest.approx([float(logs[token]) for token in best])


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("temperature", [1.0, 1e-45])
def test_absurd_penalties_still_give_a_law(penalty: float, temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, -float("inf")])
    sampling = Sampling(temperature, repetition_penalty=penalty)
    probs = s.probs_of(s.scores(logits, [0, 1, 3], 2, sampling), sampling)
    assert torch.isfinite(probs).all() and float(probs.sum()) == pytest.approx(1)
    assert probs[3] == 0


@pytest.mark.parametrize("p", [0.05, 0.3, 0.7, 0.95, 0.999])
def test_typical_p_is_that_of_transformers(p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for scale in (0.1, 1.0, 8.0):
        logits = torch.randn(6, 50, generator=generator, dtype=torch.float64) * scale
        logits[:, 7] = -torch.inf
        expected = TypicalLogitsWarper(mass=p)(torch.zeros(6, 1, dtype=torch.long), logits / 0.8).softmax(-1)
        found = s.probs_of(logits, Sampling(temperature=0.8, typical_p=p))
        assert torch.allclose(found, expected, atol=1e-12) and (found > 0).any(-1).all()


def test_a_repetition_penalty_may_look_at_the_last_tokens_alone() -> None:
    logits, ids = torch.tensor([3.0, 2.0, -1.0, 1.0]), [0, 1, 2]
    for window, expected in ((0, [1.5, 1.0, -2.0, 1.0]), (1, [3.0, 2.0, -2.0, 1.0]), (2, [3.0, 1.0, -2.0, 1.0]),
                             (9, [1.5, 1.0, -2.0, 1.0])):
        how = Sampling(repetition_penalty=2.0, repetition_window=window)
        assert s.scores(logits, ids, 3, how).tolist() == expected


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(0.7, min_p=0.05), Sampling(1e-30), Sampling(1.3, 40, .9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_cpu_computes_in_numpy_is_what_torch_says(sampling: Sampling, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1), dtype=dtype) * 4
    logits[:, 7] = -torch.inf
    found = s.probs_of(logits, sampling)
    cut = torch.where(found > 0, logits / max(sampling.temperature, 1e-30), -torch.inf)
    torch.testing.assert_close(found, cut.softmax(-1))
    assert found.dtype == dtype and (found[:, 7] == 0).all()
    for row in range(3):
        assert s.probs_of(logits[row], sampling).equal(found[row])  # the same bits alone
        for u in (0.0, 0.31, 0.999999):
            ends = found[row].double().cumsum(-1)
            token = s.draw(found[row], u)
            assert found[row, token] > 0
            assert ends[token] - found[row, token] - 1e-9 <= u * ends[-1] <= ends[token] + 1e-9
