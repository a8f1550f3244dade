"""Drafters that other tools have trained: read as they lie, logits by the papers' formulas, refused by one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends import NATIVE, TORCH, Backend, on_one_backend, reference
from drive import prompt
from eagle_drafters import FORMS, IDS, LAYER, DrafterReference, drafter, of_family, write
from eagle_part import target, write_eagle
from families import HIDDEN, VOCAB, tiny
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.memory.memory_limit import MemoryLimit
from shoal.errors import OutOfMemory
from shoal.methods.auto import Auto, Cautious
from shoal.methods.eagle import Eagle
from shoal.model.runner import ModelRunner, OfLayers, SequenceChunk
from shoal.speculative import eagle_checkpoint
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.layer_head import PLAN, CheckpointHead
from shoal.user_cache import cache_folder

TEXT = [5, 17, 80, 3, 41, 7, 9, 22]
RECORDED = Path(__file__).parent.parent / "fixtures" / "speculators_eagle.json"


def head(runner: ModelRunner, folder: str | Path) -> CheckpointHead:
    return CheckpointHead(runner, eagle_checkpoint.read(str(folder)))


def logits(made: CheckpointHead, states: Tensor, tokens: list[int]) -> Tensor:
    """Logits of what follows each of `tokens`, by the states before them."""
    cache = made.cache()
    cache.extend(1)
    chunk = SequenceChunk(0, range(len(tokens)), [0] * len(tokens), PLAN, wanted=len(tokens))
    return made.run([chunk], cache, *made.fused(made.read(states), tokens))[0]


def states_of(runner: ModelRunner, layers: tuple[int, ...], tokens: list[int]) -> Tensor:
    """The states that enter these layers, one after the other."""
    seen: list[Tensor] = []
    cache = runner.new_cache(1)
    runner.forward([SequenceChunk(0, tokens, [0] * len(tokens), DepthPlan.full(runner.num_layers))], cache,
                   OfLayers(layers, lambda layer, hidden: seen.append(hidden[0]) if layer in layers else None))
    return torch.cat(seen, -1)


@on_one_backend("form", {name: name for name in FORMS}, "llama", "qwen3")
def test_logits_are_those_of_the_formulas(backend: Backend, name: str, form: str) -> None:
    runner, slow = backend.runner(name), of_family(form, name)
    made = head(runner, drafter(form))
    found = logits(made, states_of(runner, made.taps or (6,), TEXT[:-1]), TEXT[1:])
    expected = slow.logits(TEXT)
    assert float((found.double() - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("form", ["eagle3", "eagle"])
def test_more_tokens_than_a_call_of_the_kernels_takes(form: str) -> None:
    """The states of the target, and what the layer is fed, come from several calls."""
    runner, text = NATIVE.runner("llama"), prompt(301, 9)
    made = head(runner, drafter(form))
    found = logits(made, states_of(runner, made.taps or (6,), text[:-1]), text[1:])
    expected = of_family(form).logits(text)
    assert float((found.double() - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("form", ["eagle3", "eagle"])
def test_another_formula_would_be_seen(form: str) -> None:
    """Taps of other layers, or of other weights, are far from these logits."""
    runner, made = TORCH.runner("llama"), head(TORCH.runner("llama"), drafter(form))
    expected = of_family(form).logits(TEXT)
    other = states_of(runner, (1, 2, 4) if made.taps else (5,), TEXT[:-1])
    assert float((logits(made, other, TEXT[1:]) - expected).abs().max()) > 1e-2 * float(expected.abs().max())


def test_without_any_word_the_papers_layers_are_read(tmp_path: Path) -> None:
    """Layers 2, L // 2 and L - 3, here 2, 4 and 5 of 8."""
    form = replace(FORMS["eagle3"], config={})
    runner, slow = TORCH.runner("llama", layers=8), DrafterReference(form, reference("llama", layers=8), (2, 4, 5))
    made = head(runner, write(tmp_path, form))
    assert made.taps == (2, 4, 5)
    found, expected = logits(made, states_of(runner, made.taps, TEXT[:-1]), TEXT[1:]), slow.logits(TEXT)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_the_logits_are_those_that_speculators_computes(tmp_path: Path) -> None:
    """Recorded: `tests/fixtures/speculators_eagle.py` says how."""
    recorded = json.loads(RECORDED.read_text("utf-8"))
    assert {one["form"] for one in recorded} == {"eagle, speculators", "eagle3, speculators"}
    for one in recorded:
        form = replace(FORMS[one["form"]], config={**FORMS[one["form"]].config, **one["config"]})
        folder = tmp_path / str(recorded.index(one))
        folder.mkdir()
        made = head(engine_for(tiny("llama")).runner, write(folder, form))
        states = torch.randn(len(one["tokens"]), made.state_size, generator=torch.Generator().manual_seed(5))
        if not form.wide:  # what the head of the model reads
            made.read = lambda states: states  # type: ignore[method-assign]
        found, expected = logits(made, states.double(), one["tokens"]), torch.tensor(one["logits"])
        assert float((found - expected).abs().max()) <= 1e-4
        assert [one.argmax().item() for one in found] == one["guesses"]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def retensor(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, replace(FORMS["eagle3"], pickled=False))


