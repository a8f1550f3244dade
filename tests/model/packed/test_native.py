"""The native matrices: packing against plain arithmetic, products against the same numbers in float64."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.model.packed import native
from shoal.model.packed.native import build, library

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

KINDS = ("fp32", "bf16", "int8", "int4")
GROUP = {"int8": 64, "int4": 32}
SHAPES = [(64, 128), (50, 77), (1, 1), (17, 33), (80, 576), (33, 1100)]


def matrix(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Rows of very different size, so that a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator) * torch.logspace(-2, 1, rows)[:, None]


def grouped(x: Tensor, group: int) -> Tensor:
    """[..., groups, group], padded by zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def quantised(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Activations as the kernels take them: whole numbers [T, groups, group] and scales [T, groups]."""
    parts = grouped(x, group)
    peaks = parts.abs().amax(-1)
    inverse = torch.where(peaks > 0, 127.0 / peaks, 0.0)
    return (parts * inverse[..., None]).round(), peaks / 127.0


def product(x: Tensor, packed: native.PackedWeight) -> Tensor:
    """What the kernel should compute, in float64."""
    weight = packed.unpack().double()
    if packed.kind in GROUP:
        levels, scales = quantised(x, GROUP[packed.kind])
        x = (levels.double() * scales.double()[..., None]).flatten(-2)[:, : packed.columns]
    elif packed.kind == "bf16":
        x = x.bfloat16()
    return x.double() @ weight.T


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: native.Kind, shape: tuple[int, int]) -> None:
    packed = native.pack(matrix(*shape), kind)
    for tokens in (*range(1, 17), 23, 64):
        x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens))
        error = (native.matmul(x, packed) - product(x, packed)).abs()
        size = product(x, packed).abs().amax(0) + x.norm(dim=-1, keepdim=True) * packed.unpack().norm(dim=-1).double()
        assert (error <= 1e-6 * size).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_its_neighbours(kind: native.Kind) -> None:
    packed = native.pack(matrix(80, 300), kind)
    x = torch.randn(64, 300)
    alone = torch.cat([native.matmul(x[i : i + 1], packed) for i in range(64)])
    for tokens in range(1, 65):
        assert torch.equal(native.matmul(x[:tokens], packed), alone[:tokens])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_a_forward_has_are_as_in_pieces(kind: native.Kind, threads: int) -> None:
    packed, x, bias = native.pack(matrix(80, 300), kind), torch.randn(1000, 300), torch.randn(80)
    pieces = torch.cat([native.matmul(part, packed) for part in x.split(250)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tokens in (257, 512, 513, 1000):
            assert torch.equal(native.matmul(x[:tokens], packed), pieces[:tokens])
        assert torch.equal(native.matmul(x, packed, bias), pieces + bias)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_a_product(kind: native.Kind) -> None:
    packed, x = native.pack(matrix(200, 96), kind), torch.randn(3, 96)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(native.matmul(x, packed))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_floats_come_back(kind: native.Kind, dtype: torch.dtype, paired: bool) -> None:
    weight = matrix(74, 130).to(dtype)
    wanted = weight if kind == "fp32" else weight.bfloat16()
    packed = native.pack(weight, kind, paired=paired)
    assert torch.equal(packed.unpack(torch.float32), wanted.float())
    assert torch.equal(packed.unpack(torch.bfloat16), wanted.bfloat16())


@pytest.mark.parametrize("paired", [False, True])
def test_int8_is_nearest(paired: bool) -> None:
    weight = matrix(74, 130)
    found = native.pack(weight, "int8", paired=paired).unpack()
    steps = (grouped(weight, 64).abs().amax(-1) / 127).repeat_interleave(64, -1)[:, :130]
    assert ((found - weight).abs() <= 0.502 * steps + 1e-9).all()


@pytest.mark.parametrize("paired", [False, True])
def test_int4_beats_the_plain_scale(paired: bool) -> None:
    weight = matrix(74, 130)
    found = native.pack(weight, "int4", paired=paired).unpack()
    parts = grouped(weight, 32)
    scale = parts.abs().amax(-1, keepdim=True) / 7
    plain = ((parts / scale).round().clamp(-8, 7) * scale).flatten(-2)[:, :130]
    errors = [((guess - weight) ** 2).sum(-1) for guess in (found, plain)]
    assert (errors[0] <= errors[1] * 1.0001).all()
    assert errors[0].sum() < 0.9 * errors[1].sum()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_extreme_groups(kind: native.Kind) -> None:
    """Nothing but zeros, values below the range of fp16 scales, and one peak."""
    weight = torch.zeros(16, 128)
    weight[1], weight[2, 5], weight[3] = 1e-12, 3.0, 1e-3
    found = native.pack(weight, kind).unpack()
    assert torch.isfinite(found).all() and (found[:2] == 0).all()
    assert torch.allclose(found[2:], weight[2:], rtol=2e-3)
    assert (native.matmul(torch.zeros(2, 128), native.pack(weight, kind)) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_looked_up(kind: native.Kind) -> None:
    packed = native.pack(matrix(70, 300), kind)
    rows = torch.tensor([0, 69, 16, 3, 3, 64])
    assert torch.equal(packed.lookup(rows), packed.unpack()[rows])
    with pytest.raises(ValueError, match="69"):
        packed.lookup(torch.tensor([70]))


def test_other_float_types_and_strides_pass_through() -> None:
    weight = matrix(30, 40).half()
    assert torch.equal(native.pack(weight, "fp32").unpack(), weight.float())
    assert torch.equal(native.pack(weight.T, "fp32").unpack(), weight.T.float())


def test_an_arena_packs_matrices_side_by_side() -> None:
    arena = native.Arena(slab=1 << 20)
    weights = [matrix(48, 64, seed) for seed in range(5)] + [matrix(600, 512)]
    packed = [native.pack(weight, "fp32", arena=arena) for weight in weights]
    assert all(torch.equal(one.unpack(), weight) for one, weight in zip(packed, weights, strict=True))
    first, second = (one.data.data_ptr() for one in packed[:2])
    assert second - first == packed[0].nbytes


def test_bytes_are_counted() -> None:
    sizes = {kind: native.pack(matrix(64, 128), kind).nbytes for kind in KINDS}
    assert sizes == {"fp32": 32768, "bf16": 16384, "int8": 8192 + 256, "int4": 4096 + 512}


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        (torch.ones(2, 2), "int3", "int3"),
        (torch.ones(2, 2, dtype=torch.int32), "fp32", "int32"),
        (torch.ones(4), "fp32", r"\[4\]"),
        (torch.ones(0, 4), "fp32", r"\[0, 4\]"),
        (torch.ones(2, 2, device="meta"), "fp32", "meta"),
    ],
)
def test_what_cannot_be_packed(weight: Tensor, kind: native.Kind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.pack(weight, kind)


def test_wrong_operands() -> None:
    packed = native.pack(matrix(8, 4), "fp32")
    for x in (torch.ones(1, 5), torch.ones(4), torch.ones(0, 4)):
        with pytest.raises(ValueError, match="it must be"):
            native.matmul(x, packed)
    with pytest.raises(ValueError, match="bias"):
        native.matmul(torch.ones(1, 4), packed, torch.ones(7))
    with pytest.raises(ValueError, match="paired"):
        native.matmul(torch.ones(1, 4), native.pack(matrix(8, 4), "fp32", paired=True))
    with pytest.raises(ValueError, match="even"):
        native.pack(matrix(7, 4), "fp32", paired=True)


def test_structures_have_the_size_that_the_library_expects() -> None:
    sizes = (ctypes.c_int64 * 16)()
    library.require().shoal_sizes(sizes)
    mirrors = (library.Weight, library.LayerStruct, library.Model, library.BatchStruct, library.Own,
               library.ChainStruct, library.ChoiceStruct, library.RecurrenceStruct, library.StepsStruct,
               library.ExpertsStruct, library.LatentStruct, library.ForesightStruct, library.AlternationStruct,
               library.LowRankStruct, library.AdapterStruct, library.SourceStruct)
    assert list(sizes) == [ctypes.sizeof(mirror) for mirror in mirrors]


@pytest.mark.slow
def test_one_openmp_runtime() -> None:
    """In a process of its own: other libraries that a test has imported bring theirs."""
    code = (
        "import pathlib; from shoal.model.packed import native; assert native.available(); "
        "print(pathlib.Path('/proc/self/maps').read_text())"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len({line.split()[-1] for line in lines if build._RUNTIME.search(line)}) == 1


def test_a_failed_build_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_BASE", ("-no-such-option",))
    loaded, reason = library._open.__wrapped__()
    assert loaded is None and "no-such-option" in reason
    monkeypatch.setenv("PATH", "")
    loaded, reason = library._open.__wrapped__()
    assert loaded is None and "compiler" in reason


def test_a_compile_is_told_once_as_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("""#!/bin/sh
[ "$1" = --version ] && exec echo fake
while [ "$1" != -o ]; do shift; done
echo "the compiler speaks"
: > "$2"
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    begun, own = list[str](), build._compile
    monkeypatch.setattr(build, "_compile", lambda *given: (begun.append(told()), own(*given)))

    def told() -> str:
        out, error = capfd.readouterr()
        assert out == "", "stdout is for answers"
        return str(error)

    library = build.build("avx2")
    assert library.is_file() and told() == ""
    assert [line.count("\n") for line in begun] == [1] and "(avx2): about half a minute" in begun[0]
    assert build.build("avx2") == library and told() == "", "what is kept is not compiled"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.build("avx2")
    assert told() == ""


FULL = "fpu avx2 fma bmi2 avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 avx512_vbmi2"
UNITS = f"{FULL} amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(("flags", "chosen", "expected"), [
    (UNITS, "", "amx"), (UNITS, "avx512", "avx512"), (f"{FULL} amx_tile", "", "avx512"),
    (UNITS.replace("_vbmi2", ""), "", "avx2"),
    (FULL, "", "avx512"), (FULL, "avx2", "avx2"), (FULL.replace(" avx512_bf16", ""), "", "avx2"),
    ("fpu avx2", "", "avx2"), ("fpu avx2", "avx512", "avx512"), (None, "", "avx2"),
])
def test_the_vectors_follow_the_processor_or_the_wish(
    monkeypatch: pytest.MonkeyPatch, flags: str | None, chosen: str, expected: str
) -> None:
    lines = [] if flags is None else ["model name\t: any", f"flags\t\t: {flags}"]
    monkeypatch.setattr(build, "_cpuinfo", lambda: lines)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("SHOAL_NATIVE", chosen)
    assert build.vector_sets()[0] == expected


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the first choices are for x86-64")
def test_narrower_vectors_where_the_compiler_knows_no_better(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first set that can be compiled and that the processor has."""
    monkeypatch.setattr(build, "_cpuinfo", lambda: [f"flags : {UNITS}"])
    monkeypatch.setattr(build, "_VECTORS", {**build._VECTORS, "amx": ("-mno-such-units",), "avx512": ("-mno-such",)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_NATIVE", raising=False)
    with caplog.at_level("INFO", logger=library.__name__):
        loaded, reason = library._open.__wrapped__()
    assert loaded is not None and loaded.shoal_vectors() == b"avx2" and reason == ""
    assert "no kernels for amx" in caplog.text and "no kernels for avx512" in caplog.text


ARM = "fp asimd evtstrm aes atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"


@pytest.mark.parametrize(("machine", "features", "chosen", "expected"), [
    ("aarch64", ARM, "", "neon"), ("aarch64", ARM, "neon", "neon"), ("aarch64", "", "neon", "neon"),
    ("aarch64", ARM.replace(" asimddp", ""), "", "the processor lacks asimddp"),
    ("aarch64", "", "", "the processor lacks asimd and asimddp"),
    ("aarch64", ARM, "avx2", "SHOAL_NATIVE is 'avx2'; it must be neon, or not be set"),
    ("x86_64", FULL, "neon", "SHOAL_NATIVE is 'neon'; it must be amx or avx512 or avx2, or not be set"),
    ("riscv64", "", "", "the kernels are for Linux on x86_64 and aarch64, not Linux on riscv64"),
])
def test_other_families_of_processors(
    monkeypatch: pytest.MonkeyPatch, machine: str, features: str, chosen: str, expected: str
) -> None:
    lines = ["processor\t: 0", "BogoMIPS\t: 50.00", f"Features\t: {features}", "CPU implementer\t: 0x41"]
    monkeypatch.setattr(build, "_cpuinfo", lambda: lines)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setenv("SHOAL_NATIVE", chosen)
    if expected == "neon":
        assert build.vector_sets() == [expected]
    else:
        loaded, reason = library._open.__wrapped__()
        assert loaded is None and reason == expected


def test_a_wheel_for_arm_has_the_one_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(build, "_compile", lambda *argv: made.append(argv))
    monkeypatch.setattr(build, "_cpuinfo", lambda: [f"Features : {ARM}"])
    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.delenv("SHOAL_NATIVE", raising=False)
    (target,) = build.build_ahead(tmp_path / build.PREBUILT)
    assert [argv[1:4] for argv in made] == [("neon", "generic", ["-Wl,--strip-all"])]
    assert build.prebuilt("neon") is None
    target.parent.mkdir()
    target.touch()
    assert build.prebuilt("neon") == target


def test_a_wish_for_other_vectors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NATIVE", "sse2")
    loaded, reason = library._open.__wrapped__()
    assert loaded is None and reason == "SHOAL_NATIVE is 'sse2'; it must be amx or avx512 or avx2, or not be set"


def narrower() -> list[str]:
    """What this processor has beside what was chosen for it."""
    return build.vector_sets()[1:] if native.available() and native.vector_set() == build.vector_sets()[0] else []


@pytest.mark.parametrize(
    "vectors", [*(pytest.param(name, marks=pytest.mark.slow) for name in narrower()[:-1]), *narrower()[-1:]])
@pytest.mark.slow
def test_narrower_vectors_on_a_processor_with_wide_ones(vectors: str) -> None:
    some = ("test_products or floats_come_back or chains_of_one_row or quantised_weights or bf16_cache "
            "or number_of_threads")
    files = [str(Path(__file__).with_name(name)) for name in ("test_native.py", "test_native_forward.py")]
    argv = ["-q", "-p", "no:cacheprovider", "-k", some, *files]
    environment = {**os.environ, "SHOAL_NATIVE": vectors, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-m", "pytest", *argv], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-3000:]


ALL_BITS = """
import hashlib, sys, torch
from gguf_blocks import random_blocks
from shoal.model.gguf.header import GgmlType
from shoal.model.packed import native
found = hashlib.sha256(native.vector_set().encode() if len(sys.argv) > 1 else b"")
def add(packed, cols):
    generator = torch.Generator().manual_seed(cols)
    for tokens in (1, 3, 8, 12, 13, 16, 17, 27, 36, 64, 100):
        x = torch.randn(tokens, cols, generator=generator)
        x[torch.rand(x.shape, generator=generator) < 1e-3] *= 100  # values that stand out are rounded otherwise
        found.update(native.matmul(x, packed).numpy().tobytes())
for kind, cols in (("int8", 1100), ("int4", 600), ("int4", 2080)):
    add(native.pack(torch.randn(50, cols, generator=torch.Generator().manual_seed(1)), kind), cols)
for type_ in GgmlType:
    if not type_.is_plain:
        add(native.pack_blocks(random_blocks(type_, 50, 1280)), 1280)
print(found.hexdigest())
"""


@pytest.mark.skipif(not native.available() or native.vector_set() != "amx", reason="no tile units here")
@pytest.mark.parametrize("names", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bits", "names"])
def test_the_tile_units_give_the_bits_of_the_vectors(names: bool) -> None:
    """Integers within a group are exact, and groups are added in one order; the names tell that two libraries ran."""
    argv, jobs = ["names"] * names, list[subprocess.Popen[str]]()
    for vectors in ("amx", "avx512"):
        environment = {**os.environ, "SHOAL_NATIVE": vectors, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", ALL_BITS, *argv]
        jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    amx, avx512 = (job.communicate()[0] for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0] and amx and avx512
    assert (amx == avx512) is not names


@pytest.mark.slow
def test_where_no_folder_can_be_written_the_library_is_the_processs_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shoal").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded, reason = library._open.__wrapped__()
    assert loaded is not None and not reason
    assert "compiled for this process alone" in caplog.text


@pytest.mark.slow
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    code = "from shoal.model.packed import native; assert native.available(), native.why_not()"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    jobs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0]
    assert len(list((tmp_path / "shoal" / "native").iterdir())) == 1
