"""Hybrids: chunks against the recurrence token by token, first weights, kills, and the written model's readers."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import shoal
from families import RECURRENT, tiny
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.model.layers.convolution import Convolution
from shoal.model.layers.gated_delta import GatedDelta
from shoal_lab.train import hybrid_files
from shoal_lab.train.corpus import batches
from shoal_lab.train.delta_mixer import DeltaMixer, delta_rule
from shoal_lab.train.hybrid import HybridModule, Stage, pieces, train
from shoal_lab.train.loop import CHECKPOINT, Training
from shoal_lab.train.part import Base, TextBatch
from tiny_corpus import made
from trained_parts import target

TESTS = Path(__file__).resolve().parents[1]
SMALL = Training(4, 256, 3e-3, muon=False)


def inputs(length: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 8, generator=dice, dtype=torch.float64) for _ in "qkv")
    decay, beta = (torch.rand(2, 3, length, generator=dice, dtype=torch.float64) for _ in "ab")
    unit = [one / one.norm(dim=-1, keepdim=True) for one in (q, k)]
    return [one.requires_grad_() for one in (*unit, v, -2 * decay, beta)]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule as it stands in the paper, with the transition as a matrix."""
    state, found = q.new_zeros(*q.shape[:2], 8, 8), []
    for t in range(q.shape[2]):
        key, b = k[:, :, t, :, None], beta[:, :, t, None, None]
        turned = torch.eye(8, dtype=q.dtype) - b * key @ key.mT
        state = decay[:, :, t, None, None].exp() * turned @ state + b * key @ v[:, :, t, None]
        found.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(found, 2)


@pytest.mark.parametrize("length", [1, 4, 11])
def test_chunks_are_the_rule_token_by_token_with_its_gradients(length: int) -> None:
    given = inputs(length)
    weight = torch.randn(2, 3, length, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = [*torch.autograd.grad((one_by_one(*given) * weight).sum(), given), one_by_one(*given)]
    parts = [*torch.autograd.grad((delta_rule(*given, chunk=4) * weight).sum(), given), delta_rule(*given, chunk=4)]
    for expected, found in zip(whole, parts, strict=True):
        assert torch.allclose(expected, found, atol=1e-12)


def shaken(mixer: DeltaMixer) -> DeltaMixer:
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=dice)
    return mixer


