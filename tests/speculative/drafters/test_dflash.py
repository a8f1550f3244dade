"""Drafters of DFlash: logits are those of the paper's formulas and of z-lab's model; what does not fit is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends import NATIVE, TORCH, Backend, on_one_backend
from dflash_drafters import BLOCK_FORMS, BlockReference, block_drafter, of_block, write
from drive import prompt
from eagle_drafters import drafter
from eagle_part import target
from families import HIDDEN, tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.auto import Auto, Cautious
from shoal.methods.dflash import DFlash
from shoal.methods.eagle import Eagle
from shoal.model.runner import ModelRunner
from shoal.speculative.drafters import dflash_checkpoint
from shoal.speculative.drafters.dflash import DFlashHead, DFlashProposer
from shoal.user_cache import cache_folder

RECORDED = Path(__file__).parent.parent.parent / "fixtures" / "dflash.json"


def head(runner: ModelRunner, folder: str | Path) -> DFlashHead:
    return DFlashHead(runner, dflash_checkpoint.read(str(folder)))


def logits(made: DFlashHead, slow: BlockReference, text: list[int], parts: int = 1) -> Tensor:
    """Logits of a block after a text whose states come in some parts, beside that of a shorter text."""
    cache = made.cache()
    cache.extend(2)
    states = slow.states(text[:-1])
    for part in states.tensor_split(parts):
        made.remember(cache, {1: part})
        made.fill(cache, {1: text[0]})  # a block that is given up
        cache.rollback(1)
    made.remember(cache, {0: states[:3]})
    return made.fill(cache, {0: text[3], 1: text[-1]})[1]


@on_one_backend("form", {name: name for name in BLOCK_FORMS}, "llama", "qwen3")
def test_logits_are_those_of_the_formulas(backend: Backend, name: str, form: str) -> None:
    made, slow = head(backend.runner(name), block_drafter(form)), of_block(form, name)
    for text in (prompt(8, 1), prompt(23, 2)):
        found, expected = logits(made, slow, text, 3), slow.logits(text)
        assert found.shape == expected.shape == (BLOCK_FORMS[form].guesses, len(slow.ids))
        assert float((found.double() - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_more_states_than_a_call_of_the_kernels_takes() -> None:
    made, slow, text = head(NATIVE.runner("llama"), block_drafter("dflash")), of_block("dflash"), prompt(301, 9)
    found, expected = logits(made, slow, text), slow.logits(text)
    assert float((found.double() - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_another_formula_would_be_seen() -> None:
    """Another mask, another layer's states, or a block that sees nothing ahead give other logits by far."""
    made, text = head(TORCH.runner("llama"), block_drafter("dflash")), prompt(8, 1)
    found = logits(made, of_block("dflash"), text)
    form = BLOCK_FORMS["dflash"]
    behind = replace(form, windows=(True, True), ahead=False)
    for other in (replace(form, mask=95), replace(form, taps=(1, 2, 4)), behind):
        expected = BlockReference(other, target("llama").model).logits(text)
        assert float((found - expected).abs().max()) > 1e-2 * float(expected.abs().max())


def test_the_logits_are_those_of_z_labs_model(tmp_path: Path) -> None:
    """Recorded: `tests/fixtures/dflash.py` says how."""
    recorded = json.loads(RECORDED.read_text("utf-8"))
    assert [one["form"] for one in recorded] == ["dflash", "dflash by z-lab's rule"]
    for one in recorded:
        slow, made = of_block(one["form"]), head(engine_for(tiny("llama")).runner, block_drafter(one["form"]))
        states = torch.randn(len(one["states"]), made.state_size, generator=torch.Generator().manual_seed(5)).double()
        assert torch.allclose(states[:, 0], torch.tensor(one["states"]).double(), atol=1e-6)
        cache = made.cache()
        cache.extend(1)
        made.remember(cache, {0: states})
        expected = torch.tensor(one["logits"]).double()
        assert float((slow.filled(states, one["last"]) - expected).abs().max()) <= 1e-4
        found = made.fill(cache, {0: one["last"]})[0]
        assert float((found - expected).abs().max()) <= 1e-4
        assert found.argmax(-1).tolist() == one["guesses"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, BLOCK_FORMS["dflash"])


