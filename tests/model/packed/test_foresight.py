"""Experts' pages asked for before they are read: no bit changes, guesses are those of the modules' own gates."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import CPU, packed
from drive import prompt
from families import MIXED_RECURRENT, MIXTURES, RECURRENT, tiny
from gguf_fixtures import IDS, MadeHybrid
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.source import GgufSource
from shoal.model.packed import native, repacked
from shoal.model.packed.build import build
from shoal.model.packed.native.library import NEEDED, SCATTERED, require
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.parity import chunked_logits

pytestmark = [pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}"),
              pytest.mark.skipif(not RECURRENT, reason="this transformers has other modules for experts")]
PIECES = (5, 25, 1, 1, 1, 1, 1, 5)


def on_kernels(model: Any) -> NativeRunner:
    runner = packed(model, kernels=True)
    assert isinstance(runner, NativeRunner)
    return runner


@pytest.mark.quick(4)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("family", [*MIXTURES, *MIXED_RECURRENT])
def test_no_bit_changes(family: str, ahead: int) -> None:
    runner, ids = on_kernels(tiny(family, dtype=torch.float32, layers=4)), prompt(40)
    plain = chunked_logits(runner, ids, PIECES)
    foresight = native.Foresight(ahead, traced=10_000)
    runner.decoder.foresee(foresight)
    assert torch.equal(chunked_logits(runner, ids, PIECES), plain)
    assert foresight.found.bytes > 0 and foresight.trace()
    assert (foresight.found.guessed > 0) == (ahead == 1)
    runner.decoder.foresee(None)
    assert torch.equal(chunked_logits(runner, ids, PIECES), plain)


def of_the_modules(model: Any, ids: list[int]) -> tuple[list[list[set[int]]], list[list[set[int]]]]:
    """Per layer and token the experts that run, and those that the layer's gate would choose one layer earlier."""
    layers, states = model.model.layers, []
    hooks = [layer.post_attention_layernorm.register_forward_pre_hook(lambda _, given: states.append(given[0][0]))
             for layer in layers]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()

        def chosen(layer: Any, given: torch.Tensor) -> list[set[int]]:
            scores = layer.post_attention_layernorm(given) @ layer.mlp.gate.weight.T
            return [set(row.tolist()) for row in scores.topk(model.config.num_experts_per_tok).indices]

        return ([chosen(layer, given) for layer, given in zip(layers, states, strict=True)],
                [chosen(layer, given) for layer, given in zip(layers[1:], states, strict=False)])


def test_guesses_are_those_of_the_next_gate() -> None:
    model, ids = tiny("olmoe", dtype=torch.float32, layers=4), prompt(20)
    runner, foresight = on_kernels(model), native.Foresight(traced=1000)
    runner.decoder.foresee(foresight)
    chunked_logits(runner, ids, (1,) * len(ids))
    truth, guessed = of_the_modules(model, ids)
    expected = [(layer, expert) for token in range(len(ids)) for layer in range(4)
                for expert in sorted(truth[layer][token])]
    assert foresight.trace() == expected
    right = sum(len(truth[layer + 1][token] & guessed[layer][token]) for layer in range(3) for token in range(len(ids)))
    counts = foresight.found
    assert (counts.chosen, counts.guessed, counts.right) == (180, 180, right) and 90 < right < 180


def test_experts_of_several_tokens_count_once() -> None:
    model, ids = tiny("olmoe", dtype=torch.float32, layers=4), prompt(12)
    runner, foresight = on_kernels(model), native.Foresight(traced=1000)
    runner.decoder.foresee(foresight)
    chunked_logits(runner, ids, (12,))
    truth, guessed = ([set().union(*layer) for layer in part] for part in of_the_modules(model, ids))
    assert foresight.trace() == [(layer, expert) for layer in range(4) for expert in sorted(truth[layer])]
    assert foresight.found.right == sum(len(truth[layer + 1] & guessed[layer]) for layer in range(3))


