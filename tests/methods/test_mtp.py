"""`mtp`: any layer, on every backend, changes the number of forwards and no more, and guesses what its modules say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoal
import shoal.engine.memory.memory_limit as limits
from backends import NATIVE, Backend, each_backend
from drive import decode, prompt
from eagle_part import ECHO, GuessReference
from families import RECURRENT, tiny
from gguf_fixtures import BESIDE, BESIDE_OF, FOLDER, FURTHER, HYBRIDS, MadeHybrid
from mtp_layer import ChainReference, MtpReference, Style, mtp_beside, with_layer, write_in_8_bits, write_model
from part_checks import BATCHES, SAMPLINGS, check_searches_and_turns, check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.memory.memory_limit import MemoryLimit
from shoal.engine.request import Request
from shoal.errors import OutOfMemory, Unsupported
from shoal.methods.auto import Auto, Cautious
from shoal.methods.d3 import D3
from shoal.methods.mtp import Mtp
from shoal.model.mtp import mtp_of
from shoal.model.packed.linear import Dense
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import TensorSource
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.growth import Branching
from shoal.speculative.layer_head import MtpHead
from shoal.types import Sampling
from watched import Watched

PROCESS = 50 << 20


@each_backend
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_token_changes(backend: Backend, sampling: str) -> None:
    shape = Branching((1,) * 3)
    options = {"new": 24, "runner": backend.runner("llama"), "watch": False, "sampling": SAMPLINGS[sampling]}
    proposer = Watched(LayerProposer(MtpHead(options["runner"], mtp_beside("llama")), shape))
    plain = decode(None, BATCHES[4], DepthPlan.full(6), **options)
    run = decode(None, BATCHES[4], Recipe(DepthPlan.full(6), proposer), **options)
    assert run.tokens == plain.tokens and proposer.met["some"] + proposer.met["all"] > 0
    assert sum(seq.ledger.target_forwards for seq in run.seqs) < 24 * 4


@each_backend
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_layer_guesses_what_its_modules_would(backend: Backend, family: str) -> None:
    runner = backend.runner(family)
    proposer = LayerProposer(MtpHead(runner, mtp_beside(family)), Branching((1,) * 3))
    check_guesses(MtpReference(family), runner, proposer)


def check_guesses(slow: GuessReference, runner: ModelRunner, layer: LayerProposer) -> None:
    """Through prompts and accepted guesses, with the layer's own outputs in the place of states that are not known."""
    proposer = Watched(layer)
    options = {"runner": runner, "new": 12, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    recipe = Recipe(DepthPlan.full(runner.num_layers), proposer)
    run = decode(None, [prompt(70, 1), prompt(5, 2)], recipe, **options)
    check_trees(run, proposer, lambda text, tree: slow.agrees(text, tree, ECHO, 1))


@each_backend
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", BATCHES)
def test_several_layers_change_no_token(backend: Backend, size: int, sampling: str) -> None:
    runner = backend.runner("llama")
    options = {"new": 24, "runner": runner, "watch": False, "sampling": SAMPLINGS[sampling]}
    layers = LayerProposer(MtpHead(runner, mtp_beside("llama", count=3)), Branching((1,) * 5))
    plain = decode(None, BATCHES[size], DepthPlan.full(6), **options)
    run = decode(None, BATCHES[size], Recipe(DepthPlan.full(6), proposer := Watched(layers)), **options)
    assert run.tokens == plain.tokens and proposer.met["some"] + proposer.met["all"] > 0
    assert max(map(len, proposer.trees)) == 6
    assert sum(seq.ledger.target_forwards for seq in run.seqs) < 24 * size


@each_backend
@pytest.mark.parametrize("count", [2, 3])
def test_several_layers_guess_what_their_modules_would_one_after_the_other(backend: Backend, count: int) -> None:
    runner, layer = backend.runner("llama"), mtp_beside("llama", count=count)
    shape = Branching((1,) * (count + 2))
    check_guesses(ChainReference("llama", "numbered", count), runner, LayerProposer(MtpHead(runner, layer), shape))


@pytest.mark.parametrize("room", [1, 2, 5])
def test_several_layers_read_long_texts_in_pieces(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    head = MtpHead(NATIVE.runner("llama"), mtp_beside("llama", count=3))
    for one in (head, *head.further):
        monkeypatch.setattr(one, "most", room)
    check_guesses(ChainReference("llama", "numbered", 3), NATIVE.runner("llama"),
                  LayerProposer(head, Branching((1,) * 4)))


def test_several_layers_read_later_what_a_chain_that_stopped_has_not_read() -> None:
    runner = NATIVE.runner("llama")
    slow, stop = ChainReference("llama", "numbered", 3), 0.3
    layers = LayerProposer(MtpHead(runner, mtp_beside("llama", count=3)), Branching((1,) * 4), stop)
    proposer = Watched(layers)
    options = {"runner": runner, "new": 24, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    run = decode(None, [prompt(70, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer), **options)
    check_trees(run, proposer, lambda text, tree: slow.agrees(text, tree, ECHO, 1))
    assert len({*map(len, proposer.trees)}) > 2


OF_SEVERAL = [("llama", "numbered", 2), ("llama", "mimo", 2), ("qwen2", "mimo_v2", 3)]


@pytest.mark.parametrize(("family", "style", "count"), [
    *OF_SEVERAL, pytest.param("qwen3_5", "apart", 2, marks=pytest.mark.skipif(not RECURRENT, reason="transformers 5"))
])
def test_a_checkpoint_s_several_layers_are_found(tmp_path: Path, family: str, style: Style, count: int) -> None:
    engine = shoal.load(str(write_model(tmp_path, family, style, count=count)), dtype="float32")
    assert isinstance(engine.runner, PackedRunner), "the layers are no reason to run the model's modules"
    layer = engine.mtp()
    assert layer is not None and len(layer.further) == count - 1
    slow = ChainReference(family, style, count)
    check_guesses(slow, engine.runner, LayerProposer(MtpHead(engine.runner, layer), Branching((1,) * 4)))
    options = {"max_new_tokens": 20, "logit_bias": ECHO, "temperature": 1.0, "seed": 3}
    plain, found = (engine.generate(prompt(9, 3), method=one, **options) for one in ("full", Mtp(stop=0.0)))
    assert found.tokens == plain.tokens and found.stats.drafted > 0


def test_kv_of_several_layers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [with_layer(Engine(NATIVE.runner("llama")), "llama", count) for count in (1, 3)]
    monkeypatch.setattr(limits, "standing", lambda: PROCESS)
    request = Request.from_options({"method": "mtp", "max_new_tokens": 20})
    first, three = (MemoryLimit("1GiB").plan(engine, [prompt(40, 1)], request).sizes.drafts for engine in engines)
    head = engines[0].info().mtp()
    assert head is not None and three - first == 2 * (40 + 20 - 1) * sum(head.runner.position_bytes)


def test_searches_fork_and_turns_go_on_with_several_layers() -> None:
    check_searches_and_turns(with_layer(Engine(NATIVE.runner("llama")), "llama", 3), Mtp(stop=0.0, length=4))


OF_QWEN = pytest.mark.skipif(not RECURRENT, reason="early transformers 5")
KINDS = [
    ("llama", "numbered"), pytest.param("qwen3_5", "apart", marks=OF_QWEN),
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
    check_guesses(slow, engine.runner, LayerProposer(MtpHead(engine.runner, layer), Branching((1,) * 3)))


@pytest.mark.parametrize(("family", "style", "wider"), [
    ("glm4_moe", "numbered", False),
    pytest.param("qwen3_5", "apart", False, marks=OF_QWEN), pytest.param("qwen3_5", "apart", True, marks=OF_QWEN),
])
def test_a_layer_in_the_numbers_of_another_tool_is_read_as_they_say(
    tmp_path: Path, family: str, style: Style, wider: bool
) -> None:
    expected = write_in_8_bits(tmp_path, family, style, wider)
    engine = shoal.load(str(tmp_path), dtype="float32")
    layer = engine.mtp()
    assert layer is not None
    inner = "mtp.layers.0." if style == "apart" else f"model.layers.{engine.runner.num_layers}."
    own = [name for name in layer.source.names() if name.replace("model.layers.0.", inner) in expected]
    assert len(own) > 6
    for name in own:
        assert torch.equal(layer.source[name], expected[name.replace("model.layers.0.", inner)]), name
    plain = engine.generate(prompt(9, 3), method="full", max_new_tokens=24)
    for method in (Mtp(stop=0.0), "auto"):
        found = engine.generate(prompt(9, 3), method=method, max_new_tokens=24)
        assert found.tokens == plain.tokens and found.stats.drafted > 0


def test_all_requests_share_one_layer() -> None:
    engine = with_layer(Engine(NATIVE.runner("llama")), "llama")
    heads = [engine.recipe(Mtp(length=length), 16).proposer.part for length in (2, 3)]  # type: ignore[union-attr]
    judge = engine.recipe(Auto(), 16).proposer
    assert isinstance(judge, Cautious) and isinstance(judge.drafter, LayerProposer)
    assert heads[0] is heads[1] is judge.drafter.part


def test_its_kv_counts_and_it_is_loaded_before_memory_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_layer(Engine(NATIVE.runner("llama")), "llama")
    loaded: list[bool] = []
    monkeypatch.setattr(limits, "standing", lambda: loaded.append(MtpHead in engine._memory) or PROCESS)
    request = Request.from_options({"method": "mtp", "max_new_tokens": 20})
    found = MemoryLimit("1GiB").plan(engine, [prompt(40, 1)], request)
    head = engine.info().mtp()
    assert found.changed == "" and loaded == [True] and head is not None
    states = 40 * 4 * head.hidden  # in float32, of the prompt
    assert found.sizes.drafts == (40 + 20 - 1) * sum(head.runner.position_bytes) + states


def test_the_states_of_a_prompt_take_what_is_counted() -> None:
    engine = with_layer(Engine(NATIVE.runner("llama")), "llama")
    recipe = engine.recipe(Mtp(), 16)
    assert recipe.proposer is not None
    (seq,) = engine.seqs([prompt(40, 1)], Request.from_options({"max_new_tokens": 16}), recipe)
    drafter = recipe.proposer.begin(engine.runner, cache := engine.cache_for([seq], 16))
    engine.runner.forward([chunk := SequenceChunk(0, seq.tokens, [0] * 40, recipe.plan)], cache,
                          drafter.watch([seq], [chunk]))
    seq.tokens.append(5)
    states = drafter._hidden.take(seq)
    assert states is not None and states[1].nbytes == 40 * recipe.kept_bytes


def test_a_layer_that_the_limit_does_not_hold_stays_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_layer(Engine(NATIVE.runner("llama")), "llama")
    own = 2 * engine.runner.weights.nbytes // engine.runner.num_layers
    engine.limit = MemoryLimit("1GiB")
    monkeypatch.setattr(limits, "standing", lambda: engine.limit.usable - own + 1)  # type: ignore[union-attr]
    with pytest.raises(OutOfMemory, match="for the model's layer for further tokens: its weights take"):
        engine.recipe(Mtp(), 16)
    judge = engine.recipe(Auto(), 16).proposer
    assert isinstance(judge, Cautious) and judge.drafter is None


def test_beside_modules_it_reads_their_head() -> None:
    model = tiny("llama", dtype=torch.float32)
    engine = with_layer(shoal.load(model, backend="hf"), "llama")
    head = engine.info().mtp()
    assert head is not None and isinstance(head.runner, PackedRunner) and isinstance(head.runner.weights.head, Dense)
    plain = head.runner.weights.head.plain
    assert plain is not None and plain.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_auto_goes_on_without_a_layer_that_does_not_run(tmp_path: Path) -> None:
    (file,) = write_model(tmp_path, "llama", "numbered").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.6.mlp.down_proj.weight"
    for changed in ({"model.layers.6.eh_proj.weight": torch.zeros(2, 2)}, {name: torch.zeros(2, 2)}):
        save_file({**tensors, **changed}, file, {"format": "pt"})
        engine = shoal.load(str(tmp_path), dtype="float32")
        plain, found = (engine.generate(prompt(9, 3), method=one, max_new_tokens=8) for one in ("full", "auto"))
        assert found.tokens == plain.tokens
        with pytest.raises(Unsupported, match="asks for"):
            engine.generate(prompt(9, 3), method="mtp", max_new_tokens=8)


@pytest.mark.skipif(not RECURRENT, reason="early transformers 5")
def test_a_layer_of_a_kind_that_does_not_run_alone_is_told_so() -> None:
    model = tiny("jamba")
    with pytest.raises(Unsupported, match="layers of model type 'jamba' do not run alone"):
        mtp_of(model.config, TensorSource({**model.state_dict(), "mtp.fc.weight": torch.zeros(2, 2)}))


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


@pytest.mark.parametrize("made", [made for made in HYBRIDS if made.architecture in FURTHER and RECURRENT],
                         ids=lambda made: made.name)
def test_the_layer_of_a_gguf_file_is_the_checkpoint_s(made: MadeHybrid) -> None:
    """llama.cpp's converter and quantiser have made it; its names and norms differ from the checkpoint's."""
    engine, tensors = shoal.load(str(made.path), dtype="float32"), made.further()
    layer, near = engine.mtp(), 1e-3 if made.kind == "F16" else 0.1
    assert layer is not None
    apart = "mtp." if FURTHER[made.architecture] == "apart" else f"model.layers.{engine.runner.num_layers}."
    inner = f"{apart}layers.0." if apart == "mtp." else apart
    held = layer.source.names()
    own = {name: tensors[other] for name in held if (other := name.replace("model.layers.0.", inner)) in tensors}
    assert len(own) > 10
    for name, tensor in own.items():
        assert relative(layer.source[name], tensor) < near, name
    fc, e_norm, h_norm = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden") if apart == "mtp." else (
        "eh_proj", "enorm", "hnorm")
    shift = float(apart == "mtp.")
    halves = tensors[f"{apart}{fc}.weight"].chunk(2, 1)
    norms = [tensors[f"{apart}{norm}.weight"] + shift for norm in (e_norm, h_norm)]
    wanted = [half * norm for half, norm in zip(halves, norms, strict=True)]
    assert all(relative(found, one) < near for found, one in zip(layer.join(), wanted[::-1], strict=True))
    plain = engine.generate([5, 6, 7, 8], max_new_tokens=12, method="full")
    found = engine.generate([5, 6, 7, 8], max_new_tokens=12, method=Mtp(stop=0.0))
    assert found.tokens == plain.tokens and found.stats.drafted > 0


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.skipif(not RECURRENT, reason="early transformers 5")
def test_a_file_beside_has_the_layer(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes((FOLDER / "qwen35-F16.gguf").read_bytes())
    assert shoal.load(str(model), dtype="float32").mtp() is None
    beside = tmp_path / BESIDE.name
    beside.write_bytes((FOLDER / "glm4moe-mtp-F16.gguf").read_bytes())
    assert shoal.load(str(model), dtype="float32").mtp() is None, "it is another model's"
    beside.write_bytes(BESIDE.read_bytes())
    engine = shoal.load(str(model), dtype="float32")
    layer, inside = engine.mtp(), shoal.load(str(BESIDE_OF.path), dtype="float32").mtp()
    assert layer is not None and inside is not None and layer.source.names() == inside.source.names()
    assert all(torch.equal(layer.source[name], inside.source[name]) for name in layer.source.names())
    plain = engine.generate([5, 6, 7, 8], max_new_tokens=12, method="full")
    found = engine.generate([5, 6, 7, 8], max_new_tokens=12, method=Mtp(stop=0.0))
    assert found.tokens == plain.tokens and found.stats.drafted > 0


@pytest.mark.skipif(not RECURRENT, reason="early transformers 5")
def test_a_file_beside_that_cannot_be_read_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes((FOLDER / "qwen35-F16.gguf").read_bytes())
    (tmp_path / "mtp-half.gguf").write_bytes(BESIDE.read_bytes()[:5000])
    engine = shoal.load(str(model), dtype="float32")
    plain, found = (engine.generate(prompt(9, 3), method=one, max_new_tokens=8) for one in ("full", "auto"))
    assert found.tokens == plain.tokens
    assert "guessing without the GGUF file 'mtp-half.gguf' beside 'model.gguf'" in caplog.text


@pytest.mark.parametrize(("family", "name"), [("ernie4_5_moe", "model.mtp_block.0.mlp.gate.weight"),
                                              ("llama", "mtp.proj.weight")])
def test_a_layer_of_another_layout_is_no_reason_to_run_modules(tmp_path: Path, family: str, name: str) -> None:
    tiny(family, dtype=torch.float32).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file({**load_file(file), name: torch.ones(2, 2)}, file, {"format": "pt"})
    engine = shoal.load(str(tmp_path), dtype="float32", backend="packed")
    assert engine.mtp() is None


def test_auto_guesses_by_it(tmp_path: Path) -> None:
    engine = shoal.load(str(write_model(tmp_path, "llama", "numbered")), dtype="float32")
    recipe = engine.recipe(Auto(), 16)
    assert isinstance(recipe.proposer, Cautious) and isinstance(recipe.proposer.drafter, LayerProposer)
    plain, found = (engine.generate(prompt(9, 3), method=one, max_new_tokens=64) for one in ("full", "auto"))
    assert found.tokens == plain.tokens


def test_auto_goes_on_where_the_files_cannot_be_read_again() -> None:
    engine = shoal.load(tiny("llama", dtype=torch.float32))

    def gone() -> None:
        raise OSError("the Hub does not answer")

    engine.mtp = gone
    assert len(engine.generate([3, 4, 5], method="auto", max_new_tokens=4, ignore_eos=True).tokens) == 4
