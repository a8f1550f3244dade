"""The kernels for ARM under qemu: they pass the kernels' own tests, and pack and multiply to the bits of AVX2."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

import emulated
from gguf_blocks import random_blocks
from shoal.model.gguf.header import GgmlType
from shoal.model.packed import native
from shoal.model.packed.native import library

PLAIN: tuple[native.Kind, ...] = ("fp32", "bf16", "fp16", "int8", "int4")
TOKENS = (1, 2, 3, 5, 8, 17, 64)
pytestmark = [
    pytest.mark.cross,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels' own tests are run without qemu here"),
]
Twice = Callable[[Callable[[], object]], tuple[object, object]]


def found(name: str) -> str:
    """The path of a tool; the test fails where there is none."""
    if path := shutil.which(name):
        return path
    why = f"there is no {name} here. `make cross` installs it on Debian as root"
    pytest.fail(f"ARM was not tested: {why}", pytrace=False)


def built(folder: Path, *more: str) -> list[str]:
    """The words behind `qemu-aarch64 -cpu NAME`."""
    words = emulated.built(folder, found("aarch64-linux-gnu-gcc"), "neon", *more)
    return ["-L", "/usr/aarch64-linux-gnu", *words]


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """For the library as it is used."""
    return built(tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="session")
def careful_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """For one that stops at accesses beyond what there is, and at undefined arithmetic."""
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1")
    return built(tmp_path_factory.mktemp("careful"), *flags)


@pytest.fixture
def command(words: list[str]) -> list[str]:
    """On a processor that has what the kernels need and nothing newer."""
    return [found("qemu-aarch64"), "-cpu", "neoverse-n1", *words]


@pytest.mark.parametrize(("file", "some"), [
    ("test_native.py", emulated.WITHOUT_LOADING),
    ("test_native_blocks.py", ""),
    ("test_native_forward.py", ""),
    ("test_native_chain.py", ""),
    ("test_native_argmax.py", ""),
    ("test_native_checks.py", ""),
    ("test_native_encode.py", "not threads"),
    ("test_native_long.py", "(bitmap or lent) and (seven or ragged)"),
    ("test_native_trees.py", "not many and all"),
    ("test_native_recurrent.py", "not threads or wide"),
    ("test_hybrids.py", "of_the_kernels and (qwen3_5 or jamba or nemotron_h or lfm2) and not biases"),
    ("test_recurrent_gemma.py", "of_the_kernels"),
    ("test_sambay_native.py", "of_the_formulas_however or random_schedules and (0 or 3) and not long"),
    ("test_experts.py",
     "of_the_kernels and (qwen3_moe or glm4_moe or granite4_moe or jamba_moe or nemotron_h_moe or gpt_oss)"),
    ("test_parity.py", "native"),
])
def test_the_tests_of_the_kernels(file: str, some: str, command: list[str]) -> None:
    emulated.passes(file, some, command)


@pytest.mark.parametrize(("file", "some"), [
    ("test_native.py", emulated.WITHOUT_LOADING),
    ("test_native_blocks.py", ""),
    ("test_native_forward.py", "not number_of_threads"),
    ("test_native_chain.py", "not number_of_threads"),
    ("test_native_argmax.py", "most or equals"),
    ("test_native_encode.py", "not threads"),
])
def test_memory_and_arithmetic(file: str, some: str, careful_words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    emulated.passes(file, some, [found("qemu-aarch64"), "-cpu", "neoverse-n1", *careful_words])


@pytest.fixture
def twice(command: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Twice]:
    """Does something with the library for ARM, then with the one for AVX2."""
    monkeypatch.setenv("SHOAL_NATIVE", "avx2")
    avx2, why = library._open.__wrapped__()
    assert avx2 is not None, why
    monkeypatch.setattr(torch.Tensor, "data_ptr", emulated.noted)

    def run(task: Callable[[], object]) -> tuple[object, object]:
        results = []
        for one in (arm, avx2):
            monkeypatch.setattr(library, "_open", lambda one=one: (one, ""))
            results.append(task())
        return results[0], results[1]

    with closing(emulated.Emulated(command)) as arm:
        yield run


def name_of(kind: native.Kind | GgmlType) -> str:
    return kind.name if isinstance(kind, GgmlType) else kind


def packed(kind: native.Kind | GgmlType) -> native.PackedWeight:
    """Rows of very different size, a row and a column of zeros."""
    if isinstance(kind, GgmlType):
        return native.pack_blocks(random_blocks(kind, 50, 512))
    matrix = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 50)[:, None]
    matrix[7], matrix[:, 31] = 0, 0
    return native.pack(matrix, kind)


@pytest.mark.parametrize("kind", [*PLAIN, *(one for one in GgmlType if not one.is_plain)], ids=name_of)
def test_the_bits_are_those_of_avx2(kind: native.Kind | GgmlType, twice: Twice) -> None:
    ours, weight = twice(lambda: packed(kind))
    assert torch.equal(ours.data, weight.data)
    assert weight.scales is None or torch.equal(ours.scales, weight.scales)
    assert torch.equal(*twice(lambda: weight.unpack(torch.bfloat16)))
    for tokens in TOKENS:
        x = torch.randn(tokens, weight.columns, generator=torch.Generator().manual_seed(tokens))
        x[-1, 64:128], x[0] = 0, x[0] * 1e4
        assert torch.equal(*twice(lambda x=x: native.matmul(x, weight))), tokens


@pytest.mark.parametrize(("cpu", "runs"), [("neoverse-n1", True), ("cortex-a72", False)])
def test_a_processor_without_products_of_bytes_is_refused(cpu: str, runs: bool, words: list[str]) -> None:
    with closing(emulated.Emulated([found("qemu-aarch64"), "-cpu", cpu, *words])) as one:
        missing, _ = one.ask("shoal_missing_feature", emulated.Block(()))
    assert (missing == 0) == runs
