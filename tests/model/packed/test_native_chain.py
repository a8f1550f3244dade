"""Guesses that a model adds to a batch within one call, against a decoder in float64 that is asked token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from native_reference import Case, NativeReference, Token, chain_batch, make_reference, rms_norm, storage
from shoal.model.packed import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

CASES = {
    "plain": Case(),
    "odd sizes": Case(hidden=50, ffn=37, vocab=71),
    "windows": Case(windows=(5, None, 3)),
    "bf16 cache": Case(kv_dtype=torch.bfloat16),
    "one layer": Case(layers=1, windows=(None,), heads=3, kv_heads=3),
}
BOTH = native.ATTENTION | native.MLP
LENGTHS = (5, 1, 3)
DRAWS = {"likeliest": (0.0, 0.0, 0.0), "drawn": (1.0, 0.4, 2.5), "some drawn": (0.0, 1.5, 1.0)}
"""Temperatures of the rows."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Asked:
    """A model of three rows, the same twice, with what its vectors are made of."""

    case: Case
    temperatures: tuple[float, ...] = DRAWS["likeliest"]
    slow: NativeReference = field(init=False)
    states: list[Tensor] = field(default_factory=list)
    bases: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(3), 0))

    def __post_init__(self) -> None:
        case = self.case = replace(self.case, embedding=True)
        self.slow = make_reference(case)
        matrix = native.pack(draw(case.hidden, case.hidden, seed=5) / math.sqrt(case.hidden), "fp32")
        self.matrix, self.shares = matrix.unpack().double(), draw(case.vocab, case.hidden, seed=6)
        self.norm = 1 + 0.3 * draw(case.hidden, seed=7)
        self.chain = native.NativeChain(matrix, self.shares, self.norm, 1e-3)
        self.keys, self.values = storage(case, 3, 48)
        self.kv = self.slow.native.bind(self.keys, self.values)
        logits = self.slow.logits

        def noted(x: Tensor) -> Tensor:
            self.states.append(rms_norm(x, self.slow.norm, 1e-5))
            return logits(x)

        self.slow.logits = noted

    def guesses(self, sizes: dict[int, int], seed: int, least: float, threads: int = 2) -> list[native.Path]:
        """What the kernels guess after some pairs of states and shares, for each row of `sizes` so many."""
        states, known = self.pairs(sizes, seed)
        tokens = [(row, node) for row, size in sizes.items() for node in range(size)]
        ends = [sum(list(sizes.values())[: place + 1]) - 1 for place in range(len(sizes))]
        batch = native.NativeBatch(
            ids=[0] * len(tokens), positions=[self.bases[row] + node for row, node in tokens],
            rows=[row for row, _ in tokens], nodes=[node for _, node in tokens],
            bases=[self.bases[row] for row, _ in tokens], ancestors=[(2 << node) - 1 for _, node in tokens],
            wanted=ends,
        )
        wishes = [native.ChainWish(LENGTHS[row], self.temperatures[row], self.numbers(row, seed)) for row in sizes]
        parts = [list(one.split([1, len(tokens) - 1] if len(tokens) > 1 else 1)) for one in (states, known)]
        return self.slow.native.guess(batch, self.kv, self.chain, *parts, wishes, least, threads)

    def pairs(self, sizes: dict[int, int], seed: int) -> tuple[Tensor, Tensor]:
        count = sum(sizes.values())
        return draw(count, self.case.hidden, seed=seed), draw(count, self.case.hidden, seed=seed + 1)

    def numbers(self, row: int, seed: int) -> list[float]:
        """Of the draws; one is close to 1, where the last tokens lie."""
        numbers: list[float] = torch.rand(LENGTHS[row], generator=torch.Generator().manual_seed(seed + row)).tolist()
        return [*numbers[:-1], 0.9999]

    def expected(self, sizes: dict[int, int], seed: int, least: float) -> list[native.Path]:
        """The same, one token after the other; the pairs are committed then."""
        states, known = self.pairs(sizes, seed)
        found, first = [], 0
        for row, size in sizes.items():
            for node in range(size):
                read = rms_norm(states[first + node].double(), self.norm, 1e-3)
                logits = self.feed(row, read, known[first + node])
            self.bases[row] += size
            first += size
            store = {layer: list(self.slow.committed(layer, row)) for layer in range(self.case.layers)}
            found.append(self.path(row, logits, least, self.numbers(row, seed)))
            for layer, kept in store.items():
                self.slow.store[layer, row] = kept
        return found

    def path(self, row: int, logits: Tensor, least: float, numbers: list[float]) -> native.Path:
        tokens, logs, temperature = [], [], self.temperatures[row]
        while True:
            law = (logits / (temperature or 1.0)).softmax(-1)
            beyond = law.cumsum(-1) > numbers[len(tokens)]
            tokens.append(int(beyond.int().argmax() if temperature else logits.argmax()))
            logs.append(float(law[tokens[-1]].log()) + (logs[-1] if logs else 0.0))
            if len(tokens) == LENGTHS[row] or logs[-1] < least:
                return tokens, logs
            logits = self.feed(row, self.states[-1], self.shares[tokens[-1]])

    def feed(self, row: int, state: Tensor, share: Tensor) -> Tensor:
        assert self.slow.embedding is not None
        unit = rms_norm(state, torch.ones(self.case.hidden), 1e-5)
        self.slow.embedding = (self.matrix @ unit + share.double())[None]
        position = len(self.slow.committed(0, row))
        whole = dict.fromkeys(range(self.case.layers), [BOTH])
        logits, fresh = self.slow.forward([Token(0, position, row, 0, (0,))], whole)
        for (layer, _), entries in fresh.items():
            self.slow.committed(layer, row).append(entries[0])
        return logits[0]


