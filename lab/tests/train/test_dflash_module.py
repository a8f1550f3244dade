"""Layers that fill blocks: anchors, weights, resumed training, and that what is written guesses as it was trained."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from backends import Backend, each_backend
from drive import decode, prompt
from eagle_part import ECHO
from part_checks import check_trees
from shared_models import STORIES, needs_model
from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.depth.plan import DepthPlan
from shoal.methods.dflash import DFlash
from shoal.speculative.drafters import dflash_checkpoint
from shoal.speculative.drafters.dflash import DFlashHead, DFlashProposer
from shoal.types import Sampling
from shoal_lab.train import corpus, layers
from shoal_lab.train.corpus import AnsweredText, Corpus
from shoal_lab.train.dflash import BlockModule, BlockShape, default_taps
from shoal_lab.train.eagle import default_shape
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from tiny_corpus import made
from trained_parts import _shake, target
from trained_runs import check_killed_run, learned
from watched import Watched

TAPS, MASK, SHAPE = (1, 3, 4), 96, BlockShape(2, 5)
HOW = Training(epochs=2, batch=256, rate=3e-3)


def tapped(folder: Path) -> Corpus:
    return corpus.tap(made(folder), folder, target("llama"), TAPS)


def random_module(shape: BlockShape = SHAPE, noise: float = 0.3) -> BlockModule:
    module = BlockModule(Base(target("llama").runner), default_shape(32), shape, TAPS, MASK)
    _shake(module, noise)
    return module


def text_of(length: int, prompt_length: int, seed: int) -> AnsweredText:
    generator = torch.Generator().manual_seed(seed)
    states, read = (torch.randn(length, size, generator=generator) for size in (32, 96))
    return AnsweredText(torch.randint(0, 97, (length,), generator=generator), states, prompt_length, read)


@torch.no_grad()
def guesses(module: BlockModule, tokens: list[int]) -> list[int]:
    """What a training module guesses after a text, of whose last token no state is read."""
    seen = target("llama").model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    read = torch.cat([torch.cat([seen[layer][0] for layer in TAPS], -1).float(), torch.full((1, 96), 7.0)])
    batch = TextBatch(torch.tensor([tokens]), read[None, :, :32], torch.tensor([1]), torch.tensor([len(tokens)]),
                      read[None])
    logits = module.outputs(batch, torch.tensor([[len(tokens) - 1]]))[0, 0] @ module.head.rows.T
    for token, value in ECHO.items():
        logits[:, token] += value
    found: list[int] = logits.argmax(-1).tolist()
    return found


@each_backend
def test_what_is_written_guesses_as_the_module(backend: Backend, tmp_path: Path) -> None:
    module, runner = random_module(), backend.runner("llama")
    card = layers.export(tmp_path, target("llama"), module, half=False)
    assert card["shape"] | {"tap2": 4, "layers": 2, "block": 5, "mask": 96} == card["shape"]
    read = dflash_checkpoint.read(str(tmp_path))
    assert read.taps(6) == TAPS and (read.mask, read.guesses) == (MASK, 4) and read.whole
    head = DFlashHead(runner, read)
    proposer = Watched(DFlashProposer(head, head.guesses))
    options = {"runner": runner, "new": 12, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    run = decode(None, [prompt(40, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer), **options)

    def agrees(text: list[int], tree: TokenTree) -> bool:
        return guesses(module, text)[: len(tree) - 1] == [*tree.tokens[1:]]

    check_trees(run, proposer, agrees)


def test_blocks_see_what_is_before_their_anchors_and_themselves_alone() -> None:
    """Each as if it were the only one, of a text that ends there, whatever stands beside it."""
    module, texts = random_module(), [text_of(20, 4, 1), text_of(11, 2, 2)]
    whole, anchors = TextBatch.of(texts), torch.tensor([[4, 9, 10], [3, 8, 9]])
    found = module.outputs(whole, anchors)
    for row, place in itertools.product(range(2), range(3)):
        anchor, one = int(anchors[row, place]), texts[row]
        assert one.tapped is not None
        read = torch.cat([one.tapped[:anchor], torch.randn(1, 96)])
        cut = AnsweredText(one.tokens[: anchor + 1], one.states[: anchor + 1], one.prompt, read)
        alone = module.outputs(TextBatch.of([cut]), torch.tensor([[anchor]]))
        assert torch.allclose(found[row, place], alone[0, 0], atol=1e-4)


def test_anchors_are_tokens_of_answers_drawn_anew_each_step() -> None:
    module, batch = random_module(), TextBatch.of([text_of(30, 5, 1), text_of(9, 7, 2), text_of(4, 3, 3)])
    drawn = [module.blocks(batch, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0].anchors, drawn[1].anchors) and not torch.equal(drawn[0].anchors, drawn[2].anchors)
    for blocks in (*drawn, module.blocks(batch, None)):
        # 24 tokens of the first answer have one after them, one of the second, none of the third.
        assert blocks.asked[..., 0].sum(1).tolist() == [4, 1, 0]
        first = blocks.anchors[0]
        assert len({*first.tolist()}) == 4 and 5 <= int(first.min()) <= int(first.max()) <= 28
        assert int(blocks.anchors[1, 0]) == 7
        ends = blocks.anchors[..., None] + torch.arange(1, 5)
        assert torch.equal(blocks.asked[0], ends[0] < 30) and blocks.asked[1, 0].tolist() == [True, *[False] * 3]
    assert module.blocks(batch, None).anchors[0].tolist() == [5, 11, 17, 23]


def test_the_loss_is_the_weighted_mean_over_guesses() -> None:
    module, batch = random_module(BlockShape(1, 8)), TextBatch.of([text_of(30, 5, 1), text_of(12, 7, 2)])
    with torch.no_grad():
        found, depths = module.loss(batch)
        blocks = module.blocks(batch, None)
        outputs, rows = module.outputs(batch, blocks.anchors), module.head.rows
        total = whole = 0.0
        for row, place, mask in blocks.asked.nonzero().tolist():
            end = int(blocks.anchors[row, place]) + mask + 1
            own = (batch.states[row, end - 1] @ rows.T).softmax(-1)
            guess = (outputs[row, place, mask] @ rows.T).log_softmax(-1)
            weight = math.exp(-mask / 4)
            total, whole = total - weight * float((own * guess).sum()), whole + weight
            assert bool(depths[mask].right[row, place]) == (int(guess.argmax()) == int(batch.tokens[row, end]))
    assert float(found) == pytest.approx(total / whole, rel=1e-4)
    assert [BlockShape(1, block).fade for block in (8, 10, 16)] == [4, 5, 7]


def test_answers_without_a_guess_give_no_loss() -> None:
    loss, depths = random_module().loss(TextBatch.of([text_of(4, 3, 3)]))
    loss.backward()
    assert float(loss.detach()) == 0 and not any(one.asked.any() for one in depths)


def trainer(folder: Path, answers: Path) -> Trainer:
    folder.mkdir(exist_ok=True)
    held = tapped(answers)
    return Trainer(BlockModule.fresh(Base(target("llama").runner), held, SHAPE, MASK, 0), held, HOW, folder)


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    check_killed_run(lambda name: trainer(tmp_path / name, tmp_path / "answers"))


@pytest.mark.slow
@needs_model(STORIES)
def test_the_loss_falls_and_more_guesses_are_kept(tmp_path: Path) -> None:
    """On stories that a small trained model tells, from beginnings that training has not seen."""
    run, kept = learned(
        tmp_path, lambda base, held: BlockModule.fresh(base, held, BlockShape(2, 6), 0, 0),
        Training(epochs=16, batch=1024, rate=2e-2), lambda folder: DFlash(folder, stop=0.0))
    assert sum(run.run.accepted[-1]) > 2 * sum(run.run.accepted[0])
    assert kept[0] < 0.02 and kept[1] > 0.06, kept


def test_layers_that_are_read_by_z_lab_s_rule() -> None:
    assert default_taps(36, 5) == (2, 10, 18, 26, 34) and default_taps(6, 1) == (4,)
    with pytest.raises(ValueError, match="the model has 6 layers, too few for a drafter of 5"):
        default_taps(6, 5)
