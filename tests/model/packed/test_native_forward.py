"""The native forward against a decoder in float64 that runs one token at a time."""

from __future__ import annotations

import pytest
import torch

from native_reference import Case, NativeReference, Token, as_batch, make_reference, storage
from shoal.model.packed import native
from turns import by_turns

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

BOTH = native.ATTENTION | native.MLP


def chain(row: int, base: int, count: int, first: int = 0) -> list[Token]:
    start = first + 7 * row + 3 * base
    return [Token((start + 5 * n) % 70, base + n, row, n, tuple(range(n + 1))) for n in range(count)]


class Session:
    """Drives both decoders and compares them after every forward."""

    def __init__(self, case: Case, rows: int = 1, capacity: int = 48) -> None:
        self.slow: NativeReference = make_reference(case)
        self.keys, self.values = storage(case, rows, capacity)
        self.kv = self.slow.native.bind(self.keys, self.values)
        self.bases = dict.fromkeys(range(rows), 0)
        self.starts = {layer: dict.fromkeys(range(rows), 0) for layer in range(case.layers)}
        self.tolerance = 1e-5

    def step(self, tokens: list[Token], active: dict[int, list[int]] | None = None) -> torch.Tensor:
        """Run `tokens`, compare, and keep all of them (chains) as committed."""
        logits, fresh = self.compare(tokens, active)
        for (layer, row), entries in fresh.items():
            self.slow.committed(layer, row).extend(entries[node] for node in sorted(entries))
        for row in {token.row for token in tokens}:
            self.bases[row] += sum(token.row == row for token in tokens)
        return logits

    def compare(self, tokens: list[Token], active: dict[int, list[int]] | None = None) -> tuple[torch.Tensor, dict]:
        active = active or {layer: [BOTH] * len(tokens) for layer in range(self.slow.case.layers)}
        expected, fresh = self.slow.forward(tokens, active)
        logits = self.slow.native.forward(as_batch(tokens, self.bases, active, self.starts), self.kv, threads=2)
        error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < self.tolerance, error
        self.compare_storage(fresh)
        return logits, fresh

    def compare_storage(self, fresh: dict) -> None:
        for (layer, row), entries in fresh.items():
            for node, (_, key, value) in entries.items():
                column = self.bases[row] - self.starts[layer][row] + node
                for store, wanted in ((self.keys, key), (self.values, value)):
                    found = store[layer][row, :, column].double()
                    assert (found - wanted).norm() <= self.tolerance * (1 + wanted.norm())


