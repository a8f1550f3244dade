"""The oracle is right where something simpler can tell: the plain forward, surgery on a copy, generate."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from families import FAMILIES, VOCAB, fingerprint, tiny
from oracle import decoder_layers, greedy_under_plan, hf_greedy, layer_calls, prefix_counts, prefix_oracle, sublayers
from shoal.depth.plan import NEVER, DepthPlan

LENGTH = 14


def some_ids(length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits[0]


def gap(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


def test_full_counts_are_the_plain_forward(model: PreTrainedModel) -> None:
    ids, full = some_ids(), [LENGTH] * len(decoder_layers(model))
    assert gap(prefix_oracle(model, ids, full, full), plain(model, ids)) <= 1e-12


@pytest.mark.parametrize("dropped", [0, 3, 5])
def test_a_layer_without_positions_is_a_removed_layer(model: PreTrainedModel, dropped: int) -> None:
    ids, counts = some_ids(), [LENGTH] * 6
    counts[dropped] = 0
    cut = prefix_oracle(model, ids, counts)
    assert gap(cut, plain(_without_layer(model, dropped), ids)) <= 1e-12
    assert gap(cut, plain(model, ids)) > 1e-3


def _without_layer(model: PreTrainedModel, index: int) -> PreTrainedModel:
    copied, wrapped = copy.deepcopy(model), _returns_tuple(model)
    decoder_layers(copied)[index].forward = lambda hidden, *_, **__: (hidden,) if wrapped else hidden
    return copied


def _returns_tuple(model: PreTrainedModel) -> bool:
    seen = []
    handle = decoder_layers(model)[0].register_forward_hook(lambda _m, _a, output: seen.append(output))
    plain(model, some_ids(2))
    handle.remove()
    return isinstance(seen[0], tuple)


@pytest.mark.parametrize("part", [0, 1])
def test_a_sublayer_without_positions_is_one_with_zero_weights(model: PreTrainedModel, part: int) -> None:
    ids, counts = some_ids(), [[LENGTH] * 6, [LENGTH] * 6]
    counts[part][2] = 0
    copied = copy.deepcopy(model)
    _zero_last_projection(sublayers(decoder_layers(copied)[2])[part])
    cut = prefix_oracle(model, ids, *counts)
    assert gap(cut, plain(copied, ids)) <= 1e-12
    assert gap(cut, plain(model, ids)) > 1e-3


def _zero_last_projection(module: nn.Module) -> None:
    last = ("o_proj", "out_proj", "c_proj", "dense", "down_proj", "dense_4h_to_h")
    named = [value for name, value in module.named_parameters() if not {*last}.isdisjoint(name.split("."))]
    for value in named or module.parameters(recurse=False):
        value.zero_()


def test_positions_before_the_drop_do_not_notice_it(model: PreTrainedModel) -> None:
    ids, counts = some_ids(), [LENGTH, 9, LENGTH, 6, 9, LENGTH]
    cut, whole = prefix_oracle(model, ids, counts), plain(model, ids)
    assert gap(cut[:6], whole[:6]) <= 1e-12
    assert (cut[6:] - whole[6:]).abs().amax(dim=1).min() > 1e-4


def test_what_runs_ignores_what_does_not(model: PreTrainedModel) -> None:
    """The defining property: a layer's processed prefix is computed as if nothing came after it."""
    counts = [LENGTH, 9, LENGTH, 6, 9, LENGTH]
    ids, inputs = some_ids(), _layer_outputs(model, some_ids(), counts)
    short = _layer_outputs(model, ids[:, :9], [min(9, count) for count in counts])
    for longer, shorter in zip(inputs, short, strict=True):
        assert gap(longer[:, :9], shorter) <= 1e-12


def _layer_outputs(model: PreTrainedModel, ids: Tensor, counts: list[int]) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [layer.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
               for layer in decoder_layers(model)]
    try:
        prefix_oracle(model, ids, counts)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def test_counts_of_a_plan() -> None:
    drops = [NEVER, 1, 2, 4]
    assert prefix_counts(drops, prompt=5, length=5) == [5, 5, 5, 5]
    assert prefix_counts(drops, prompt=5, length=6) == [6, 5, 6, 6]
    assert prefix_counts(drops, prompt=5, length=10) == [10, 5, 6, 8]


def test_a_full_plan_is_generate(model: PreTrainedModel) -> None:
    prompts = [some_ids(length, seed=length)[0].tolist() for length in (1, 9)]
    expected = hf_greedy(model, prompts, max_new_tokens=12)
    assert [len(row) for row in expected] == [12, 12]
    for prompt, row in zip(prompts, expected, strict=True):
        assert greedy_under_plan(model, prompt, DepthPlan.full(6), 12)[0] == row


def test_a_shallow_plan_changes_only_what_it_should(llama: PreTrainedModel) -> None:
    prompt = some_ids(7)[0].tolist()
    plan = DepthPlan.whole_layers((NEVER, NEVER, 3, 5, NEVER, NEVER))
    tokens, logits = greedy_under_plan(llama, prompt, plan, 8)
    reference = plain(llama, torch.tensor([prompt + tokens]))[6:-1]
    assert gap(logits[:3], reference[:3]) <= 1e-12
    assert (logits[3:] - reference[3:]).abs().amax(dim=1).min() > 1e-4


def test_a_split_plan_differs_from_both_whole_ones(llama: PreTrainedModel) -> None:
    prompt, drop, keep = some_ids(7)[0].tolist(), (NEVER, NEVER, 2, NEVER, NEVER, NEVER), (NEVER,) * 6
    logits = [greedy_under_plan(llama, prompt, plan, 4)[1][2]
              for plan in (DepthPlan(drop, keep), DepthPlan(keep, drop), DepthPlan(drop, drop), DepthPlan(keep, keep))]
    assert all(gap(logits[i], logits[j]) > 1e-4 for i in range(4) for j in range(i))


def test_hf_greedy_does_not_stop_at_eos() -> None:
    model = tiny("llama")
    prompt = some_ids(5)[0].tolist()
    tokens = hf_greedy(model, [prompt], 10)[0]
    stopping = copy.deepcopy(model)
    stopping.generation_config.eos_token_id = tokens[3]
    assert hf_greedy(stopping, [prompt], 10)[0] == tokens


def test_layer_calls_counts_calls_and_rows(model: PreTrainedModel) -> None:
    ids = torch.cat([some_ids(5, seed=1), some_ids(5, seed=2)])
    with layer_calls(model) as counted, torch.no_grad():
        model(ids, use_cache=False)
        model(ids[:1, :3], use_cache=False)
    assert counted.calls == [2] * 6
    assert counted.rows == counted.attention_rows == counted.mlp_rows == [13] * 6


def test_hooks_are_gone_after_an_error(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    with pytest.raises(IndexError), layer_calls(model):
        prefix_oracle(model, torch.tensor([[VOCAB + 5]]), [1] * 6, [0] * 6)
    assert fingerprint(model) == before


def test_bad_ids_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="must be"):
        prefix_oracle(llama, torch.zeros(2, 3, dtype=torch.long), [3] * 6)


def test_every_family_has_one_list_of_layers() -> None:
    for name in FAMILIES:
        assert len(decoder_layers(tiny(name))) == 6