def test_what_is_refused() -> None:
    for ahead, traced in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="both must be at least 0"):
            native.Foresight(ahead, traced)
    runner, foresight = on_kernels(tiny("olmoe", dtype=torch.float32, layers=4)), native.Foresight(traced=1)
    runner.decoder.foresee(foresight)
    chunked_logits(runner, prompt(3), (3,))
    with pytest.raises(ValueError, match="experts ran; `traced` was 1"):
        foresight.trace()


def resident(memory: mmap.mmap, size: int) -> int:
    """Pages of a mapping that are in memory."""
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages)
    return sum(page & 1 for page in pages)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_pages_that_are_asked_for_are_read(tmp_path: Path) -> None:
    size = 64 * mmap.PAGESIZE
    path = tmp_path / "pages"
    path.write_bytes(bytes(size))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    if resident(memory, size):
        pytest.skip("the file system keeps all its pages in memory")
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    require().shoal_advise(start, size, SCATTERED)
    assert memory[5 * mmap.PAGESIZE] == 0 and resident(memory, size) == 1
    require().shoal_advise(start + 10 * mmap.PAGESIZE + 7, 2 * mmap.PAGESIZE, NEEDED)
    until = time.monotonic() + 10
    while resident(memory, size) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert resident(memory, size) == 4, "pages 10, 11 and 12, of which the first and last are needed in part"


def loaded(path: Path) -> NativeRunner:
    file = GgufFile(path)
    config = config_of(file)
    runner = build(config, GgufSource(file, config), torch.float32, CPU)
    assert isinstance(runner, NativeRunner)
    return runner


def scattered(path: Path) -> bool:
    """Whether some mapping of a file is read without its surroundings."""
    mapped = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text("ascii"))
    return any(str(path) in one and re.search(r"VmFlags:.* rr\b", one) for one in mapped)


def test_a_file_beyond_memory_is_mapped_and_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_WEIGHTS", str(tmp_path / "kept"))
    path = MadeHybrid("qwen3moe", "F16").path
    plain, caplog_at = loaded(path), caplog.at_level(logging.WARNING)
    wanted = chunked_logits(plain, IDS, (12,))
    assert plain.decoder.foresight is None and not scattered(tmp_path)
    monkeypatch.setattr(repacked, "available", lambda: 1000)
    with caplog_at:
        runner = loaded(path)
    assert [record.getMessage() for record in caplog.records if "disk" in record.getMessage()] == [
        f"the weights take {_size(tmp_path) / 1e9:.2f} GB and 0.00 GB of memory are free: what does not fit is read "
        "from disk at every step, at the disk's speed"]
    assert runner.decoder.foresight is not None and scattered(tmp_path)
    assert torch.equal(chunked_logits(runner, IDS, (5, 1, 1, 5)), wanted)
    assert runner.decoder.foresight.found.bytes > 0


def test_nothing_is_asked_for_where_memory_holds_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_WEIGHTS", str(tmp_path / "kept"))
    path = MadeHybrid("qwen3moe", "F16").path
    loaded(path)
    for share, asked in ((0.8, False), (0.5, True)):
        monkeypatch.setattr(repacked, "available", partial(int, share * _size(tmp_path)))
        assert (loaded(path).decoder.foresight is not None) == asked
        assert "what does not fit is read from disk" in caplog.text
        caplog.clear()


def _size(folder: Path) -> int:
    return next(folder.rglob("weights.bin")).stat().st_size


def test_the_first_start_beyond_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_WEIGHTS", str(tmp_path / "kept"))
    monkeypatch.setattr(repacked, "available", lambda: 1000)
    with caplog.at_level(logging.WARNING):
        assert loaded(MadeHybrid("qwen3moe", "F16").path).decoder.foresight is not None
    assert "what does not fit is read from disk" in caplog.text
    monkeypatch.setenv("SHOAL_WEIGHTS", "")  # nothing is mapped then
    assert loaded(MadeHybrid("qwen3moe", "F16").path).decoder.foresight is None