def refused(folder: Path, engine: Engine | None = None, method: Any = None) -> str:
    engine = engine or target("llama")
    with pytest.raises(ValueError) as told:
        engine.generate(prompt(5, 1), method=method or DFlash(part=str(folder)), max_new_tokens=8)
    line = str(told.value)
    assert "\n" not in line and str(folder) in line
    return line


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "hidden size": (lambda config: config.update(hidden_size=64),
                    "'fc.weight' is [32, 96]; its config asks for 64 rows"),
    "target's hidden size": (lambda config: config.update(target_hidden_size=48),
                             "states of 48 numbers; this one has 32"),
    "vocabulary": (lambda config: config.update(vocab_size=151), "for a model with 151 tokens; this one has 97"),
    "layers": (lambda config: config.update(num_target_layers=28), "for a model of 28 layers; this one has 6"),
    "no block": (lambda config: config.pop("block_size"), "block_size is None; it must be a whole number of at least"),
    "a large block": (lambda config: config.update(block_size=99), "its block has 99 places"),
    "the mask": (lambda config: config["dflash_config"].update(mask_token_id=97),
                 "mask_token_id is 97; it must be a whole number of at least 0 and below 97"),
    "layers beyond": (lambda config: config["dflash_config"].update(target_layer_ids=[0, 2, 5]), "here [1, 3, 6]"),
    "layers in another order": (lambda config: config["dflash_config"].update(target_layer_ids=[2, 0, 3]), "ascending"),
    "fewer layers": (lambda config: config["dflash_config"].update(target_layer_ids=[0, 2]),
                     "reads what enters 3 layers, here [1, 3]"),
    "more layers of its own": (lambda config: config.update(num_hidden_layers=3),
                               "its files lack 'layers.2."),
    "fewer of its own": (lambda config: config.update(num_hidden_layers=1), "it holds 'layers.1."),
    "rope": (lambda config: config.update(rope_scaling={"type": "spiral", "factor": 2.0}, max_position_embeddings=64),
             "its rope_type is 'spiral'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_does_not_fit_is_told(folder: Path, change: str) -> None:
    made, told = CHANGES[change]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    made(config)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert told in refused(folder)


TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "fc": ({"fc.weight": None}, "its files lack 'fc.weight'"),
    "a norm": ({"hidden_norm.weight": None}, "its files lack 'hidden_norm.weight'"),
    "a matrix": ({"layers.1.mlp.up_proj.weight": None}, "its files lack 'layers.1.mlp.up_proj.weight'"),
    "more": ({"markov_head.weight": torch.ones(2, 2)}, "it holds 'markov_head.weight', for which Shoal has no place"),
    "another size": ({"layers.0.mlp.up_proj.weight": torch.ones(3, 4)}, "is [3, 4]"),
    "no number": ({"norm.weight": torch.full((HIDDEN,), torch.nan)}, "'norm.weight' holds what is no number"),
}


@pytest.mark.parametrize("change", TENSORS)
def test_a_tensor_that_does_not_fit_is_told(folder: Path, change: str) -> None:
    changed, told = TENSORS[change]
    held = {**load_file(folder / "model.safetensors"), **changed}
    save_file({name: one for name, one in held.items() if one is not None}, folder / "model.safetensors")
    assert told in refused(folder)


def test_another_model_is_told(folder: Path) -> None:
    engine = engine_for(tiny("llama", hidden_size=16, intermediate_size=24))
    assert "states of 32 numbers; this one has 16" in refused(folder, engine)


def test_a_method_of_another_kind_is_told(folder: Path) -> None:
    assert "it is of kind 'dflash'. Use method dflash" in refused(folder, method=Eagle(part=str(folder)))
    other = Path(drafter("eagle3"))
    assert "it is of kind 'eagle'. Use method eagle" in refused(other, method=DFlash(part=str(other)))


def test_auto_tells_the_kind_and_finds_one_among_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = cache_folder() / "parts" / "one"
    place.mkdir(parents=True)
    write(place, BLOCK_FORMS["dflash"])
    for method in (Auto(), Auto(part=block_drafter("dflash"))):
        engine = Engine(TORCH.runner("llama"))
        judge = engine.recipe(method, 16).proposer
        assert isinstance(judge, Cautious) and isinstance(judge.drafter, DFlashProposer)
        options = {"max_new_tokens": 24, "logit_bias": dict.fromkeys((5, 8, 11), 12.0)}
        plain, guessed = (engine.generate(prompt(9, 3), method=one, **options) for one in ("full", method))
        assert guessed.tokens == plain.tokens and guessed.stats.drafted > 0
    made = Engine(TORCH.runner("llama")).recipe(DFlash(), 16)
    assert made.kept_bytes == 4 * 3 * HIDDEN and made.second_runner.num_layers == 2  # type: ignore[union-attr]


def test_half_numbers_and_8_bits_run(tmp_path: Path) -> None:
    folder = write(tmp_path, BLOCK_FORMS["dflash, speculators"])
    for dtype, quant in ((torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.float32, "int8")):
        engine = engine_for(tiny("llama", dtype=dtype), backend="packed", quant=quant)  # type: ignore[arg-type]
        plain, found = (engine.generate(prompt(9, 3), method=one, max_new_tokens=20)
                        for one in ("full", DFlash(part=str(folder), stop=0.0)))
        assert found.tokens == plain.tokens and found.stats.drafted > 0
