"""Prompt tokens: what a step feeds, its long-run gain, and guesses equal to those of an uncached forward."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends import BACKENDS, HF, Backend
from drive import decode, prompt
from shoal.decode.batch import _guesses
from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.depth.plan import DepthPlan
from shoal.engine.memory.shorter import guesses, shorter
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal.speculative import draft_head_file
from shoal.speculative.draft_head_file import CARD
from shoal.types import Sampling
from shoal_lab.drafts.medusa import RankTree
from shoal_lab.drafts.ppd import PromptedTree, PromptProposer, _asides, _behind, with_asides
from shoal_lab.drafts.prompt_tree import PromptTree, PromptTrees
from shoal_lab.methods.first import First
from shoal_lab.methods.medusa import Medusa
from shoal_lab.methods.ppd import PPD
from shoal_lab.methods.read_me import ReadME
from trained_parts import ECHOED, part_for, ppd, target
from watched import Watched

SHARES = [[0.6, 0.2, 0.1], [0.4, 0.2, 0.05], [0.3, 0.1, 0.05]]
ECHO = dict.fromkeys(ECHOED, 12.0)


def played(trees: PromptTrees, steps: int, seed: int) -> float:
    """Tokens per step of a text in which each depth's prompt token is right by a draw of its own."""
    dice, state, tokens = random.Random(seed), 0, 0
    for _ in range(steps):
        tree = trees.states[state]
        ranks = [dice.choices([0, 1, 2, None], [*SHARES[depth], 1 - sum(SHARES[depth])])[0] for depth in range(3)]
        node, depth = 0, 0
        while True:
            below = [child for child, parent in enumerate(tree.guesses.parents) if parent == node]
            found = [child for child in below if tree.guesses.ranks[child] == ranks[depth]]
            if not found:
                break
            node, depth = found[0], depth + 1
            if depth == 3:
                break
        state, tokens = tree.prompts[node], tokens + 1 + depth
    return tokens / steps


@pytest.mark.parametrize("trees", [
    PromptTrees.chain(1), PromptTrees.chain(3), PromptTrees.best(SHARES, 4), PromptTrees.best(SHARES, 12),
    PromptTrees.best(SHARES, 40),
    PromptTrees((PromptTree(RankTree.chain(0), (1,)), PromptTree(RankTree.chain(1), (0, 1)))),
], ids=["chain of 1", "chain of 3", "4 nodes", "12 nodes", "40 nodes", "two states by turns"])
def test_tokens_per_step_are_what_a_played_text_brings(trees: PromptTrees) -> None:
    assert trees.tokens_per_step(SHARES) == pytest.approx(played(trees, 60_000, 1), rel=0.01)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_the_best_trees_are_those_of_brute_force(nodes: int, depth: int) -> None:
    """Over all splits of the nodes between most probable guesses and prompt tokens anywhere."""
    shares = [[0.7, 0.1, 0.1], [0.9, 0.02, 0.01]][:depth]
    options = []
    for state in range(depth + 1):
        own = []
        for count in range(min(nodes, 3) + 1 if state else 1):
            tree = RankTree.most_probable(shares[:state], count) if count else RankTree.chain(0)
            own += [PromptTree(tree, prompts) for prompts in itertools.product(range(depth + 1), repeat=count + 1)
                    if sum(prompts) + count <= nodes]
        options.append(own)
    best = max(PromptTrees(pair).tokens_per_step(shares) for pair in itertools.product(*options))
    assert PromptTrees.best(shares, nodes).tokens_per_step(shares) == pytest.approx(best, rel=1e-6)


def test_more_nodes_bring_more_and_no_state_feeds_more_than_that() -> None:
    found = [PromptTrees.best(SHARES, nodes) for nodes in (2, 5, 9, 15, 30, 60)]
    brought = [trees.tokens_per_step(SHARES) for trees in found]
    assert brought == sorted(brought) and brought[0] < brought[-1]
    for nodes, trees in zip((2, 5, 9, 15, 30, 60), found, strict=True):
        assert max(tree.fed for tree in trees.states) <= nodes
        assert all(max(tree.guesses.filled(0, [[1, 2, 3]] * 3, 3).depths) <= state
                   for state, tree in enumerate(trees.states))
    assert found[3].tokens_per_step(SHARES) > PromptTrees.chain(3).tokens_per_step(SHARES)  # 15 nodes as well


