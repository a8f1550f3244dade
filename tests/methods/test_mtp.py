"""`mtp`: any layer, on every backend, changes the number of forwards and no more, and guesses what its modules say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoal
from backends import Backend, each_backend
from drive import decode, prompt
from eagle_part import ECHO
from families import RECURRENT, tiny
from mtp_layer import MtpReference, Style, mtp_beside, write_model
from part_checks import BATCHES, SAMPLINGS
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.mtp import Mtp
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.growth import Branching
from shoal.types import Sampling
from watched import Watched


@each_backend
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_token_changes(backend: Backend, sampling: str) -> None:
    shape = Branching((1,) * 3)
    options = {"new": 24, "runner": backend.runner("llama"), "watch": False, "sampling": SAMPLINGS[sampling]}
    proposer = Watched(LayerProposer(mtp_beside("llama"), shape))
    plain = decode(None, BATCHES[4], DepthPlan.full(6), **options)
    run = decode(None, BATCHES[4], Recipe(DepthPlan.full(6), proposer), **options)
    assert run.tokens == plain.tokens and proposer.met["some"] + proposer.met["all"] > 0
    assert sum(seq.ledger.target_forwards for seq in run.seqs) < 24 * 4


@each_backend
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_layer_guesses_what_its_modules_would(backend: Backend, family: str) -> None:
    proposer = LayerProposer(mtp_beside(family), Branching((1,) * 3))
    check_guesses(MtpReference(family), backend.runner(family), proposer)


def check_guesses(slow: MtpReference, runner: ModelRunner, layer: LayerProposer) -> None:
    """Through prompts and accepted guesses, with the layer's own outputs in the place of states that are not known."""
    proposer = Watched(layer)
    options = {"runner": runner, "new": 12, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    recipe = Recipe(DepthPlan.full(runner.num_layers), proposer)
    run = decode(None, [prompt(70, 1), prompt(5, 2)], recipe, **options)
    seen = 0
    for tree in proposer.trees:
        texts = [seq.tokens[: end + 1] for seq in run.seqs for end in range(seq.prompt_length, len(seq.tokens))
                 if seq.tokens[end] == tree.tokens[0]]
        seen += any(slow.agrees(text, tree, ECHO, 1) for text in texts)
    assert seen == len(proposer.trees) > 4


KINDS = [
    ("llama", "numbered"),
    pytest.param("qwen3_5", "apart", marks=pytest.mark.skipif(not RECURRENT, reason="early transformers 5")),
    ("glm4_moe", "numbered"), ("deepseek_v3", "numbered"),
]


@pytest.mark.parametrize(("family", "style"), KINDS)
def test_a_checkpoint_s_layer_is_found_and_guesses(tmp_path: Path, family: str, style: Style) -> None:
    engine = shoal.load(str(write_model(tmp_path, family, style)), dtype="float32")
    assert isinstance(engine.runner, PackedRunner), "the layer is no reason to run the model's modules"
    for number, ids in enumerate(BATCHES[4]):
        options = {"max_new_tokens": 20, "logit_bias": ECHO, "temperature": float(number % 2), "seed": number}
        plain = engine.generate(ids, method="full", **options)
        found = engine.generate(ids, method=Mtp(stop=0.0), **options)
        assert found.tokens == plain.tokens
        assert found.stats.drafted > 0
    slow, layer = MtpReference(family, style), engine.mtp()
    assert layer is not None
    check_guesses(slow, engine.runner, LayerProposer(layer, Branching((1,) * 3)))


def test_below_a_depth_plan_it_gives_the_plan_s_text(tmp_path: Path) -> None:
    engine = shoal.load(str(write_model(tmp_path, "llama", "numbered")), dtype="float32")
    inner = D3(alpha=0.9, core=2)
    options = {"max_new_tokens": 20, "logit_bias": ECHO}
    plain = engine.generate(prompt(9, 3), method=inner, **options)
    found = engine.generate(prompt(9, 3), method=Mtp(stop=0.0, inner=inner), **options)
    assert found.tokens == plain.tokens and found.stats.drafted > 0


def test_a_model_without_one_is_told_so() -> None:
    with pytest.raises(Unsupported, match="no layer for further tokens"):
        shoal.load(tiny("llama", dtype=torch.float32)).generate([3, 4, 5], method="mtp", max_new_tokens=2)


def test_a_damaged_layer_is_told_in_one_line(tmp_path: Path) -> None:
    (file,) = write_model(tmp_path, "llama", "numbered").glob("*.safetensors")
    tensors = load_file(file)
    for name, change, told in (
        ("model.layers.6.hnorm.weight", None, "lack 'model.layers.6.hnorm.weight'"),
        ("model.layers.6.mlp.down_proj.weight", None, "lack 'model.layers.6.mlp.down_proj.weight'"),
        ("model.layers.6.eh_proj.weight", tensors["model.layers.6.eh_proj.weight"][:, :-1], "asks for"),
    ):
        held = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(held if change is None else {**held, name: change.contiguous()}, file, {"format": "pt"})
        engine = shoal.load(str(tmp_path), dtype="float32")
        plain = engine.generate([3, 4, 5], max_new_tokens=2, method="full").tokens
        with pytest.raises((Unsupported, ValueError), match=told):
            engine.generate([3, 4, 5], method="mtp", max_new_tokens=2)
        assert engine.generate([3, 4, 5], max_new_tokens=2, method="full").tokens == plain
