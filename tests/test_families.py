"""The tiny models are worth testing with, and a change of one does not go unseen."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from families import FAMILIES, VOCAB, fingerprint, tiny
from oracle import decoder_layers, hf_greedy


def test_greedy_text_is_not_degenerate(model: PreTrainedModel) -> None:
    prompts = [torch.randint(0, VOCAB, (6,), generator=torch.Generator().manual_seed(s)).tolist() for s in range(3)]
    tokens = hf_greedy(model, prompts, 40)
    assert min(len(set(row)) for row in tokens) >= 8
    assert len({row[0] for row in tokens}) > 1
    assert len({tuple(row[-8:]) for row in tokens}) == 3


def test_logits_are_finite_and_neither_flat_nor_saturated(model: PreTrainedModel) -> None:
    ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert logits.isfinite().all() and 0.4 < entropy < 3


def test_models_are_ready_for_tests(model: PreTrainedModel) -> None:
    assert not model.training
    assert model.dtype == torch.float64
    assert model.generation_config.eos_token_id is None
    assert model.config.eos_token_id is None
    dropouts = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert not any(dropouts)


def test_same_seed_same_weights_and_other_seed_other_weights() -> None:
    one, again, other = (tiny("llama", seed=s, layers=2) for s in (7, 7, 8))
    assert one is again
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_building_leaves_the_callers_random_state(family: str) -> None:
    state = torch.get_rng_state()
    tiny(family, seed=123, layers=1)
    assert torch.equal(state, torch.get_rng_state())


def test_dtype_layers_and_overrides_arrive() -> None:
    model = tiny("qwen3", dtype=torch.float32, layers=3, layer_types=["full_attention"] * 3, rope_theta=500.0)
    assert model.dtype == torch.float32 and len(decoder_layers(model)) == 3


def test_windowed_families_differ_from_their_unwindowed_twin() -> None:
    ids = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
    windowed, free = tiny("mistral"), tiny("mistral", sliding_window=None)
    with torch.no_grad():
        difference = (windowed(ids).logits - free(ids).logits).abs().amax(dim=-1)[0]
    assert difference[:8].max() < 1e-12 < 1e-3 < difference[8:].min()


@pytest.mark.parametrize("name", ["hybrid", "gemma2", "gemma3"])
def test_hybrids_mix_both_kinds_of_layers(name: str) -> None:
    kinds = tiny(name).config.layer_types
    assert {kinds.count("sliding_attention"), kinds.count("full_attention")} <= {2, 3, 4}


def test_unknown_family() -> None:
    assert "llama5" not in FAMILIES
    with pytest.raises(KeyError, match="llama5"):
        tiny("llama5")


def test_use_does_not_change_the_fingerprint(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    hf_greedy(model, [[1, 2, 3]], 4)
    assert fingerprint(model) == before


def _tamper_hook(model: PreTrainedModel) -> None:
    decoder_layers(model)[1].register_forward_pre_hook(lambda *_: None)


def _tamper_config(model: PreTrainedModel) -> None:
    model.config.num_hidden_layers = 3


def _tamper_attention(model: PreTrainedModel) -> None:
    model.config._attn_implementation = "eager"


def _tamper_generation(model: PreTrainedModel) -> None:
    model.generation_config.max_new_tokens = 5


def _tamper_weight(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-6


def _tamper_storage(model: PreTrainedModel) -> None:
    weight = model.model.layers[2].mlp.up_proj.weight
    weight.data = weight.data.clone()


def _tamper_list(model: PreTrainedModel) -> None:
    layers = decoder_layers(model)
    layers[0], layers[1] = layers[1], layers[0]


def _tamper_forward(model: PreTrainedModel) -> None:
    decoder_layers(model)[0].forward = lambda *args, **kwargs: args[0]


def _tamper_index(model: PreTrainedModel) -> None:
    decoder_layers(model)[0].self_attn.layer_idx = 4


def _tamper_mode(model: PreTrainedModel) -> None:
    decoder_layers(model)[0].mlp.train()


def _tamper_module(model: PreTrainedModel) -> None:
    mlp = decoder_layers(model)[0].mlp
    mlp.act_fn = copy.deepcopy(mlp.act_fn)


TAMPERINGS = [_tamper_hook, _tamper_config, _tamper_attention, _tamper_generation, _tamper_weight, _tamper_storage,
              _tamper_list, _tamper_forward, _tamper_index, _tamper_mode, _tamper_module]


@pytest.mark.parametrize("tamper", TAMPERINGS)
def test_the_fingerprint_sees(tamper: Callable[[PreTrainedModel], None]) -> None:
    model = copy.deepcopy(tiny("llama"))
    before = fingerprint(model)
    tamper(model)
    assert fingerprint(model) != before
