"""What memory groups leave a process, on files as Linux writes them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import heap
from shoal.heap import left_by_groups

OLD = "9:name=systemd:/\n4:cpu,memory:/outer/inner\n1:cpuset:/\n0::/\n"
NEW = "0::/outer/inner\n"


def group(folder: Path, facts: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in facts.items():
        (folder / name).write_text(text, "ascii")


def old(folder: Path, limit: int, used: int, files: int) -> None:
    stat = f"cache 7\nactive_file 1\ninactive_file 1\ntotal_active_file {files - 10}\ntotal_inactive_file 10\n"
    group(folder, {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat})


def new(folder: Path, limit: str, used: int, files: int) -> None:
    group(folder, {"memory.max": f"{limit}\n", "memory.current": f"{used}\n",
                   "memory.stat": f"anon 5\nactive_file {files - 10}\ninactive_file 10\n"})


def test_version_1(tmp_path: Path) -> None:
    old(tmp_path / "memory" / "outer" / "inner", 1000, 600, 100)
    old(tmp_path / "memory" / "outer", 2000, 1900, 300)
    old(tmp_path / "memory", 1 << 62, 0, 10)
    assert sorted(left_by_groups(OLD, tmp_path)) == [400, 500, (1 << 62) + 10]


def test_version_2(tmp_path: Path) -> None:
    new(tmp_path / "outer" / "inner", "max", 600, 100)
    new(tmp_path / "outer", "2000", 1900, 300)
    (tmp_path / "cgroup.controllers").write_text("memory", "ascii")  # the root has no limit
    assert list(left_by_groups(NEW, tmp_path)) == [400]


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    old(tmp_path / "memory", 1000, 600, 100)
    assert list(left_by_groups(OLD, tmp_path)) == [500]


def test_nothing_is_left_of_a_full_group(tmp_path: Path) -> None:
    new(tmp_path / "outer", "100", 900, 10)
    assert list(left_by_groups(NEW, tmp_path)) == [0]


def test_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = heap.available()
    if whole is None:
        pytest.skip("the system does not say")
    monkeypatch.setattr(heap, "left_by_groups", lambda *_: iter([1 << 62, 12345]))
    assert heap.available() == 12345
    monkeypatch.setattr(heap, "left_by_groups", lambda *_: iter([1 << 62]))
    assert abs((heap.available() or 0) - whole) < 2 << 30


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_large_blocks_are_mapped_even_after_others_were_freed() -> None:
    """In a process of its own, as glibc never forgets it. The twin shows what glibc does by itself."""
    code = """if True:
        import ctypes, re, sys
        from shoal import heap
        if sys.argv[1] == "mapped":
            heap.map_large_blocks(4 << 20)
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        libc.free(libc.malloc(ctypes.c_size_t(16 << 20)))
        block = libc.malloc(ctypes.c_size_t(8 << 20))
        libc.free(block)
        maps = re.findall("^([0-9a-f]+)-([0-9a-f]+) ", open("/proc/self/maps").read(), re.MULTILINE)
        print(any(int(first, 16) <= block < int(end, 16) for first, end in maps))
    """

    def kept(how: str) -> str:
        found = subprocess.run([sys.executable, "-c", code, how], check=True, capture_output=True, text=True)
        return found.stdout.strip()

    assert (kept("mapped"), kept("not")) == ("False", "True")


def test_what_has_settled_is_not_walked_again() -> None:
    """In a process of its own, since it holds for good. What comes later is collected as ever."""
    code = """if True:
        import gc, weakref
        from shoal import heap
        class Node:
            pass
        lost = Node()
        lost.itself, seen = lost, weakref.ref(lost)
        del lost
        heap.settle()
        known = gc.get_freeze_count()
        late = Node()
        late.itself, later = late, weakref.ref(late)
        del late
        gc.collect()
        print(seen() is None, known > 1000, len(gc.get_objects()) < 100, later() is None)
    """
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["True"] * 4
