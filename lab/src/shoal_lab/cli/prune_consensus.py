"""`shoal prune consensus`: answers, gates that are trained until texts agree, and the neurons that are then kept."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.engine.loading.checkpoint import Checkpoint
    from shoal_lab.cli.prune_target import Pick
    from shoal_lab.components.cost import CostCard
    from shoal_lab.train.corpus import Corpus

_PIECE, _PIECES = 512, 128
"""Tokens of a piece of text, and most pieces."""
_EACH = 700
"""Most prompts per kind from a data folder."""
_LEAST = {"steps": 1, "batch": 2}


def add_arguments(parser: Parser) -> None:
    """Add the options of `consensus`."""
    group = parser.add_argument_group("consensus")
    group.add_argument("--work", metavar="DIR", type=Path, help="where answers and a checkpoint are kept, which the "
                       "same command goes on from; OUT.training if none")
    group.add_argument("--prompts", metavar="FILE,...", help="what the model is asked, a prompt per line or JSONL with "
                       "'prompt'; a few prompts of Shoal's if none")
    group.add_argument("--data", metavar="DIR", type=Path, help="prompts out of a folder with self_instruct/, mbpp/ "
                       "and gsm8k/, as `shoal train` takes them")
    group.add_argument("--tokens", metavar="N", type=int, default=60_000, help="tokens of answers, about")
    group.add_argument("--steps", metavar="N", type=int, default=150, help="most steps; it ends where gates agree")
    group.add_argument("--batch", metavar="N", type=int, default=512, help="tokens of a step")
    group.add_argument("--rate", metavar="R", type=float, default=0.2, help="highest learning rate")
    group.add_argument("--minutes", metavar="T", type=float, help="leave off then; the same command goes on")
    group.add_argument("--seed", metavar="S", type=int, default=0, help="of the first weights and the texts' order")
    group.add_argument("--threads", metavar="N", type=int, help="CPU threads; as torch chooses if none")


def check(args: argparse.Namespace) -> None:
    """Refuse these options with another kind of pruning, and numbers out of range."""
    parser = Parser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        value = getattr(args, action.dest)
        if args.what != "consensus" and value != action.default:
            raise ValueError(f"{action.option_strings[0]} is about gates that are trained; leave it out for "
                             f"{args.what}")
    for name in ("tokens", "steps", "batch", "threads"):
        least, value = _LEAST.get(name, 1), getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}; it must be at least {least}")
    for name in ("rate", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} is {value}; it must be above 0")
    if sum(value is not None for value in (args.text, args.prompts, args.data)) > 1:
        raise ValueError("--text is read as it is, --prompts and those in --data are answered; give one of them")
    if args.what == "consensus" and args.work is None:
        args.work = args.out.with_name(args.out.name + ".training")


def trained(args: argparse.Namespace, files: Checkpoint, share: float) -> tuple[Pick, dict[str, Any]] | None:
    """Train gates that remove a share; None if time was up before texts agreed.

    Returns:
        A function that makes a change of any share, and fields about the training.
    """
    import torch

    from shoal_lab.train import consensus
    from shoal_lab.train.corpus import batches
    from shoal_lab.train.loop import Trainer, Training
    from shoal_lab.train.part import Base

    began = time.monotonic()
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    def late() -> bool:
        return args.minutes is not None and time.monotonic() - began > 60 * args.minutes

    engine = common.load_engine(args)
    corpus = _corpus(args, files, engine, late)
    if not corpus.whole:
        _tell("time is up before all texts are there; the same command goes on")
        return None
    module = consensus.ConsensusModule(Base(engine.runner), files.model(torch.float32).eval(),
                                       _beyond(args, files, share), args.uniform, args.seed)
    each = sum(len(list(batches(corpus.answers(shard, validation=False), args.batch)))
               for shard in range(len(corpus.shards)))
    if not each:
        raise ValueError("there is only one text, which is kept from training; give more of them")
    how = Training(-(-args.steps // each), args.batch, 3 * args.rate, decay=0.0, seed=args.seed,
                   half=engine.runner.dtype == torch.bfloat16, muon=False)  # AdamW uses a third of the rate
    trainer = Trainer(module, corpus, how, args.work, _tell)
    trainer.run.steps, module.rise = args.steps, max(1.0, consensus.RISE * args.steps)
    if trainer.run.step:
        _tell(f"going on at step {trainer.run.step} of {args.steps}")
    run = trainer.train(lambda: late() or module.polarised or trainer.run.done, every=25)
    told = {"steps": [run.step, run.steps], "minutes": round(run.seconds / 60, 1), "training_tokens": run.tokens,
            "polarised": module.polarised, **module.facts(trainer.held_out())}
    if not module.polarised:
        if not run.done:
            _tell(f"time is up at step {run.step} of {run.steps}, with {told['undecided']:.1%} of the gates neither "
                  "open nor closed; nothing is written yet, and the same command goes on")
            return None
        _tell(f"warning: {told['undecided']:.1%} of the gates are neither open nor closed after {run.steps} steps, so "
              "what is written is not what was trained; give more --steps")
    return _picker(args, files, module.agreed()), told


def _picker(args: argparse.Namespace, files: Checkpoint, means: Any) -> Pick:
    """Picks the neurons whose gates are open most, over all layers or in each."""
    from shoal.model.config import widths_of
    from shoal_lab.calibrate import neurons
    from shoal_lab.cli import prune_width

    widths = widths_of(files.config())
    why = {"by": "consensus", "multiple": args.multiple, "uniform": args.uniform,
           "text": args.text.name if args.text else "what the model says to " + (
               "prompts" if args.prompts or args.data else "prompts of Shoal's")}

    def pick(share: float) -> tuple[Any, dict[str, Any]]:
        gone = _beyond(args, files, share)
        shares = [1 - gone] * len(widths) if args.uniform else neurons.shares_by_rank(means, gone)
        return prune_width.left(means, shares, widths, {**why, "share": share})

    return pick


def _beyond(args: argparse.Namespace, files: Checkpoint, share: float) -> float:
    """The share of gates to close, so that `share` goes on average after layers are rounded up to whole multiples.

    They are rounded up, never down: of open gates none is known to matter less.
    """
    from shoal.model.config import widths_of

    widths = widths_of(files.config())
    return float(min(share + (args.multiple - 1) / 2 * len(widths) / sum(widths), 0.99))


def _corpus(args: argparse.Namespace, files: Checkpoint, engine: Engine, late: Callable[[], bool]) -> Corpus:
    """Texts with the full model's states: its answers, or pieces of the given text."""
    from shoal.engine.cards.quick import asked
    from shoal_lab.train import corpus, prompts

    if args.text is not None:
        ids = files.tokenizer()(common.read_text(args.text))["input_ids"]
        pieces = [ids[at : at + _PIECE] for at in range(0, min(len(ids), _PIECES * _PIECE), _PIECE)]
        return corpus.read(args.work, engine, pieces, _tell, late)

    def questions() -> list[list[int]]:
        if args.prompts is None and args.data is None:
            return asked(engine)
        texts = (prompts.from_data(args.data, _EACH, args.seed) if args.data is not None else
                 [text for name in args.prompts.split(",") for text in prompts.from_file(Path(name))])
        texts = list(prompts.without(texts, set()))
        random.Random(args.seed).shuffle(texts)
        return prompts.encoded(texts, engine.tokenizer)

    wish = corpus.CorpusWish(args.tokens, seed=args.seed, temperature=0.0 if _chats(engine) else 1.0)
    return corpus.make(args.work, engine, questions, wish, _tell, late)


def _chats(engine: Engine) -> bool:
    return bool(getattr(engine.tokenizer, "chat_template", None))


def card(args: argparse.Namespace) -> CostCard | None:
    """The cost card measured when the command first ran: another measurement would make another run."""
    from shoal_lab.cli.prune_target import measured
    from shoal_lab.components.cost import CostCard
    from shoal_lab.train import files as written

    if args.speed is None:
        return None
    path = args.work / "cost.json"
    if path.is_file():
        held = written.read_json(path)
        return CostCard.from_dict(held, held["windows"])
    found = measured(args)
    args.work.mkdir(parents=True, exist_ok=True)
    written.write_json(path, {**found.to_dict(), "windows": list(found.windows)})
    return found


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
