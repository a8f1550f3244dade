"""The tri-gram table against counts, its trees against brute force."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from families import tiny
from shoal.decode.tree import TokenTree
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods import aded
from shoal.methods.aded import (
    ADED,
    CAP,
    FOLLOWERS,
    Node,
    Trigrams,
    best_first,
    count,
    merged,
    monte_carlo,
    search,
    trigrams_of,
)
from shoal.speculative.corpus import tokens_of
from shoal.types import ModelInfo, Stats
from toy_tokenizers import byte_level

VOCABULARY = 4


def random_law(seed: int):  # type: ignore[no-untyped-def]
    """Random laws of what follows each pair; some pairs are unknown."""
    numbers = random.Random(seed)
    table = {}
    for pair in itertools.product(range(VOCABULARY), repeat=2):
        weights = [numbers.random() ** 3 for _ in range(VOCABULARY)]
        probs = sorted(((t, w / sum(weights)) for t, w in enumerate(weights)), key=lambda item: -item[1])
        table[pair] = probs[: numbers.randint(1, VOCABULARY)] if numbers.random() < 0.9 else []
    return table.__getitem__


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))]


def all_paths(probs, pair: tuple[int, int], depth: int) -> dict[tuple[int, ...], float]:  # type: ignore[no-untyped-def]
    found: dict[tuple[int, ...], float] = {}
    level = {(): 1.0}
    for _ in range(depth):
        level = {
            (*words, token): chance * share
            for words, chance in level.items()
            for token, share in probs((*pair, *words)[-2:])
        }
        found.update(level)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 4))
def test_best_first_takes_the_likeliest_paths(seed: int, nodes: int, depth: int) -> None:
    probs = random_law(seed)
    every = all_paths(probs, (0, 1), depth)
    found = paths(best_first(probs, (0, 1), nodes, depth))
    assert len(set(found)) == len(found) == min(nodes, len(every))
    best = sorted(every.values(), reverse=True)[:nodes]
    assert sorted((every[words] for words in found), reverse=True) == pytest.approx(best)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 4))
def test_a_search_counts_each_iteration_once(seed: int, iterations: int, depth: int) -> None:
    root = search(random_law(seed), (0, 1), depth, iterations, random.Random(0))

    def check(node: Node) -> None:
        if node.children:
            assert sum(child.visits for child in node.children) == node.visits - 1
        assert len(node.path) <= depth
        for child in node.children:
            check(child)

    assert root.visits == iterations
    check(root)


def test_a_search_finds_what_is_likely() -> None:
    probs = random_law(3)
    every = all_paths(probs, (0, 1), 3)
    found = paths(monte_carlo(probs, (0, 1), 12, 3, 400, "key"))
    assert len(found) == 12
    best = sum(sorted(every.values(), reverse=True)[:12])
    assert sum(every[words] for words in found) > 0.9 * best
    assert found == paths(monte_carlo(probs, (0, 1), 12, 3, 400, "key"))


SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=8)


@given(SEQUENCES, st.integers(1, 20))
def test_sequences_are_merged_where_they_begin_alike(sequences: list[tuple[int, ...]], nodes: int) -> None:
    """The first beginnings of all sequences, each once."""
    wanted = list[tuple[int, ...]]()
    for one in sequences:
        wanted += [one[:end] for end in range(1, len(one) + 1) if one[:end] not in wanted]
    found = paths(merged(7, sequences, nodes))
    assert sorted(found) == sorted(wanted[:nodes])


def test_beginnings_of_one_depth_that_differ_are_not_taken_for_one() -> None:
    tree = merged(7, [(1, 2), (3, 2), (1, 4)], 9)
    assert tree == TokenTree((7, 1, 3, 2, 4, 2), (-1, 0, 0, 1, 1, 2))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 4))
def test_a_search_merges_what_it_visited_with_the_likeliest_token_after_it(
    seed: int, iterations: int, depth: int
) -> None:
    probs, visits = random_law(seed), dict[tuple[int, ...], int]()

    def collect(node: Node) -> None:
        for child in node.children:
            if child.visits:
                visits[child.path] = child.visits
                collect(child)

    collect(search(probs, (0, 1), depth - 1, iterations, random.Random("key")))
    after = {path + tuple(t for t, _ in probs((0, 1, *path)[-2:])[:1]) for path in visits}
    assert set(paths(monte_carlo(probs, (0, 1), 1000, depth, iterations, "key"))) == visits.keys() | after
    few = set(paths(monte_carlo(probs, (0, 1), 6, depth, iterations, "key")))
    assert len(few) == min(6, len(visits.keys() | after))
    left_out = [visits[path] for path in visits.keys() - few]
    assert all(visits[path] >= max(left_out, default=0) for path in few if path in visits and path not in after)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_table_read_once_is_the_share_of_each_follower(text: list[int]) -> None:
    table = Trigrams({}, 0.01)
    for size in range(0, len(text) + 1, 3):
        table.read(text[:size])
    table.read(text)
    counts = Counter(zip(text, text[1:], text[2:], strict=False))
    for pair in itertools.product(range(4), repeat=2):
        probs = table.probs(pair)
        total = sum(counts[(*pair, token)] for token in range(4))
        assert {token: share for token, share in probs} == pytest.approx(
            {token: counts[(*pair, token)] / total for token in range(4) if counts[(*pair, token)]}
        )
        assert [share for _, share in probs] == sorted((share for _, share in probs), reverse=True)
        corpus = count(text).get(pair, {})
        assert dict(probs) == pytest.approx(dict(corpus))


def test_what_the_row_says_moves_the_law() -> None:
    base = {(1, 2): {3: 0.9, 4: 0.1}}
    table = Trigrams(base, 0.2)
    before = dict(table.probs((1, 2)))[4]
    text, shares = [], []
    for _ in range(30):
        text += [1, 2, 4, 0]
        table.read(text)
        shares.append(dict(table.probs((1, 2)))[4])
    assert before < shares[0] and shares == sorted(shares)
    assert table.probs((1, 2))[0] == (4, pytest.approx(CAP / (CAP + 0.9)))
    assert base == {(1, 2): {3: 0.9, 4: 0.1}}


def test_a_table_does_not_grow_without_bound() -> None:
    table = Trigrams({}, 0.5)
    table.read([token for last in range(50) for token in (1, 2, last + 3)])
    probs = table.probs((1, 2))
    assert len(probs) == FOLLOWERS and probs[0][0] == 52


def test_a_corpus_is_read_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ab a b\n" * 30_000, encoding="utf-8")
    words = byte_level()
    tokens = tokens_of(str(file), words, "corpus")
    assert tokens == words("ab a b\n")["input_ids"] * 30_000
    assert trigrams_of(str(file), words) == count(tokens)
    assert trigrams_of(str(file), words) is trigrams_of(str(file), words)


def test_a_corpus_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        trigrams_of("text.txt", None)
    with pytest.raises(ValueError, match="corpus is .*missing.txt"):
        trigrams_of(str(tmp_path / "missing.txt"), byte_level())


def test_what_one_request_taught_serves_the_next_of_its_salt_alone() -> None:
    engine = engine_for(tiny("llama"))
    options = {"max_new_tokens": 40, "ignore_eos": True, "repetition_penalty": 1.3}
    prompt = [5, 17, 80, 3, 41]
    wanted = engine.generate(prompt, **options).tokens

    def ask(salt: str) -> Stats:
        with Scheduler(engine, max_seqs=1, prefix_bytes=0) as scheduler:
            handle = scheduler.submit(prompt, method=ADED(), cache_salt=salt, **options)
            list(handle)
            assert handle.results[0].tokens == wanted
            return handle.results[0].stats

    first, second, stranger = ask(""), ask(""), ask("another")
    assert second.accepted > first.accepted + 10 and second.target_forwards < first.target_forwards
    assert stranger.accepted == first.accepted and stranger.drafted == first.drafted


def test_texts_of_a_tenant_teach_a_bounded_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aded, "_PAIRS", 10)
    own: aded.Weights = {}
    for text in range(8):
        Trigrams({}, 0.5, own).read([100 * text + token for token in range(6)])
    assert len(own) == 10 and (704 - 1, 704) in own and (0, 1) not in own
    assert Trigrams({}, 0.5, own).probs((700, 701)) == [(702, 1.0)]


def static_file(path: Path, *records: tuple[tuple[int, int, int, int], dict[int, int]]) -> str:
    """An n-gram file as llama.cpp writes it."""
    flat = [(*ngram, len(after), *itertools.chain(*after.items())) for ngram, after in records]
    path.write_bytes(np.array(list(itertools.chain(*flat)), "<i4").tobytes())
    return str(path)


def test_a_static_file_of_llama_cpp_is_a_corpus(tmp_path: Path) -> None:
    path = static_file(tmp_path / "static.bin", ((1, 2, -1, -1), {7: 3, 8: 1}), ((4, -1, -1, -1), {9: 5}))
    assert trigrams_of(path, None) == {(1, 2): {7: 0.75, 8: 0.25}}
    assert ADED(corpus=path).recipe(ModelInfo(4)).proposer.base == {(1, 2): {7: 0.75, 8: 0.25}}


@pytest.mark.parametrize(
    ("after", "cut", "message"),
    [({7: 3}, 1, "int32 5 is damaged"), ({7: 3}, 9, "is damaged"), ({7: 0}, 0, "is damaged"), ({}, 0, "is damaged"),
     ({1 << 20: 3}, 0, "beyond the tokenizer's")],
)
def test_a_static_file_that_is_damaged_or_of_another_model(
    tmp_path: Path, after: dict[int, int], cut: int, message: str
) -> None:
    path = Path(static_file(tmp_path / "static.bin", ((1, 2, -1, -1), after)))
    path.write_bytes(path.read_bytes()[: -cut or None])
    with pytest.raises(ValueError, match=rf"corpus is .*static.bin.*{message}"):
        trigrams_of(str(path), byte_level())


@pytest.mark.parametrize("option", ["nodes", "depth", "iterations"])
def test_settings_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 0"):
        ADED(**{option: 0})
    with pytest.raises(ValueError, match=r"step is 9.*\(0, 3\]"):
        ADED(step=9.0)