def test_prompts_stand_behind_their_nodes_one_behind_the_other() -> None:
    guesses = TokenTree((9, 4, 5, 6), (-1, 0, 0, 1))
    state = PromptTree(RankTree((-1, 0, 0, 1), (0, 0, 1, 0)), (1, 3, 0, 2))
    parents, places = _asides(guesses, state, 9, 3)
    assert (parents, places) == ([0, 1, 5, 6, 3, 8], [0, 0, 1, 2, 0, 1])
    fed = with_asides(guesses, parents, torch.zeros(6, 2))
    assert fed.fed == ((-1, 0, 0, 1, 0, 1, 5, 6, 3, 8), (0, 1, 1, 2, 1, 2, 3, 4, 3, 4))
    assert [_behind(fed, node) for node in range(4)] == [[[0]], [[1, 2, 3]], [], [[4, 5]]]
    assert _asides(guesses, state, 2, 3) == ([0, 1], [0, 0])
    assert _asides(guesses, state, 0, 3) == ([], [])
    short = fed.cut(1)
    assert short.tokens == (9, 4, 5) and short.asides == (0, 1, 4, 5) and len(short.vectors) == 4
    assert fed.cut(2) is fed and with_asides(guesses, [], torch.zeros(0, 2)) is guesses


def test_copies_stand_side_by_side() -> None:
    guesses = TokenTree((9, 4), (-1, 0))
    state = PromptTree(RankTree.chain(1), (2, 1), copies=2)
    parents, places = _asides(guesses, state, 9, 3)
    assert (parents, places) == ([0, 2, 0, 4, 1, 1], [0, 1, 3, 4, 0, 3]) and state.fed == 1 + len(parents)
    fed = with_asides(guesses, parents, torch.arange(12.0).view(6, 2))
    assert fed.fed[1] == (0, 1, 1, 2, 1, 2, 2, 2)
    assert [_behind(fed, node) for node in range(2)] == [[[0, 1], [2, 3]], [[4], [5]]]
    short = fed.first(1)
    assert short.asides == (0, 1, 0, 3) and _behind(short, 0) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("copies", [2, 3])
def test_trees_with_copies_feed_no_more_nodes(copies: int) -> None:
    for nodes in (copies, 9, 20):
        found = PromptTrees.best(SHARES, nodes, copies)
        assert 0 < max(tree.fed for tree in found.states) <= nodes and found.states[0].copies == copies
        assert found.tokens_per_step(SHARES) < PromptTrees.best(SHARES, nodes).tokens_per_step(SHARES) + 1e-9


