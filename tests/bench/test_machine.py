"""What is known about the machine: the roof, who else is busy, how much memory is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench_systems import SUBJECT
from shoal.bench import idle, memory, roof
from shoal.bench.subject import Subject
from shoal.bench.system import Setting


def proc(folder: Path, busy: int, own: dict[int, int]) -> Path:
    """A proc file system: `busy` ticks in all, half of them in the kernel, and `own` ticks per process."""
    folder.mkdir(parents=True)
    cpu = f"cpu  {busy // 2} 0 {busy - busy // 2} 5000 70 0 0 0 11 0"
    (folder / "stat").write_text(f"{cpu}\ncpu0 1 2 3\n", encoding="ascii")
    for pid, ticks in own.items():
        (folder / str(pid)).mkdir()
        fields = " ".join(["S", *["1"] * 10, str(ticks - 1), "1", "9", "9"])
        (folder / str(pid) / "stat").write_text(f"{pid} (a ) (b) {fields}", encoding="ascii")
    return folder


def test_what_others_use_is_all_less_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(idle, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(idle, "_ticks", lambda: 100)
    monkeypatch.setattr(idle.os, "getpid", lambda: 1)
    before = idle.snapshot([2], proc(tmp_path / "a", 10_000, {1: 1000, 2: 2000, 3: 7000}))
    after = idle.snapshot([2], proc(tmp_path / "b", 12_500, {1: 1500, 2: 3000, 3: 8000}))
    assert before is not None and before.busy == 100.0 and before.own == 30.0
    assert idle.others(before, after) == pytest.approx((25.0 - 15.0) / 10.0)


def test_nothing_is_claimed_where_nothing_is_known(tmp_path: Path) -> None:
    assert idle.snapshot([], tmp_path) is None
    some = idle.CpuTimes(1.0, 0.0, 0.0)
    assert idle.others(None, some) is None and idle.others(some, None) is None and idle.others(some, some) is None


def test_this_machine_can_be_watched() -> None:
    if not Path("/proc/stat").is_file():
        pytest.skip("there is no /proc/stat")
    seen = idle.watch(0.05)
    assert seen is not None and seen >= 0


def test_the_roof_counts_the_bytes_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 2.0, 2.0, 3.0, 7.0, 7.0])
    monkeypatch.setattr(roof, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert roof.read_bandwidth(5.0, size=2**16) == pytest.approx((2**16 / 2 + 2**16 / 4) / 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_loop_reads_everything(threads: int) -> None:
    parts = roof._cpu_loop(2**16, threads)()
    assert len(parts) == threads and sum(map(int, parts)) == 2**16 // 8


@pytest.mark.gpu
def test_the_roof_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    assert roof.read_bandwidth(0.1, "cuda") > 1e11


def test_memory_that_systems_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big, half = Subject(shape="7b"), 2**29
    plain, small = Setting("bfloat16"), Setting("bfloat16", "int4")
    assert memory.needed(big, [plain]) == pytest.approx(2 * 6.738e9 + half, rel=1e-3)
    assert memory.needed(big, [small] * 2) == pytest.approx(2 * (6.738e9 * 4.5 / 8 + half), rel=1e-3)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n", encoding="ascii")
    assert memory.available(tmp_path / "meminfo") == 2**21
    assert memory.available(tmp_path / "nothing") is None
    monkeypatch.setattr(memory, "available", lambda: 2**30)
    memory.check(SUBJECT, [Setting("float32")])
    memory.check(big, [Setting("bfloat16", device="cuda")])
    with pytest.raises(ValueError, match="need about 13 GiB at once, and 1 GiB are free; measure fewer"):
        memory.check(big, [Setting("bfloat16")])