CASES = {
    "plain": Case(),
    "one kv head, wide head": Case(heads=6, kv_heads=1, head_dim=64, rotary_dim=64),
    "as many kv heads": Case(heads=3, kv_heads=3, head_dim=32, rotary_dim=32),
    "three per kv head": Case(heads=9, kv_heads=3, head_dim=32, rotary_dim=32),
    "head dim 128": Case(heads=8, kv_heads=1, head_dim=128, rotary_dim=128),
    "ragged head dim": Case(heads=4, kv_heads=2, head_dim=20, rotary_dim=12),
    "odd sizes": Case(hidden=50, ffn=37, vocab=71),
    "widths of their own": Case(biases=True, ffns=(37, 112, 53)),
    "widths of their own, gate and up apart": Case(biases=True, ffns=(112, 48, 80), apart=True),
    "biases": Case(biases=True, hidden=50, ffn=37, vocab=71),
    "head norms": Case(head_norms=True),
    "apart": Case(apart=True, biases=True),
    "scales": Case(scales=(0.22, 12.0, 0.125)),
    "gelu": Case(activation="gelu_tanh"),
    "own embedding": Case(embedding=True),
    "some layers without rotary": Case(no_rotary=(1,)),
    "windows": Case(windows=(5, None, 3)),
    "norms on both sides": Case(norms=(True, True), scales=(0.7, 12.0, 1.0)),
    "norms of outputs alone": Case(norms=(False, True), biases=True, hidden=50, ffn=37, vocab=71),
    "states wider than queries, keys and values": Case(norms=(True, True), hidden=100, heads=2, kv_heads=1),
    "norms over all heads": Case(head_norms=True, wide_norms=True),
    "norms over three heads of ragged size": Case(head_norms=True, wide_norms=True, heads=3, kv_heads=1, head_dim=20),
    "soft caps": Case(caps=(0.6, 2.5)),
    "gemma": Case(norms=(True, True), head_norms=True, activation="gelu_tanh", heads=2, kv_heads=1, head_dim=256,
                  rotary_dim=256, windows=(5, 5, None), scales=(1.0, 6.9, 1.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_chains_of_one_row(name: str) -> None:
    session = Session(CASES[name])
    for count in (7, 1, 1, 3, 12):
        session.step(chain(0, session.bases[0], count))


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_quantised_weights_run_the_same_forward(kind: str) -> None:
    session = Session(Case(kind=kind, hidden=64, ffns=(96, 160, 64), head_dim=32, rotary_dim=32))
    session.tolerance = 0.05
    for count in (5, 1, 9):
        session.step(chain(0, session.bases[0], count))


@pytest.mark.parametrize("head_dim", [32, 64, 36])
def test_bf16_cache(head_dim: int) -> None:
    session = Session(Case(kv_dtype=torch.bfloat16, head_dim=head_dim, rotary_dim=head_dim, windows=(None, 6, None)))
    session.tolerance = 0.02
    for count in (5, 1, 1, 9, 2):
        session.step(chain(0, session.bases[0], count))


def test_long_context_is_cut_into_splits() -> None:
    session = Session(Case(layers=1, windows=(None,), positions=1200), capacity=1200)
    for _ in range(17):
        session.step(chain(0, session.bases[0], 64))
    session.step(chain(0, session.bases[0], 1))


@pytest.mark.slow
def test_long_context_with_a_window() -> None:
    session = Session(Case(layers=1, windows=(530,), positions=1200), capacity=1200)
    for _ in range(17):
        session.step(chain(0, session.bases[0], 64))


@pytest.mark.parametrize("window", [None, 40, 530])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_more_tokens_at_once_than_a_tree_has_nodes(window: int | None, kv_dtype: torch.dtype) -> None:
    """Pieces of a prompt, against the decoder in float64, and bit for bit against pieces of any other size."""
    case = Case(layers=2, windows=(None, window), positions=700, kv_dtype=kv_dtype)
    session = Session(case, capacity=700)
    session.tolerance = 1e-5 if kv_dtype == torch.float32 else 0.02

    def piece(base: int, count: int) -> list[Token]:
        return [Token((base + n) * 11 % 70, base + n, 0, n, tuple(range(n + 1))) for n in range(count)]

    last = [session.step(piece(session.bases[0], count))[-1] for count in (65, 256, 3, 200)]
    kv, base, found = session.slow.native.bind(*storage(case, 1, 700)), 0, {}
    for count in (64, 1, 40, 63, 64, 64, 25, 3, 64, 64, 64, 8):
        active = {layer: [BOTH] * count for layer in range(2)}
        logits = session.slow.native.forward(as_batch(piece(base, count), {0: base}, active), kv)
        base += count
        found[base] = logits[-1]
    assert all(torch.equal(one, found[end]) for one, end in zip(last, (65, 321, 324, 524), strict=True))


def test_rows_of_different_lengths() -> None:
    session = Session(Case(windows=(None, 4, None)), rows=4)
    session.step(chain(0, 0, 5) + chain(2, 0, 9))
    session.step(chain(0, 5, 1) + chain(1, 0, 3) + chain(2, 9, 2))
    session.step(chain(1, 3, 1) + chain(3, 0, 1))


TREE = [(), (0,), (0,), (0, 1), (0, 2), (0, 1, 3), (0, 1)]


@pytest.mark.parametrize("windows", [(None, None, None), (4, 2, None)])
def test_trees(windows: tuple[int | None, ...]) -> None:
    session = Session(Case(windows=windows), rows=2)
    session.step(chain(0, 0, 6) + chain(1, 0, 3))
    tokens = []
    for row in (0, 1):
        for node, above in enumerate(TREE):
            tokens.append(Token(10 + node + 9 * row, session.bases[row] + len(above), row, node, (*above, node)))
    session.compare(tokens)


def test_layers_that_tokens_skip() -> None:
    session = Session(Case(), rows=2)
    session.step(chain(0, 0, 4) + chain(1, 0, 2))
    tokens = chain(0, 4, 3) + chain(1, 2, 2)
    session.step(tokens, {0: [3, 3, 3, 3, 3], 2: [3, 3, 0, 3, 0]})
    session.bases = {0: 7, 1: 4}
    session.compare(chain(0, 7, 2), {0: [3, 3]})


def test_sublayers_that_tokens_skip() -> None:
    session = Session(Case(), rows=2)
    session.step(chain(0, 0, 4) + chain(1, 0, 2))
    tokens = chain(0, 4, 3) + chain(1, 2, 2)
    session.compare(tokens, {0: [3, 3, 1, 3, 2], 1: [2, 2, 2, 0, 0], 2: [1, 1, 1, 3, 2]})


def test_evicted_positions() -> None:
    session = Session(Case(windows=(5, 5, None)))
    session.step(chain(0, 0, 12))
    for layer in (0, 1):
        for store in (session.keys, session.values):
            store[layer][:, :, :8] = store[layer][:, :, 4:12].clone()
        session.starts[layer][0] = 4
    session.step(chain(0, 12, 3))


def test_no_layer_at_all() -> None:
    session = Session(Case())
    active: dict[int, list[int]] = {}
    tokens = chain(0, 0, 2)
    expected, _ = session.slow.forward(tokens, active)
    logits = session.slow.native.forward(as_batch(tokens, session.bases, active), session.kv)
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-5)


GEMMA = {"norms": (True, True), "caps": (0.6, 2.5), "head_norms": True, "wide_norms": True}


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, GEMMA], ids=["plain", "norms and caps"])
def test_a_block_is_bitwise_equal_to_its_tokens_one_by_one(kind: str, kv_dtype: torch.dtype, more: dict) -> None:
    case = Case(kind=kind, kv_dtype=kv_dtype, hidden=64, head_dim=32, rotary_dim=32, windows=(None, 7, None), **more)
    slow = make_reference(case)
    blocks, singles = (slow.native.bind(*storage(case, 1, 40)) for _ in range(2))
    base = 0
    for count in (1, 5, 16, 3, 9):
        tokens = chain(0, base, count)
        active = {layer: [BOTH] * count for layer in range(3)}
        together = slow.native.forward(as_batch(tokens, {0: base}, active), blocks, threads=2)
        for index, token in enumerate(tokens):
            alone = Token(token.id, token.position, 0, 0, (0,))
            one = {layer: [BOTH] for layer in range(3)}
            logits = slow.native.forward(as_batch([alone], {0: base + index}, one), singles, threads=1)
            assert torch.equal(logits[0], together[index])
        base += count


@by_turns("threads, kind", [2, 3, 8, 64], ["fp32", "int4"])
def test_any_number_of_threads_gives_the_same_bits(kind: str, threads: int) -> None:
    """More threads than processors wait for each other and take of each other's shares."""
    case = Case(kind=kind, hidden=320, ffn=352, heads=6, kv_heads=3, vocab=700, windows=(None, 7, None))
    slow = make_reference(case)
    tokens = chain(0, 0, 9) + chain(1, 0, 1) + chain(2, 0, 14) + chain(4, 0, 2)
    batch = as_batch(tokens, dict.fromkeys(range(5), 0), {layer: [BOTH] * len(tokens) for layer in range(3)})
    stored = [storage(case, 5, 40) for _ in range(2)]
    kept = [slow.native.bind(*one) for one in stored]
    alone = slow.native.forward(batch, kept[0], threads=1)
    for _ in range(10):
        assert torch.equal(slow.native.forward(batch, kept[1], threads=threads), alone)
        for ours, theirs in zip(stored[0], stored[1], strict=True):
            assert all(map(torch.equal, ours, theirs))