@pytest.mark.parametrize("asides, vectors, message", [
    ((0,), torch.zeros(0, 2), "1 asides and 0 vectors"), ((0, 1), torch.zeros(1, 2), "2 asides and 1 vectors"),
    ((2,), torch.zeros(1, 2), "aside 2 has parent 2"), ((-1,), torch.zeros(1, 2), "aside 2 has parent -1"),
])
def test_asides_that_hang_on_nothing_are_refused(asides: tuple[int, ...], vectors: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptedTree((1, 2), (-1, 0), None, asides, vectors)


def test_a_tree_within_some_nodes_keeps_their_prompts() -> None:
    tree = with_asides(TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 2)), [4, 1, 6], torch.arange(6.0).view(3, 2))
    cut = tree.within(6)
    assert isinstance(cut, PromptedTree) and (cut.tokens, cut.asides) == ((1, 2, 3, 4), (1, 4))
    assert torch.equal(cut.vectors, tree.vectors[1:])
    assert len(tree.within(1)) == 1


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_guesses_are_those_of_an_uncached_forward(backend: Backend, kind: str, copies: int) -> None:
    """Text and prompt tokens one after the other, through transformers' own forward."""
    engine, runner = target("llama"), backend.runner("llama")
    trees = PromptTrees.chain(3, copies) if kind == "chain" else PromptTrees.best(SHARES, 14 * copies, copies)
    part = draft_head_file.read(part_for("ppd" if copies == 1 else "copies", "llama"), "ppd", engine.info())
    proposer = Watched(PromptProposer(part, trees))
    ids, recipe = [prompt(20, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer)
    run = decode(None, ids, recipe, runner=runner, new=16, sampling=Sampling(logit_bias=ECHO), watch=False)
    vectors = torch.stack([one.detach() for one in ppd(engine, copies).prompts]).double().view(copies, 3, -1)
    seen = 0
    for tree in proposer.trees:
        depth = max(tree.depths)
        texts = [seq.tokens[:end] for seq in run.seqs for end in range(seq.prompt_length, len(seq.tokens))
                 if seq.tokens[end] == tree.tokens[0]]
        seen += any(tree.tokens[1:] == guessed(tree, text, vectors[:, :depth]) for text in texts) if depth else 0
    assert seen == sum(len(tree) > 1 for tree in proposer.trees) > 4


@torch.no_grad()
def guessed(tree: TokenTree, text: list[int], vectors: torch.Tensor) -> tuple[int, ...]:
    """Guesses of a tree's nodes if each copy of the prompt tokens follows this text, without its last token."""
    model = target("llama").model
    fed = [torch.cat([model.get_input_embeddings()(torch.tensor(text)), copy])[None] for copy in vectors]
    logits = sum(model(inputs_embeds=one).logits[0, len(text) :] for one in fed) / len(fed)
    for token, value in ECHO.items():
        logits[:, token] += value
    best = logits.topk(3).indices.tolist()
    siblings = [tree.children(parent).index(node) for node, parent in enumerate(tree.parents) if node]
    return tuple(best[depth - 1][rank] for depth, rank in zip(tree.depths[1:], siblings, strict=True))


def test_a_part_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    engine, folder = target("llama"), part_for("ppd", "llama")
    with pytest.raises(ValueError, match="is of kind 'ppd'; medusa needs one of kind 'medusa'"):
        engine.generate(prompt(5, 1), method=Medusa(folder), max_new_tokens=4)
    with pytest.raises(ValueError, match="is of kind 'medusa'; ppd needs one of kind 'ppd'"):
        engine.generate(prompt(5, 1), method=PPD(part_for("medusa", "llama")), max_new_tokens=4)
    with pytest.raises(Unsupported, match="it was trained for a model with the fingerprint"):
        target("gpt2").generate(prompt(5, 1), method=PPD(folder), max_new_tokens=4)
    copy = Path(shutil.copytree(folder, tmp_path / "part"))
    card = json.loads((copy / CARD).read_text("utf-8"))
    for change, message in (({"hidden": 33}, "asks for \\[33\\]"), ({"prompts": 0}, "prompts is 0")):
        (copy / CARD).write_text(json.dumps(card | {"shape": card["shape"] | change}), "utf-8")
        with pytest.raises(ValueError, match=message):
            engine.generate(prompt(5, 1), method=PPD(str(copy)), max_new_tokens=4)
    (copy / CARD).write_text(json.dumps({key: value for key, value in card.items() if key != "ranks"}), "utf-8")
    with pytest.raises(ValueError, match="how often guesses of each rank were right"):
        engine.generate(prompt(5, 1), method=PPD(str(copy), nodes=5), max_new_tokens=4)
    wide = PromptProposer(draft_head_file.read(folder, "ppd", engine.info()), PromptTrees.chain(2))
    wide._vectors = torch.zeros(2, 33)
    with pytest.raises(Unsupported, match="it is for states of 33 numbers; the model's have 32"):
        wide.begin(HF.runner("llama"), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nodes is 1; the trained part .* has 2 prompt tokens for each place, so it"):
        engine.generate(prompt(5, 1), method=PPD(part_for("copies", "llama"), nodes=1), max_new_tokens=4)
    for options in ({"length": 0}, {"nodes": 0}, {"nodes": 61}):
        with pytest.raises(ValueError, match="it must be"):
            PPD(folder, **options)


def test_memory_is_counted_for_prompts_too() -> None:
    info = target("llama").info()
    for options, most in (({}, 15), ({"length": 2}, 8), ({"nodes": 9}, 9)):
        method = PPD(part_for("ppd", "llama"), **options)
        assert guesses(method, method.recipe(info)) == (most, most)
    method = PPD(part_for("ppd", "llama"), nodes=9)
    assert [getattr(one, "nodes", None) for one in shorter(method)] == [9, 4, 2, 1, None]


def test_under_a_controller_that_measures_prompts_get_to_guess() -> None:
    """The step that only makes guesses is no trial, whatever the clock says."""
    method = PPD(part_for("ppd", "llama"), control="goodput")
    out = target("llama").generate(prompt(5, 1), method=method, max_new_tokens=24, logit_bias=ECHO)
    plain = target("llama").generate(prompt(5, 1), max_new_tokens=24, logit_bias=ECHO)
    assert out.tokens == plain.tokens and out.stats.drafted > 0


def test_prompts_run_no_more_layers_than_the_last_guess() -> None:
    """With a falling plan, a forward could take the wrong nodes for those that run a layer."""
    seq = SimpleNamespace(seq_id=0, tokens=[1, 2, 7], emitted=4, plan=None, takes_argmax=True)
    tree = with_asides(TokenTree.chain([7, 8, 9]), [0, 3, 2], torch.zeros(3, 2))
    chunk = _guesses(seq, tree, 0).chunk  # type: ignore[arg-type]
    assert list(chunk.steps) == [4, 5, 6, 6, 6, 7] and chunk.wanted == chunk.with_ids == 3
    assert chunk.parents == (-1, 0, 1, 0, 3, 2) and chunk.positions(10) == [10, 11, 12, 11, 12, 13]


@pytest.mark.parametrize("inner", [ReadME(part_for("read_me", "llama"), experts=2),
                                   First(part_for("first", "llama"), layers=4, core=2)], ids=repr)
def test_prompts_beside_what_lets_tokens_run_less(inner: Method) -> None:
    """Prompt tokens have no ids, by which neurons are chosen, and follow sequences with plans of their own."""
    for ids in (prompt(11, 1), prompt(30, 2)):
        alone = target("llama").generate(ids, method=inner, max_new_tokens=20).tokens
        for nodes in (None, 8):
            method = make([PPD(part_for("ppd", "llama"), nodes=nodes), inner])
            assert target("llama").generate(ids, method=method, max_new_tokens=20).tokens == alone
