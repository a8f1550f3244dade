"""Facts about the machine: bandwidth, other busy processes, free memory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from bench_systems import MODEL
from shoal_lab.bench import bandwidth, idle, process
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.speed import memory, starters
from shoal_lab.bench.system import Setting


def proc(folder: Path, busy: int, own: dict[int, int]) -> str:
    """A proc file system with `busy` ticks in total, half of them in the kernel, and `own` ticks per process."""
    folder.mkdir(parents=True)
    cpu = f"cpu  {busy // 2} 0 {busy - busy // 2} 5000 70 0 0 0 11 0"
    (folder / "stat").write_text(f"{cpu}\ncpu0 1 2 3 4 5 6 7 8 9 10\nbtime 1700000000\n", encoding="ascii")
    for pid, ticks in own.items():
        one = folder / str(pid)
        one.mkdir()
        fields = " ".join(["S", *["1"] * 10, str(ticks - 1), "1", *["9"] * 40])
        (one / "stat").write_text(f"{pid} (a ) (b) {fields}", encoding="ascii")
        (one / "statm").write_text("5000 1000 300 1 0 400 0", encoding="ascii")
        (one / "smaps_rollup").write_text(_ROLLUP, encoding="ascii")
        (one / "io").write_text("rchar: 7\nwchar: 6\nsyscr: 5\nsyscw: 4\nread_bytes: 4096\nwrite_bytes: 3\n"
                                "cancelled_write_bytes: 0\n", encoding="ascii")
    return str(folder)


_ROLLUP = """00400000-7fff0000 ---p 00000000 00:00 0                          [rollup]
Rss:                4000 kB
Pss:                3500 kB
Shared_Clean:        700 kB
Shared_Dirty:        300 kB
Private_Clean:       900 kB
Private_Dirty:      2100 kB
"""


def test_what_others_use_is_all_less_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(idle, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(idle, "os", SimpleNamespace(getpid=lambda: 1))
    monkeypatch.setattr(psutil._pslinux, "CLOCK_TICKS", 100)
    monkeypatch.setattr(psutil, "PROCFS_PATH", proc(tmp_path / "a", 10_000, {1: 1000, 2: 2000, 3: 7000}))
    before = idle.snapshot([2])
    monkeypatch.setattr(psutil, "PROCFS_PATH", proc(tmp_path / "b", 12_500, {1: 1500, 2: 3000, 3: 8000}))
    after = idle.snapshot([2])
    assert before is not None and before.busy == 100.0 and before.own == 30.0
    assert idle.others(before, after) == pytest.approx((25.0 - 15.0) / 10.0)
    assert process.cpu_seconds(3) == 80.0


def test_what_a_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", proc(tmp_path / "a", 10_000, {os.getpid(): 10, 3: 10}))
    page = os.sysconf("SC_PAGE_SIZE")
    assert process.resident(3) == process.resident() == 1000 * page
    assert starters._memory() == {"pss_bytes": 3500 * 1024, "private_bytes": 3000 * 1024,
                                  "shared_bytes": 1000 * page - 3000 * 1024, "disk_bytes": 4096}


def test_nothing_is_claimed_where_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", proc(tmp_path / "a", 10_000, {os.getpid(): 10}))
    assert idle.snapshot([]) is not None and idle.snapshot([7]) is None
    assert process.cpu_seconds(7) is None and process.resident(7) is None
    some = idle.CpuTimes(1.0, 0.0, 0.0)
    assert idle.others(None, some) is None and idle.others(some, None) is None and idle.others(some, some) is None


def test_this_machine_can_be_watched() -> None:
    seen = idle.watch(0.05)
    assert seen is not None and seen >= 0


def test_the_roof_counts_the_bytes_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 2.0, 2.0, 3.0, 7.0, 7.0])
    monkeypatch.setattr(bandwidth, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert bandwidth.read_bandwidth(5.0, size=2**16) == pytest.approx((2**16 / 2 + 2**16 / 4) / 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_loop_reads_everything(threads: int) -> None:
    parts = bandwidth._cpu_loop(2**16, threads)()
    assert len(parts) == threads and sum(map(int, parts)) == 2**16 // 8


@pytest.mark.gpu
def test_the_roof_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    assert bandwidth.read_bandwidth(0.1, "cuda") > 1e11


def test_memory_that_systems_need(monkeypatch: pytest.MonkeyPatch) -> None:
    big, half = MeasuredModel(shape="7b"), 2**29
    plain, small = Setting("bfloat16"), Setting("bfloat16", "int4")
    assert memory.needed(big, [plain]) == pytest.approx(2 * 6.738e9 + half, rel=1e-3)
    tables = 2 * 32_000 * 4096
    assert memory.needed(big, [small] * 2) == pytest.approx(2 * ((6.738e9 * 4.5 + tables * 4) / 8 + half), rel=1e-3)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    memory.check(MODEL, [Setting("float32")])
    memory.check(big, [Setting("bfloat16", device="cuda")])
    with pytest.raises(ValueError, match="need about 13 GiB at once, and 1 GiB are free; measure fewer"):
        memory.check(big, [Setting("bfloat16")])
