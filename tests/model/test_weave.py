"""A forward in two waves has the bits of one, and each wave's all-reduce runs while the other computes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

import woven
from families import tiny
from shoal.depth.plan import DepthPlan
from shoal.model import weave as weaves
from shoal.model.runner import SequenceChunk
from shoal.model.weave import Weave
from two_processes import torchrun

LAYERS, FAMILIES = 3, ("llama", "hybrid")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if not torch.distributed.is_available() or sys.platform == "win32":
        pytest.skip("torch is built without gloo here")
    home = tmp_path_factory.mktemp("woven")
    for family in FAMILIES:
        tiny(family, layers=LAYERS).save_pretrained(home / family)
    done = torchrun(woven.__file__, home / "report", *(home / family for family in FAMILIES))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((home / f"report.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(woven.CASES))
@pytest.mark.parametrize("family", FAMILIES)
def test_two_waves_have_the_bits_of_one(reports: list[dict[str, Any]], family: str, name: str, dtype: str) -> None:
    for report in reports:
        found = report[f"{family} {name} {dtype}"]
        assert found["equal"]
        assert found["far"] < (1e-5 if dtype == "float32" else 0.05), "not what it is without a weave"
    assert found["waves"] == (0 if name in ("short", "many") else 2)


@pytest.mark.slow
def test_an_all_reduce_runs_while_the_other_wave_computes(reports: list[dict[str, Any]]) -> None:
    """Order of events: each wave computes between sending its part and waiting for the other's."""
    spans = [(wave, what) for wave, what in reports[0]["llama one float32"]["spans"]]
    a, b = [(0, "compute"), (0, "wait")], [(1, "compute"), (1, "wait")]
    assert spans[:3] == [a[0], b[0], a[1]] and spans.count(a[1]) == spans.count(b[1]) == 2 * LAYERS
    for place, span in enumerate(spans[:-2]):
        if span[1] == "wait":
            assert spans[place - 1] == (1 - span[0], "compute"), "nothing was computed meanwhile"


@pytest.mark.slow
def test_what_is_measured_is_agreed_on(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["tuned"] == reports[1]["tuned"]


def chunks(*sizes: int) -> list[SequenceChunk]:
    return [SequenceChunk(seq, range(size), [0] * size, DepthPlan.full(2)) for seq, size in enumerate(sizes)]


def test_cuts_are_behind_whole_blocks_and_tiles() -> None:
    weave = Weave([])
    weave.sizes = {128: True, 512: False}
    for sizes, wanted in (((128,), [[64], [64]]), ((231,), [[128], [103]]), ((96, 160), [[96], [160]]),
                              ((16, 16, 200, 3), [[16, 16, 64], [136, 3]]),
                          ((512,), [[512]]), ((127,), [[127]]), ((1, 1, 200, 1), [[1, 1, 200, 1]])):
        waves = weave.cut(chunks(*sizes))
        assert [[len(chunk.tokens) for chunk in wave] for wave in waves] == wanted
        for seq, size in enumerate(sizes):
            own = [chunk for wave in waves for chunk in wave if chunk.seq == seq]
            assert [token for chunk in own for token in chunk.tokens] == [*range(size)]
            assert [chunk.fed for chunk in own] == [0, len(own[0].tokens)][: len(own)]
            assert sum(chunk.wanted for chunk in own) == 1
    assert not weave.takes(chunks(127)) and weave.takes(chunks(100, 28))


def test_a_size_that_does_not_pay_or_differs_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    weave, clock = Weave([]), [0.0]
    monkeypatch.setattr(weaves.time, "perf_counter", lambda: clock[0])
    costs = {(128, True): 1.0, (128, False): 2.0, (256, True): 2.0, (256, False): 2.0, (512, True): 1.0,
             (512, False): 2.0}

    def run(size: int) -> torch.Tensor:
        cut = weave.sizes[size]
        clock[0] += costs[size, cut]
        return torch.tensor([float(size == 512 and cut)])  # whose bits differ at 512

    weave.tune(run, 600, lambda found: found)
    assert weave.sizes == {128: True, 256: False, 512: False}