def refused(folder: Path, engine: Engine | None = None) -> str:
    engine = engine or target("llama")
    with pytest.raises(ValueError) as told:
        engine.generate(prompt(5, 1), method=Eagle(str(folder)), max_new_tokens=8)
    line = str(told.value)
    assert "\n" not in line and str(folder) in line
    return line


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "hidden size": (lambda config: config.update(hidden_size=64),
                    "its tensor 'fc.weight' is [32, 96]; its config asks for [64, 128]"),
    "no hidden size": (lambda config: config.update(hidden_size=20),
                       "its 'layers.0.self_attn.q_proj' has 64 columns; its config says that hidden_size is 20"),
    "target's hidden size": (lambda config: config.update(target_hidden_size=48),
                             "states of 48 numbers; this one has 32"),
    "vocabulary": (lambda config: config.update(vocab_size=151), "for a model with 151 tokens; this one has 97"),
    "a size that is none": (lambda config: config.update(intermediate_size="many"), "intermediate_size is 'many'"),
    "another kind": (lambda config: config.update(speculators_model_type="dflash"), "it is of kind 'dflash'"),
    "layers beyond": (lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2, 16, 29]), "[2, 16, 29]"),
    "few layers": (lambda config: config.pop("eagle_aux_hidden_state_layer_ids"), "here [2, 3, 3]"),
    "rope": (lambda config: config.update(rope_scaling={"type": "spiral", "factor": 2.0},
                                          max_position_embeddings=64), "its rope_type is 'spiral'; it must be one of"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_does_not_fit_is_told(folder: Path, change: str) -> None:
    made, told = CHANGES[change]
    rewrite(folder, made)
    assert told in refused(folder)


def _put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], object]:
    return lambda held: held.pop(name) if tensor is None else held.update({name: tensor})


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "fc": (_put("fc.weight", None), "its files lack 'fc.weight'"),
    "a norm": (_put("midlayer.hidden_norm.weight", None), "its files lack 'layers.0.hidden_norm.weight'"),
    "a matrix": (_put("midlayer.mlp.up_proj.weight", None), "its files lack 'layers.0.mlp.up_proj.weight'"),
    "the head": (_put("lm_head.weight", None), "its files lack 'lm_head.weight'"),
    "a second layer": (_put("layers.1.mlp.up_proj.weight", torch.ones(2, 2)), "it has a second layer"),
    "more": (_put("markov.weight", torch.ones(2, 2)), "it holds 'markov.weight', for which Shoal has no place"),
    "another size": (_put("midlayer.mlp.up_proj.weight", torch.ones(3, 4)), "is [3, 4]"),
    "no number": (_put("norm.weight", torch.full((HIDDEN,), torch.nan)), "'norm.weight' holds what is no number"),
    "tokens beyond": (_put("d2t", torch.full((len(IDS),), VOCAB)), "its 'd2t' must name different tokens of 0 to 96"),
    "a token twice": (_put("d2t", -torch.arange(len(IDS))), "its 'd2t' must name different tokens of 0 to 96"),
}


@pytest.mark.parametrize("change", TENSORS)
def test_a_tensor_that_does_not_fit_is_told(folder: Path, change: str) -> None:
    made, told = TENSORS[change]
    retensor(folder, made)
    assert told in refused(folder)


def test_another_model_is_told(folder: Path) -> None:
    assert "states of 32 numbers; this one has 16" in refused(
        folder, engine_for(tiny("llama", hidden_size=16, intermediate_size=24)))


@pytest.mark.parametrize("name", ["config.json", "pytorch_model.bin", "model.safetensors"])
def test_truncated_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, replace(FORMS["eagle3"], pickled=name == "pytorch_model.bin"))
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    assert name in refused(folder)


def test_a_file_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path, FORMS["eagle"])

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    assert "cannot be read" in refused(folder)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = cache_folder() / "parts"
    place.mkdir(parents=True)
    yield place