EXACT = [name for name in CASES if name != "bf16 cache"]
"""Elsewhere a draw may fall to a neighbour, and a path end one guess later."""


@pytest.mark.parametrize(("name", "least", "draws"), [
    *((name, least, draws) for name in EXACT for least in (-math.inf, -1.0) for draws in DRAWS),
    ("bf16 cache", -math.inf, "likeliest"),
])
def test_guesses_are_those_of_one_token_after_the_other(name: str, least: float, draws: str) -> None:
    asked, lengths = Asked(CASES[name], DRAWS[draws]), set()
    for turn, sizes in enumerate(({0: 7, 1: 1, 2: 3}, {0: 1, 2: 2}, {1: 4}, {0: 2, 1: 1, 2: 1})):
        found = asked.guesses(sizes, 10 * turn, least)
        wanted = asked.expected(sizes, 10 * turn, least)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        for (_, logs), (_, right) in zip(found, wanted, strict=True):
            assert logs == pytest.approx(right, abs=0.05 if "bf16" in name else 1e-3)
        lengths |= {len(tokens) for tokens, _ in found}
    assert (lengths == set(LENGTHS)) == (least == -math.inf)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_guesses_the_same(threads: int) -> None:
    one, other = Asked(CASES["odd sizes"]), Asked(CASES["odd sizes"])
    sizes = {0: 7, 1: 1, 2: 3}
    found, again = one.guesses(sizes, 3, -math.inf), other.guesses(sizes, 3, -math.inf, threads)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in again]
    assert all(torch.equal(a, b) for a, b in zip(one.keys + one.values, other.keys + other.values, strict=True))


def test_of_equal_logits_the_first_is_guessed() -> None:
    asked = Asked(Case(vocab=70))
    asked.slow.head.zero_()
    asked.slow.native = make_flat(asked)
    tokens, logs = asked.guesses({0: 2}, 0, -math.inf)[0]
    assert tokens == [0] * 5 and logs == pytest.approx([-math.log(70) * n for n in range(1, 6)])


def make_flat(asked: Asked) -> native.NativeModel:
    """The model with a head of zeros."""
    head = native.pack(torch.zeros(asked.case.vocab, asked.case.hidden), "fp32")
    return asked.slow.again(asked.slow.embedding, head=head)


WRONG = {
    "no guess": ({"wishes": [native.ChainWish(0)]}, "lengths\\[0\\] is 0"),
    "too many nodes": ({"wishes": [native.ChainWish(64)]}, "at most 64 nodes"),
    "no room": ({"wishes": [native.ChainWish(48)]}, "room for 48 slots"),
    "no numbers": ({"wishes": [native.ChainWish(2, 1.0, [0.5])]}, "1 numbers are given for 2 draws"),
    "not the last": ({"wanted": [1]}, "not the last token of its row"),
    "two wishes": ({"wishes": [native.ChainWish(1)] * 2}, "2 wishes"),
    "fewer states": ({"states": [torch.zeros(2, 48)]}, "2 states"),
    "own slots": ({"starts": [[0] * 3] * 3}, "store every layer in the cache"),
    "states": ({"states": [torch.zeros(3, 16)]}, "states is"),
    "shares": ({"known": [torch.zeros(1, 48), torch.zeros(2, 48, dtype=torch.float64)]}, "known is"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    asked, (change, words) = Asked(Case()), WRONG[wrong]
    batch = replace(chain_batch([0] * 3, 0, change.get("wanted")), starts=change.get("starts"))
    given = {"states": [torch.zeros(3, 48)], "known": [torch.zeros(3, 48)], "wishes": [native.ChainWish(2)],
             "least": 0.0}
    given |= {name: value for name, value in change.items() if name in given}
    with pytest.raises(ValueError, match=words):
        asked.slow.native.guess(batch, asked.kv, asked.chain, *given.values())
    assert all((one == 7).all() for one in asked.keys + asked.values)


@pytest.mark.parametrize(("rows", "columns", "shares", "norm"), [
    (48, 48, 32, 48), (48, 32, 32, 32), (70, 48, 48, 48), (48, 48, 48, 1),
])
def test_a_chain_that_does_not_fit_is_refused(rows: int, columns: int, shares: int, norm: int) -> None:
    matrix = native.pack(torch.ones(rows, columns), "fp32")
    with pytest.raises(ValueError, match="shares is|square|norm is"):
        native.NativeChain(matrix, torch.zeros(70, shares), torch.ones(norm), 1e-5)


def test_a_chain_of_another_model_is_refused() -> None:
    asked = Asked(Case())
    other = native.NativeChain(native.pack(torch.eye(48), "fp32"), torch.zeros(71, 48), torch.ones(48), 1e-5)
    with pytest.raises(ValueError, match="the model is of"):
        asked.slow.native.guess(chain_batch([0], 0), asked.kv, other, [torch.zeros(1, 48)],
                                [torch.zeros(1, 48)], [native.ChainWish(1)], 0.0)