def test_a_layer_is_the_one_that_decodes() -> None:
    """The twin of `shoal.model.layers` reads the same inputs one by one."""
    mixer = shaken(DeltaMixer(24, 3, 8, 1e-3)).double()
    x = torch.randn(1, 40, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own = {name: one.detach() for name, one in mixer.tensors().items()}
    rows = torch.cat([own[f"in_proj_{name}.weight"] for name in ("qkv", *"zba")])
    twin = GatedDelta(lambda x: x @ rows.T, lambda x: x @ own["out_proj.weight"].T, 3,
                      Convolution(own["conv1d.weight"][:, 0].T.contiguous(), None), own["A_log"].exp()[:, None],
                      own["dt_bias"][:, None], own["norm.weight"], 1e-3)
    state = tuple(torch.zeros(size, dtype=torch.float64) for size in twin.state_sizes)
    expected = twin.out(twin.recur(twin.project(x[0]), state))
    assert torch.allclose(mixer(x)[0][0], expected, atol=1e-10)


def hybrid(folder: Path, *names: Stage) -> tuple[dict[str, Tensor], dict[str, Any]]:
    engine, stages = target("llama"), dict.fromkeys(names, SMALL)
    return train(Base(engine.runner), copy.deepcopy(engine.model).float(), made(folder / "answers"), stages, folder,
                 None, lambda message: None, lambda: False, False)


@pytest.mark.parametrize("stage", ["layers", "whole"])
def test_training_brings_it_nearer(stage: Stage, tmp_path: Path) -> None:
    engine, corpus = target("llama"), made(tmp_path / "answers")
    module = HybridModule(Base(engine.runner), copy.deepcopy(engine.model).float(), stage)
    assert all(0 < one < 1 for one in module.start(corpus))
    texts = [TextBatch.of(some) for some in batches(corpus.answers(0, validation=False), 256)]
    before = sum(module.loss(batch)[0].item() for batch in texts)
    tensors, facts = hybrid(tmp_path, stage)
    module.take(tensors)
    assert sum(module.loss(batch)[0].item() for batch in texts) < before
    assert facts["held_out"]["distance"] > 0 and facts["stages"][stage]["steps"][0] > 0


def test_stages_are_the_model_s_own_pass(tmp_path: Path) -> None:
    """Where each layer is attention, nothing is lost: the hybrid's pass is the model's."""
    engine = target("llama")
    module = HybridModule(Base(engine.runner), copy.deepcopy(engine.model).float(), "whole")
    module.mixers = torch.nn.ModuleDict()
    tokens = torch.randint(0, 90, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = copy.deepcopy(engine.model).float().model(tokens).last_hidden_state
        assert torch.allclose(module.read(tokens), expected, atol=1e-4)


RUN = """
import sys
from pathlib import Path
from test_hybrid import hybrid
from shoal_lab.train import hybrid_files
folder = Path(sys.argv[1])
tensors, facts = hybrid(folder, "layers", "whole")
hybrid_files.save(folder, tensors, facts)
"""


def begun(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join([*map(str, (TESTS / "train", TESTS, TESTS.parents[1] / "tests")),
                             os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", RUN, str(folder)], text=True,
                            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})


def ended(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=300)[1]


@pytest.mark.slow
def test_killed_in_either_stage_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    assert ended(begun(tmp_path / "whole")) == ""
    killed = tmp_path / "killed"
    for mark in (killed / "layers" / CHECKPOINT, killed / "whole" / CHECKPOINT):
        process, until = begun(killed), time.monotonic() + 200
        while not mark.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        ended(process)
        assert mark.exists()
    assert ended(begun(killed)) == ""
    expected, found = (hybrid_files.saved(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def folder_of(tmp_path: Path, tied: bool) -> tuple[HybridModule, Path]:
    """A hybrid that is far from its start, and its whole model."""
    llama = copy.deepcopy(tiny("llama", tie_word_embeddings=tied)).float()
    module = HybridModule(Base(engine_for(llama).runner), llama, "whole")
    for mixer in module.mixers.values():
        shaken(mixer)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in llama.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(5))
    hybrid_files.save(tmp_path / "part", module.tensors(), {})
    module.take(hybrid_files.saved(tmp_path / "part"))
    hybrid_files.export(tmp_path / "model", llama, hybrid_files.saved(tmp_path / "part"), None)
    return module, tmp_path / "model"


@pytest.mark.skipif(not RECURRENT, reason="early transformers 5 have no Qwen3.5")
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_and_the_kernels_read_what_is_written(tied: bool, tmp_path: Path) -> None:
    module, folder = folder_of(tmp_path, tied)
    tokens = torch.randint(0, 90, (1, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = (module.read(tokens) @ module.head.rows.T)[0]
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 0.02  # attention's norms: under a percent
    engines = [shoal.load(str(folder), dtype="float32", backend=backend) for backend in ("hf", "packed")]
    texts = [engine.generate([tokens[0].tolist()], method="full", max_new_tokens=12)[0]
             for engine in engines]
    assert texts[0].tokens == texts[1].tokens


def test_it_is_stored_in_bytes_and_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_files, "_MOST", 20_000)
    module = HybridModule(Base(target("llama").runner), copy.deepcopy(target("llama").model).float(), "whole")
    card = hybrid_files.save(tmp_path, module.tensors(), {"model": "m"})
    assert len(card["files"]) > 1 and max(card["files"].values()) < 24_000
    back = hybrid_files.saved(tmp_path)
    for name, tensor in module.tensors().items():
        assert float((back[name] - tensor).abs().max()) <= float(tensor.abs().max()) / 100


def test_bad_input_is_refused(tmp_path: Path) -> None:
    engine = target("qwen3")
    with pytest.raises(Unsupported, match="a hybrid of a qwen3 model"):
        HybridModule(Base(engine.runner), copy.deepcopy(engine.model), "whole")
    module = HybridModule(Base(target("llama").runner), copy.deepcopy(target("llama").model), "whole")
    with pytest.raises(ValueError, match="of another model"):
        module.take({})
    with pytest.raises(ValueError, match="cannot be read"):
        pieces([tmp_path / "none"], None, 8, 0)
    with pytest.raises(ValueError, match="cannot be read"):
        hybrid_files.saved(tmp_path)