def drafting(engine: Engine) -> Any:
    judge = engine.recipe(Auto(), 16).proposer
    assert isinstance(judge, Cautious)
    return judge.drafter.part if isinstance(judge.drafter, LayerProposer) else None


def test_auto_and_eagle_find_one_that_fits_among_the_parts(parts: Path) -> None:
    for number, vocabulary in enumerate((VOCAB, 200)):
        (parts / str(1 - number)).mkdir()
        write(parts / str(1 - number), replace(FORMS["eagle3"], vocabulary=vocabulary))
    engine = Engine(TORCH.runner("llama"))
    found = drafting(engine)
    assert isinstance(found, CheckpointHead) and found is engine.recipe(Eagle(), 16).proposer.part  # type: ignore
    options = {"max_new_tokens": 24, "logit_bias": dict.fromkeys((5, 8, 11), 12.0)}
    plain, guessed = (engine.generate(prompt(9, 3), method=one, **options) for one in ("full", "auto"))
    assert guessed.tokens == plain.tokens and guessed.stats.drafted > 0
    other = Engine(TORCH.runner("llama", vocab_size=131))
    assert drafting(other) is None


def test_a_part_of_ones_own_comes_first(parts: Path) -> None:
    shutil.copytree(drafter("eagle3"), parts / "a")
    (parts / "b").mkdir()
    write_eagle(parts / "b", "llama")
    assert not isinstance(drafting(Engine(TORCH.runner("llama"), model=target("llama").model)), CheckpointHead)


def test_new_files_are_read_anew(folder: Path) -> None:
    engine, method = Engine(TORCH.runner("llama")), Eagle(str(folder))
    first, again = (engine.recipe(method, 16).proposer for _ in range(2))
    retensor(folder, lambda held: held.update({"norm.weight": 2 * held["norm.weight"]}))
    later = engine.recipe(method, 16).proposer
    assert first is again is not later


def test_it_counts_under_a_limit_on_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.engine.memory.memory_limit as limits

    engine = Engine(TORCH.runner("llama"))
    made = engine.recipe(Eagle(str(folder)), 16)
    assert made.kept_bytes == 4 * 3 * HIDDEN and made.second_runner is made.proposer.part.runner  # type: ignore
    engine = Engine(TORCH.runner("llama"))
    engine.limit = MemoryLimit("1GiB")
    monkeypatch.setattr(limits, "standing", lambda: engine.limit.usable - 1000)  # type: ignore[union-attr]
    with pytest.raises(OutOfMemory, match="for the drafter"):
        engine.recipe(Eagle(str(folder)), 16)
    assert isinstance(engine.recipe(Auto(), 16).proposer, Cautious)


def test_names_of_sglang_and_vllm_are_the_same(tmp_path: Path, folder: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)

    def renamed(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "lm_head" not in name]:
            theirs = name.replace("midlayer.", LAYER).replace("d2t", "draft_id_to_target_id")
            tensors[f"model.{theirs}"] = tensors.pop(name)

    retensor(other, renamed)
    assert all(eagle_checkpoint.read(str(one)).names == list(IDS) for one in (folder, other))
    runner = TORCH.runner("llama")
    states = states_of(runner, (1, 3, 4), TEXT[:-1])
    assert torch.equal(*(logits(head(runner, one), states, TEXT[1:]) for one in (folder, other)))


def test_half_numbers_and_8_bits_run(tmp_path: Path) -> None:
    folder = write(tmp_path, FORMS["eagle3, speculators"])
    retensor(folder, lambda held: held.update(
        {name: one.bfloat16() for name, one in held.items() if one.is_floating_point()}))
    for dtype, quant in ((torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.float32, "int8")):
        engine = engine_for(tiny("llama", dtype=dtype), backend="packed", quant=quant)  # type: ignore[arg-type]
        plain, found = (engine.generate(prompt(9, 3), method=one, max_new_tokens=20)
                        for one in ("full", Eagle(str(folder), stop=0.0)))
        assert found.tokens == plain.tokens and found.stats.drafted > 0


def test_rotation_of_older_configs_is_read(folder: Path) -> None:
    plain = eagle_checkpoint.read(str(folder)).config.rope_parameters
    rewrite(folder, lambda config: config.update(rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}))
    assert eagle_checkpoint.read(str(folder)).config.rope_parameters == plain
    rewrite(folder, lambda config: config.update(
        rope_theta=500000.0, max_position_embeddings=64, rope_scaling={"type": "linear", "factor": 4.0}))
    found = eagle_checkpoint.read(str(folder)).config.rope_parameters
    assert found == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
