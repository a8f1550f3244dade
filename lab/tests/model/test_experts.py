"""MLPs in groups of neurons: together they are the whole, some of them the whole with the others closed; refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import BACKENDS, CPU, NATIVE, Backend, on_backends, packed, reference
from drive import gap, prompt, stack_of
from families import tiny
from native_reference import chain_batch
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.experts import ExpertChoice
from shoal.model.kv.cache import KVCache
from shoal.model.packed.linear import Quant
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal_lab.components.experts import NativeExperts, SplitMLPs, group_bytes, split_mlps

LAYERS, FFN, GROUPS = 6, 48, 3
ALL = (1 << GROUPS) - 1
TOKENS = prompt(23, 5)


def neurons(ffn: int = FFN, groups: int = GROUPS, layers: int = LAYERS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randperm(ffn, generator=generator).view(groups, -1) for _ in range(layers)]


def logits(
    runner: ModelRunner, masks: Sequence[Any] | None, mlps: SplitMLPs | None = None, seqs: int = 1,
    tokens: Sequence[int] = TOKENS,
) -> Tensor:
    """Of some tokens in each of some sequences, which run these groups."""
    plan, count = DepthPlan.full(runner.num_layers), len(tokens)
    choice = None if masks is None or mlps is None else ExpertChoice(mlps, masks)
    chunks = [SequenceChunk(seq, tokens, [0] * count, plan, wanted=count, experts=choice) for seq in range(seqs)]
    return runner.forward(chunks, KVCache(runner.windows, seqs))


@on_backends("llama", "gemma", "qwen2", "phi3", "gemma3", "granite")
def test_all_groups_are_the_whole(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    mlps = split_mlps(runner, neurons())
    plain = logits(runner, None)
    assert gap(logits(runner, [(ALL,) * LAYERS] * len(TOKENS), mlps), plain) <= 0.1 * backend.exact
    assert torch.equal(logits(runner, [None] * len(TOKENS), mlps), plain), "None is the whole MLP, bit for bit"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_token_s_groups_do_not_depend_on_its_mates(backend: Backend) -> None:
    runner = backend.runner("llama")
    mlps = split_mlps(runner, neurons())
    draw = torch.randint(0, ALL + 1, (len(TOKENS), LAYERS), generator=torch.Generator().manual_seed(1))
    masks = [None if not line[0] else tuple(max(1, one) for one in line) for line in draw.tolist()]
    alone, together = logits(runner, masks, mlps), logits(runner, masks, mlps, seqs=7)
    assert gap(together.view(7, *alone.shape), alone.expand(7, -1, -1)) <= (0 if backend == NATIVE else backend.exact)


@pytest.mark.parametrize("count", [1, 5, 23])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_kernels_run_groups_without_the_fallback(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few tokens, which run the same, all groups together; of many one after the other."""
    runner = NATIVE.runner(name)
    mlps = split_mlps(runner, neurons())
    masks = [(0b101, 0b010, 0b111, 0b001, 0b110, 0b011)] * count
    fallback = super(NativeRunner, runner).forward  # type: ignore[misc]
    plan = DepthPlan.full(LAYERS)
    chunk = SequenceChunk(0, TOKENS[:count], [0] * count, plan, wanted=count, experts=ExpertChoice(mlps, masks))
    expected = fallback([chunk], KVCache(runner.windows, 1))
    monkeypatch.setattr(SplitMLPs, "__call__", None)
    found = logits(runner, masks, mlps, tokens=TOKENS[:count])
    assert gap(found, expected) <= NATIVE.exact
    mixed = logits(runner, [*masks[:-1], (ALL,) * LAYERS], mlps, tokens=TOKENS[:count])
    assert torch.equal(mixed[:-1], found[:-1]), "one after the other rounds no differently"


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "native"])
def test_groups_of_quantised_matrices_are_quantised(quant: Quant, kernels: bool) -> None:
    model = tiny("llama", dtype=torch.float32, intermediate_size=192, hidden_size=64)
    runner = packed(model, quant, kernels=kernels)
    mlps = split_mlps(runner, neurons(192, 3))
    whole = sum(layer.gate_up.nbytes + layer.down.nbytes for layer in runner.weights.layers)
    assert 0.9 * whole < mlps.nbytes < 1.15 * whole and group_bytes(runner) == whole
    group = mlps.layers[0][1]
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    plain = model.model.layers[0].mlp.up_proj.weight[neurons(192, 3)[0][1]]
    near = group.gate_up(x)[:, 64:]
    assert 0 < gap(near, x @ plain.T) < 0.35 * (x @ plain.T).abs().max()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_copies_take_what_was_said(backend: Backend) -> None:
    """To what a few small matrices are filled up with."""
    runner = backend.runner("llama")
    assert split_mlps(runner, neurons()).nbytes == pytest.approx(group_bytes(runner), rel=0.05)


def test_a_chunk_is_whole_up_to_its_first_token_with_groups() -> None:
    runner = stack_of(reference("llama"))
    mlps, cache = split_mlps(runner, neurons()), KVCache(runner.windows, 1)
    choice = ExpertChoice(mlps, [None, None, (1,) * LAYERS, None])
    chunk = SequenceChunk(0, TOKENS[:4], [0, 0, 1, 2], DepthPlan.full(LAYERS), experts=choice)
    assert chunk.whole == 2 and SequenceChunk(0, TOKENS[:4], [0] * 4, DepthPlan.full(LAYERS)).whole == 4
    runner.forward([chunk], cache)
    cache.commit(0, range(4))
    assert cache.first_shallow(0) == 2


def test_models_without_gated_mlps_and_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Unsupported, match="it has no gated MLP of its own"):
        split_mlps(stack_of(reference("gpt2")), neurons())
    runner = stack_of(reference("llama"))
    twice = [torch.zeros(3, 16, dtype=torch.long)] * LAYERS
    for wrong, words in ((twice, r"layer 0, of 48 neurons, is divided into \[3, 16\] others"),
                         (neurons(48, 6), "each of a multiple of 16 neurons"),
                         (neurons(layers=5), "they are of 5 layers, and the model has 6"),
                         (neurons(32, 2), "layer 0, of 48 neurons")):
        with pytest.raises(Unsupported, match=words):
            split_mlps(runner, wrong)


@pytest.mark.parametrize("family", ["gemma3n", "bitnet"])
def test_neurons_that_depend_on_all_others_are_refused(family: str) -> None:
    with pytest.raises(Unsupported, match="gates are cut off or all neurons are normalised"):
        split_mlps(packed(tiny(family)), neurons())


def test_an_mlp_that_does_more_than_to_gate_is_refused() -> None:
    model = tiny("llama").__class__(tiny("llama").config).double().eval()
    own = model.model.layers[2].mlp
    plain = own.forward
    own.forward = lambda x: 1.01 * plain(x)
    with pytest.raises(Unsupported, match="together they do not give what the MLP gives"):
        split_mlps(stack_of(model), neurons())


def test_the_library_refuses_groups_that_are_not_there() -> None:
    runner = NATIVE.runner("llama")
    assert isinstance(runner, NativeRunner)
    mlps = split_mlps(runner, neurons())
    with pytest.raises(ValueError, match="groups of layer 1, token 0 are 0x8; there are 3"):
        logits(runner, [(1, 8, 1, 1, 1, 1)] * len(TOKENS), mlps)
    assert mlps.native
    with pytest.raises(ValueError, match=r"masks must be \[6 running layers\]\[1 tokens\]"):
        runner.decoder.forward(
            chain_batch([1], 0), runner._binding(_room(runner)), experts=(mlps, [[1]] * 5))
    pairs = [[(group.gate_up, group.down) for group in layer] for layer in mlps.layers]  # type: ignore
    for wrong, hidden, ffn in ((pairs, 64, 48), (pairs, 32, 40), ([pairs[0], pairs[1][:2]], 32, 48)):
        with pytest.raises(ValueError, match="has groups of"):
            NativeExperts(wrong, hidden, ffn)


def _room(runner: ModelRunner) -> KVCache:
    cache = KVCache(runner.windows, 1)
    runner.forward([SequenceChunk(0, [1], [0], DepthPlan.full(LAYERS))], cache)
    assert runner.device == CPU
    return cache
