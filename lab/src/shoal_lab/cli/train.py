"""Train a small component beside a model on the model's own answers: it guesses ahead, and the model verifies.

The answers and their states are made first, and kept in a folder that several components can share. After a kill, the
same command resumes. The model itself is not trained, except by `heal`.

Some guess nothing: `dynamic_context` chooses which of an answer's tokens stay in the KV, `first` after a prompt which
layers the answer runs, `read_me` by the last tokens which groups of the MLPs' neurons the next forward runs.
`drafter` is a model of its own for `deer`: the model's outer layers, trained to fill a block of masks. `dflash` fills
one by layers that read the model's states.
`heal` writes the model anew, with low-rank adapters trained to make up for layers that a depth plan skips, or for what
`shoal prune` removed.
`hybrid` turns two thirds of a Llama's attention layers into gated delta layers, and stores those alone.
`diffusion` is a small masked-diffusion model trained from scratch on generated lists, sums and sentences.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal_lab.cli.method_list import methods_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.depth.plan import DepthPlan
    from shoal.engine.engine import Engine
    from shoal_lab.train.corpus import Corpus, CorpusWish
    from shoal_lab.train.dflash import BlockShape
    from shoal_lab.train.drafter import DrafterShape
    from shoal_lab.train.part import TrainedModule
    from shoal_lab.train.sources import Sources

EXAMPLES = """examples:
  shoal train eagle --model M.gguf --out part
  shoal train eagle --model M.gguf --out part --data DATA --tokens 500000 --minutes 30
  shoal train eagle --model M.gguf --out eagle3 --answers part/answers --taps auto --depths 5
  shoal train dflash --model M.gguf --out dflash --answers part/answers --layers 2 --block 8
  shoal train eagle --model whisper-base --quant int8 --out part --speech FOLDER --windows 512
  shoal train medusa --model M.gguf --out heads --answers part/answers --prompts asked.txt,more.jsonl
  shoal train ppd --model M.gguf --out prompts --answers part/answers --prompts asked.txt,more.jsonl --batch 512
  shoal train dynamic_context --model M.gguf --out gate --answers part/answers --prompts asked.txt --keep 0.5
  shoal train first --model M.gguf --out routers --answers part/answers --prompts asked.txt --under d3:mean=0.8
  shoal train read_me --model M.gguf --out experts --answers part/answers --prompts asked.txt --groups 8 --shared 2
  shoal train drafter --model M.gguf --out drafter --answers part/answers --prompts asked.txt,more.jsonl --block 8
  shoal train heal --model M.gguf --out healed --data DATA --under d3:mean=0.8,d3:mean=0.9,full
  shoal train heal --model M.gguf --out healed --data DATA --student pruned
  shoal train heal --model whisper-base --out healed --speech FOLDER --under d3:mean=0.8:core=2,full
  shoal train hybrid --model M.gguf --out hybrid --data DATA --text more.txt --layer-epochs 1 --epochs 2
  shoal train hybrid --model M.gguf --out hybrid --export folder
  shoal train diffusion --out canvas --threads 1
  shoal train diffusion --causal --out twin --threads 1
"""
EAGLE = "eagle"
KINDS = (EAGLE, "medusa")
PROMPTS, DRAFTER, SCRATCH, CONTEXT, ROUTERS = "ppd", "drafter", "diffusion", "dynamic_context", "first"
BLOCKS = "dflash"
EXPERTS, HEAL, FULL, HYBRID = "read_me", "heal", "full", "hybrid"
_SOUNDS = (".flac", ".wav", ".mp3", ".ogg", ".m4a")
_KEEP = {CONTEXT: 0.5, ROUTERS: 0.8}
_BATCH, _RATE, _PROMPTS_RATE = 2048, 3e-3, 3e-2
_BESIDE = 8
"""Times as many places of a step beside an encoder, whose sources count too."""
_SHARED = ("part", "out", "steps", "batch", "rate", "minutes", "seed", "threads", "json", "causal")
"""Options of a model trained from scratch."""
_ONLY = {**dict.fromkeys(("steps", "causal"), (SCRATCH,)), "depths": (*KINDS, PROMPTS), "copies": (PROMPTS,),
         "vocabulary": (*KINDS, CONTEXT, ROUTERS), "weights": (*KINDS, BLOCKS, CONTEXT, ROUTERS, EXPERTS),
         **dict.fromkeys(("groups", "shared", "experts"), (EXPERTS,)),
         **dict.fromkeys(("layers", "block", "mask_token"), (DRAFTER, BLOCKS)), "window": (DRAFTER,),
         "keep": (CONTEXT, ROUTERS), "gate_layer": (CONTEXT,), "under": (HEAL, ROUTERS),
         **dict.fromkeys(("student", "rank", "ranks", "recompute"), (HEAL,)),
         **dict.fromkeys(("speech", "windows", "language"), (HEAL, EAGLE)),
         "taps": (EAGLE, BLOCKS), "start": (EAGLE, HYBRID),
         **dict.fromkeys(("text", "length", "layer_epochs", "export"), (HYBRID,))}
"""Option -> the kinds that have it, if not all do."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    kinds = (*KINDS, BLOCKS, PROMPTS, DRAFTER, CONTEXT, ROUTERS, EXPERTS, HEAL, HYBRID, SCRATCH)
    parser.add_argument("part", choices=kinds, help="eagle: a layer that goes on from the model's last states; "
                        "dflash: layers that fill a block of masks over the model's states; "
                        "medusa: a head for each of the next places; ppd: vectors that stand for the next words; "
                        "drafter: a small model that fills masks, for deer; dynamic_context: a gate for the KV; first: "
                        "routers that choose layers; read_me: groups of neurons and a router; heal: the "
                        "model, for fewer layers or weights; hybrid: gated delta layers for attention; diffusion: a "
                        "small model from scratch")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the part goes, and what a later "
                        "run goes on from")
    data = parser.add_argument_group("answers")
    data.add_argument("--answers", metavar="DIR", type=Path, help="where they are kept; DIR/answers of --out if none")
    data.add_argument("--prompts", metavar="FILE,...", help="a prompt per line, or JSONL with 'prompt'")
    data.add_argument("--data", metavar="DIR", type=Path, help="folder with self_instruct/, mbpp/ and "
                      "gsm8k/, and with squality/ if that is there")
    data.add_argument("--each", metavar="N", type=int, default=700, help="most prompts of a kind from --data")
    data.add_argument("--questions", metavar="N", type=int, help="questions that the model asks itself, where its chat "
                      "template lets it; by default 2000 without --prompts and --data, and none with them")
    data.add_argument("--speech", metavar="PATH,...", help="heal, eagle: sounds for a model that hears, files or "
                      "folders of them; it answers windows cut out of these, for eagle at other speeds and under noise")
    data.add_argument("--windows", metavar="N", type=int, default=256, help="heal, eagle: how many windows")
    data.add_argument("--language", metavar="CODE", default="en", help="heal, eagle: spoken in --speech")
    data.add_argument("--tokens", metavar="N", type=int, default=500_000, help="tokens of answers, about")
    data.add_argument("--max-new-tokens", metavar="N", type=int, default=192, help="the longest answer")
    data.add_argument("--temperature", metavar="T", type=float, default=0.0, help="of the answers; 0: the likeliest")
    data.add_argument("--gigabytes", metavar="G", type=float, default=10.0, help="most room for states")
    how = parser.add_argument_group("training")
    how.add_argument("--epochs", metavar="N", type=int, default=4, help="times that every answer is seen")
    how.add_argument("--steps", metavar="N", type=int, help="diffusion: steps, 3500 if none")
    how.add_argument("--causal", action="store_true", help="diffusion: its twin that writes from left to right, on the "
                     "same texts")
    how.add_argument("--batch", metavar="N", type=int, help="tokens of a step, 2048 if none; diffusion: texts, 64")
    how.add_argument("--rate", metavar="R", type=float, help="highest learning rate of matrices by Muon, AdamW takes a "
                     "third; 0.003 if none, diffusion: 0.006, ppd: 0.03")
    how.add_argument("--minutes", metavar="T", type=float, help="leave off then; the same command goes on")
    how.add_argument("--seed", metavar="S", type=int, default=0, help="of prompts, draws and first weights")
    how.add_argument("--threads", metavar="N", type=int, help="CPU threads; as torch chooses if none")
    what = parser.add_argument_group("part")
    what.add_argument("--vocabulary", metavar="N", type=int, default=8192, help="tokens that are guessed: those that "
                      "the answers use most; with --speech filled up by those that its tokenizer learned first")
    what.add_argument("--depths", metavar="N", type=int, help="eagle: guesses in a row that are trained, 3 if none; "
                      "medusa: heads, 4 if none; ppd: places ahead, 3 if none")
    what.add_argument("--taps", metavar="L,...", help="eagle: read what enters these layers, in EAGLE-3's form; auto: "
                      "2, half of the layers, and all but 3; dflash: as many as it has layers, spread over the model, "
                      "if none")
    what.add_argument("--copies", metavar="N", type=int, default=1, help="ppd: vectors for each place, whose guesses "
                      "are averaged")
    what.add_argument("--weights", choices=("int8", "int6", "bfloat16", "float32"), default="int8", help="how it is "
                      "stored; with --taps and for dflash bfloat16, or float32")
    what.add_argument("--layers", metavar="N", type=int, default=2, help="drafter: layers of the model, first and "
                      "last ones, that it is made of; dflash: layers")
    what.add_argument("--block", metavar="N", type=int, default=8, help="drafter: masks that it fills at a time; "
                      "dflash: places of a block, one more than it guesses")
    what.add_argument("--window", metavar="N", type=int, default=64, help="drafter: last tokens of a text that it "
                      "reads")
    what.add_argument("--keep", metavar="R", type=float, help="dynamic_context: the share of an answer's tokens that "
                      "is to stay, 0.5 if none; first: of the layers that are to run on average, 0.8")
    what.add_argument("--gate-layer", metavar="L", type=int, default=2, help="dynamic_context: the gate reads what "
                      "enters this layer, and less is kept from it on")
    what.add_argument("--groups", metavar="N", type=int, default=8, help="read_me: groups that each MLP's neurons are "
                      "divided into")
    what.add_argument("--shared", metavar="N", type=int, default=2, help="read_me: how many of them hold the most used "
                      "neurons, and always run")
    what.add_argument("--experts", metavar="N", type=int, default=6, help="read_me: the groups that a token runs for "
                      "what the card says of the loss; the part serves any number")
    what.add_argument("--under", metavar="METHOD,...", help="heal: methods that drop layers, with options as in `shoal "
                      "bench`, taken in turn; `full` among them keeps the full depth what it was. first: methods that "
                      "the routers are compared with")
    what.add_argument("--student", metavar="DIR", help="heal: a smaller model that was cut out of --model, instead of "
                      "--model itself")
    what.add_argument("--rank", metavar="R", type=int, default=16, help="heal: of the adapters")
    what.add_argument("--ranks", choices=("equal", "by-width"), default="equal", help="heal: whether all layers have "
                      "that rank, or each in proportion to the neurons that `shoal prune` left it, as CFSP's recovery "
                      "trains most where its coarse scores are high")
    what.add_argument("--recompute", action="store_true", help="heal: run each layer again for its gradient instead of "
                      "keeping what it held: less memory, more time")
    what.add_argument("--text", metavar="FILE,...", help="hybrid: plain texts that it also learns from")
    what.add_argument("--length", metavar="N", type=int, default=512, help="hybrid: tokens of a piece of those")
    what.add_argument("--layer-epochs", metavar="N", type=int, default=1, help="hybrid: times that each layer alone "
                      "sees every text, before the whole hybrid does for --epochs")
    what.add_argument("--start", metavar="DIR", type=Path, help="hybrid: a folder of layers to go on from; "
                      "eagle: a part to go on from, on other answers")
    what.add_argument("--export", metavar="DIR", type=Path, help="hybrid: only write there the whole model of the "
                      "layers in --out, as transformers reads it")
    what.add_argument("--mask-token", metavar="T", help="drafter, dflash: stands for a word not yet known: a token "
                      "that no text holds, or its number; a special token that is not used if none")
    what.add_argument("--licence", metavar="TEXT", help="under which the part may be used, for its card")
    common.add_model(parser)
    common.add_json(parser)
    parser.show_usual("--model", "--out", "--answers", "--data", "--questions", "--tokens", "--steps", "--minutes",
                      "--start", "--export")


def run(args: argparse.Namespace) -> int:
    """Answer, train, write the component; end with one JSON line."""
    import torch

    began = time.monotonic()
    _check(args)
    if args.part == HEAL:  # checked after the options, before the model is loaded
        from shoal_lab.train.heal import require_peft

        require_peft()
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    def late() -> bool:
        return args.minutes is not None and time.monotonic() - began > 60 * args.minutes

    if args.part == HYBRID:
        return _hybrid(args, late)
    return _from_scratch(args, late) if args.part == SCRATCH else _part(args, late)


def _from_scratch(args: argparse.Namespace, late: Callable[[], bool]) -> int:
    from shoal_lab.train import diffusion

    given = {name: getattr(args, name) for name in ("steps", "batch", "seed") if getattr(args, name) is not None}
    rate = {} if args.rate is None else {"rate": args.rate / 3}
    how = diffusion.DiffusionTraining(**given, **rate, causal=args.causal)
    card = diffusion.train(how, args.out, _tell, late)
    left = card["steps"] - card["step"]
    _tell(f"{left} steps are left, and the same command goes on" if left else f"written to {args.out}")
    method = "full" if args.causal else "diffusion"
    _tell(f"use it: shoal generate --model {args.out} --raw --method {method} --max-new-tokens 5 'shuffle : ann bob "
          "cid dee ='")
    return _report(args, card)


def _hybrid(args: argparse.Namespace, late: Callable[[], bool]) -> int:
    import torch

    from shoal_lab.bench import report
    from shoal_lab.train import corpus, hybrid, hybrid_files
    from shoal_lab.train.heal import halve
    from shoal_lab.train.loop import Training
    from shoal_lab.train.part import Base

    engine = common.load_engine(args)
    if args.export is not None:
        hybrid_files.export(args.export, _plain(args), hybrid_files.saved(args.out), engine.tokenizer)
        _tell(f"use it: shoal generate --model {args.export}")
        return _report(args, {"exported": str(args.export)})
    start = None if args.start is None else hybrid_files.saved(args.start)
    places = [args.answers or args.out / "answers"]
    found = [corpus.make(places[0], engine, lambda: _prompts(args, engine), _wish(args), _tell, late)]
    if args.text is not None:
        texts = hybrid.pieces([Path(name) for name in args.text.split(",")], engine.tokenizer, args.length, args.seed)
        places.append(args.out / "texts")
        found.append(corpus.read(places[1], engine, texts, _tell, late))
    if not all(one.whole for one in found):
        _tell("time is up before all texts are there; the same command goes on")
        return _report(args, {"shards": sum(len(one.shards) for one in found)})
    half, plain = engine.runner.dtype == torch.bfloat16, _plain(args)
    if half:
        halve(plain)
    epochs: dict[hybrid.Stage, int] = {"layers": args.layer_epochs, "whole": args.epochs}
    stages = {stage: Training(count, args.batch or _BATCH, args.rate or _RATE, seed=args.seed, half=half, muon=False,
                              decay=0.0) for stage, count in epochs.items() if count}
    tensors, facts = hybrid.train(Base(engine.runner), plain, hybrid.Corpora(places), stages, args.out, start, _tell,
                                  late, half)
    card = hybrid_files.save(args.out, tensors, {"model": Path(engine.model_name).name, **facts,
                                                 "licence": args.licence, "command": report.shown(args.argv)})
    _tell(f"{sum(card['files'].values()) / 1e6:.1f} MB written to {args.out}: {card['held_out']}")
    _tell("use it: the same command with --export DIR, then shoal generate --model DIR")
    return _report(args, card)


def _part(args: argparse.Namespace, late: Callable[[], bool]) -> int:
    import torch

    from shoal_lab.bench import report
    from shoal_lab.train import corpus, export, read_me
    from shoal_lab.train.drafter import DrafterShape
    from shoal_lab.train.loop import Trainer, Training

    shape = _shape(args)
    engine = common.load_engine(args)
    if isinstance(shape, DrafterShape):
        shape.check(engine)
    if args.part == EXPERTS:
        read_me.check_division(read_me.mlp_widths(engine), args.groups, args.shared, args.experts)
    plans = _plans(args, engine) if args.part in (HEAL, ROUTERS) else None
    sources = _sources(args, engine)
    taps = _taps(args, engine)
    place = args.answers or args.out / "answers"
    answers = corpus.make(place, engine, lambda: _prompts(args, engine, sources), _wish(args, taps), _tell, late,
                          sources)
    if answers.whole and taps:
        answers = corpus.tap(answers, place, engine, taps, _tell, late)
    if not answers.whole:  # a run starts when its answers are complete, and keeps to them
        _tell("time is up before all answers are there; the same command goes on")
        return _report(args, {"shards": len(answers.shards)})
    args.out.mkdir(parents=True, exist_ok=True)
    module = _module(args, engine, answers, shape, plans)
    half = engine.runner.dtype == torch.bfloat16
    rate = _PROMPTS_RATE if args.part == PROMPTS else _RATE
    room = _BATCH if sources is None or not sources.kept else _BESIDE * _BATCH
    how = Training(args.epochs, args.batch or room, args.rate or rate, seed=args.seed, half=half,
                   muon=Training.muon and args.part not in (HEAL, ROUTERS))
    trainer = Trainer(module, answers, how, args.out, _tell)
    if trainer.run.step:
        _tell(f"going on at step {trainer.run.step} of {trainer.run.steps}")
    found = trainer.train(late)
    if not found.accepted:
        found.accepted.append(trainer.validate())
    facts = {**export.trained(module, answers, found), **module.facts(trainer.held_out()), "licence": args.licence,
             "command": report.shown(args.argv)}
    card, worth, use = _written(args, engine, module, facts)
    left = "" if found.done else f"; {found.steps - found.step} steps are left, and the same command goes on"
    _tell(f"{card['bytes'] / 1e6:.1f} MB written to {args.out}: {worth} on answers that it was not trained on{left}")
    _tell(f"use it: shoal {'generate' if args.speech is None else 'transcribe FILE'} {use}")
    return _report(args, card)


def _written(
    args: argparse.Namespace, engine: Engine, module: TrainedModule, facts: dict[str, Any]
) -> tuple[dict[str, Any], str, str]:
    """The card of the result, a sentence about its value, and the options that use it."""
    import torch

    from shoal_lab.train import drafter, export, heal, layers
    from shoal_lab.train.part import ShippedModule

    if isinstance(module, heal.HealModule):
        dtype = torch.bfloat16 if engine.encoder is None else engine.runner.dtype
        card = export.model(args.out, engine, module, module.checkpoint(dtype), **facts)
        method, first = next(iter(card["plans"].items()))
        worth = (f"under {method} {first['after']['kept_words']:.1%} of the words are the model's own, "
                 f"{first['before']['kept_words']:.1%} before healing,")
        return card, worth, f"--model {args.out} --method {method}"
    model = f"--model {args.model or Path(engine.model_name).name} --method"
    if isinstance(module, drafter.DrafterModule):
        card = export.model(args.out, engine, module, module.checkpoint(), **facts)
        use = f"{model} deer --draft {args.out} --length {args.block}"
    elif isinstance(module, layers.CheckpointModule):
        card = layers.export(args.out, engine, module, args.weights != "float32", **facts)
        use = f"{model} {args.part} --part {args.out}"
    else:
        assert isinstance(module, ShippedModule)
        weights: export.Weights = "float32" if args.part == PROMPTS else args.weights
        card = export.export(args.out, engine, module, weights, **facts)
        use = f"{model} {args.part} --part {args.out}"
    if module.guesses:
        return card, f"{card['tokens_per_forward']} tokens per forward", use
    if args.part == ROUTERS:
        worth = card["ways"]["routed"]
        return card, f"{worth['layers']} layers run, {worth['kept_words']:.1%} of the words the same", use
    if args.part == EXPERTS:
        worth = f"with {card['experts']} groups {card['router']['kept_words']:.1%} of the words are the same,"
        return card, worth, f"{use} --experts {card['experts']}"
    kept = f"{card['kept']:.0%} of the tokens stay, {card['gate']['kept_words']:.1%} of the words the same"
    return card, kept, use


def _report(args: argparse.Namespace, found: dict[str, Any]) -> int:
    if args.json:
        common.print_json(found)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers below 1, and options that the kind does not have."""
    for name in ("each", "tokens", "max_new_tokens", "epochs", "steps", "batch", "vocabulary", "depths", "copies",
                 "rank", "groups", "experts", "windows"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.part == HEAL and args.under is None and args.student is None:
        raise ValueError("there is nothing to heal: name methods that drop layers by --under, or a smaller model by "
                         "--student")
    if args.under is not None:
        methods_from(args.under)
    if args.keep is not None and not 0 < args.keep < 1:
        raise ValueError(f"--keep is {args.keep}; it must be above 0 and below 1, a share of tokens or of layers")
    if args.rate is not None and not args.rate > 0:
        raise ValueError(f"--rate is {args.rate}; it must be above 0")
    parser = Parser(add_help=False)
    add_arguments(parser)
    for name in ("taps", "vocabulary"):
        if args.part == EAGLE and args.start is not None and getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--start goes on from a part of Shoal's own form with the tokens that it guesses, which "
                             f"--{name} would make another; leave out one of them")
    for action in parser._actions:
        owners = _ONLY.get(action.dest, (args.part,))
        if getattr(args, action.dest, action.default) == action.default:
            continue
        if args.part == SCRATCH and action.dest not in (*_SHARED, *_ONLY):
            raise ValueError(f"{action.option_strings[0]} says nothing to diffusion, which is trained from scratch on "
                             "texts of its own; leave it out")
        if args.part not in owners:
            raise ValueError(f"{action.option_strings[0]} belongs to {' and '.join(owners)}; leave it out for "
                             f"{args.part}")


def _wish(args: argparse.Namespace, taps: Sequence[int] = ()) -> CorpusWish:
    from shoal_lab.train.corpus import CorpusWish

    room = args.gigabytes / (1 + len(taps))
    return CorpusWish(args.tokens, args.max_new_tokens, args.temperature, args.seed, room)


def _taps(args: argparse.Namespace, engine: Engine) -> tuple[int, ...]:
    """The layers that --taps names, ascending; without it those of the kind's own, if it has any."""
    from shoal_lab.train import dflash, eagle3

    layers = engine.runner.num_layers
    if args.part == BLOCKS and args.taps in (None, "auto"):
        return dflash.default_taps(layers, args.layers)
    if args.taps is None:
        return ()
    if args.taps == "auto":
        return eagle3.default_taps(layers)
    found = args.taps.split(",")
    if not all(one.isdecimal() and int(one) < layers for one in found) or len({*found}) < len(found):
        raise ValueError(f"--taps is {args.taps!r}; it must be auto, or different layers of 0 to {layers - 1}, such as "
                         f"0,{layers // 2}")
    return tuple(sorted(map(int, found)))


def _shape(args: argparse.Namespace) -> DrafterShape | BlockShape | None:
    """The shape of a drafter that fills masks; None for other kinds."""
    from shoal_lab.train.dflash import BlockShape
    from shoal_lab.train.drafter import DrafterShape

    if args.part == BLOCKS:
        return BlockShape(args.layers, args.block)
    return DrafterShape(args.layers, args.block, args.window) if args.part == DRAFTER else None


def _sources(args: argparse.Namespace, engine: Engine) -> Sources | None:
    """What reads the prompts of a model with an encoder; None for others."""
    from shoal.errors import Unsupported
    from shoal_lab.train.sources import Sources

    if engine.encoder is None:
        if args.speech is not None:
            raise ValueError("--speech is for a model that hears; leave it out, or give a Whisper model")
        return None
    if args.part not in (HEAL, EAGLE) or args.student is not None or args.taps is not None:
        part = "--student" if args.student is not None else "--taps" if args.taps is not None else args.part
        raise Unsupported(f"{part} beside an encoder", "it would read the prompt as the decoder's",
                          "Use eagle, or heal with --under")
    found = list[Path]()
    for path in map(Path, filter(None, (args.speech or "").split(","))):
        found += sorted(one for one in path.iterdir() if one.suffix in _SOUNDS) if path.is_dir() else [path]
    return Sources(engine, found, args.language, args.part == EAGLE and bool(found), args.part != EAGLE)


def _prompts(args: argparse.Namespace, engine: Engine, sources: Sources | None = None) -> list[list[int]]:
    """Token ids of the prompts, shuffled, without those of the test sets in --data; or windows of sounds."""
    import random

    if sources is not None and args.speech is not None:
        return sources.windows(args.windows, args.seed)

    from shoal_lab.train import prompts

    texts = [text for name in (args.prompts or "").split(",") if name for text in prompts.from_file(Path(name))]
    if args.data is not None:
        texts += prompts.from_data(args.data, args.each, args.seed)
    count = args.questions if args.questions is not None else 0 if texts else 2000
    if count:
        _tell(f"letting the model ask {count} questions")
        texts += prompts.own_questions(engine, count, args.seed, tell=_tell)
    texts = list(prompts.without(texts, set() if args.data is None else prompts.tests(args.data)))
    random.Random(args.seed).shuffle(texts)
    _tell(f"{len(texts)} prompts")
    return prompts.encoded(texts, engine.tokenizer)


def _module(
    args: argparse.Namespace, engine: Engine, answers: Corpus, shape: DrafterShape | BlockShape | None,
    plans: dict[str, DepthPlan] | None,
) -> TrainedModule:
    """The component with its first weights."""
    import torch

    from shoal.speculative import draft_head_file
    from shoal_lab.train.context_gate import ContextGateModule, check_lengths
    from shoal_lab.train.dflash import BlockModule, BlockShape
    from shoal_lab.train.drafter import DrafterModule, mask_token
    from shoal_lab.train.eagle import EagleModule
    from shoal_lab.train.eagle3 import TappedModule
    from shoal_lab.train.heal import HealModule
    from shoal_lab.train.layer_routers import LayerRouterModule
    from shoal_lab.train.medusa import MedusaModule
    from shoal_lab.train.part import Base, PartModule
    from shoal_lab.train.ppd import PromptModule
    from shoal_lab.train.read_me import ReadMEModule, group_neurons, some_answers
    from shoal_lab.train.sources import plain, spoken

    if shape is not None:
        mask = mask_token(engine, answers, args.mask_token)
        if isinstance(shape, BlockShape):
            return BlockModule.fresh(Base(engine.runner), answers, shape, mask, args.seed)
        return DrafterModule(Base(engine.runner), _plain(args), shape, mask, args.seed)
    if plans is not None and args.part == HEAL:
        half = engine.runner.dtype == torch.bfloat16
        model = (_plain(args, args.student, "bfloat16" if half else "float32") if engine.encoder is None
                 else plain(engine, engine.runner.dtype))
        return HealModule(Base(engine.runner), model, plans, args.rank, args.seed, args.recompute, half,
                          args.ranks == "by-width")
    if args.part == PROMPTS:
        return PromptModule(Base(engine.runner), _plain(args), args.depths or 3, args.seed, args.copies)
    if args.part == EXPERTS:
        whole = _plain(args)
        neurons = group_neurons(whole, some_answers(answers), args.groups, args.shared, args.seed)
        return ReadMEModule(Base(engine.runner), whole, neurons, args.shared, args.experts, args.seed)
    if args.start is not None:
        part = draft_head_file.read(str(args.start), args.part, engine.info())
        return EagleModule.going_on(Base(engine.runner), part, args.depths, args.seed)
    often = {*answers.frequent(args.vocabulary), *engine.eos_token_ids}
    ids = sorted(often if args.speech is None else {*often, *spoken(engine, often, args.vocabulary)})
    keep = args.keep or _KEEP.get(args.part, 1.0)
    if args.part == CONTEXT:
        check_lengths(answers)
        return ContextGateModule(Base(engine.runner), _plain(args), args.gate_layer, keep, ids, args.seed)
    if plans is not None:
        return LayerRouterModule(Base(engine.runner), _plain(args), keep, ids, plans, args.seed)
    eagle = TappedModule if answers.taps else EagleModule
    kinds: dict[str, type[PartModule]] = {kind.kind: kind for kind in (eagle, MedusaModule)}
    return kinds[args.part].fresh(Base(engine.runner), answers, ids, args.depths, args.seed)


def _plans(args: argparse.Namespace, engine: Engine) -> dict[str, DepthPlan]:
    """The depth plans that --under names, by name: to heal the model or the smaller one at, or as rivals.

    Plans that cannot be trained under are refused here, before minutes of answers.
    """
    from shoal_lab.train.heal import check_plans

    if args.student is not None:
        engine = common.load_engine(argparse.Namespace(**{**vars(args), "model": args.student}))
    plans = {}
    named = args.under or (FULL if args.part == HEAL else "")
    for word, method in (methods_from(named) if named else {}).items():
        recipe = engine.recipe(method, args.max_new_tokens)
        if extra := recipe.beside_plan:
            raise ValueError(f"--under names {word}, which does more than leave out layers ({extra[0]}); name methods "
                             "that fill the plan alone, such as d3")
        plans[word] = recipe.plan
    check_plans(plans, engine.runner.num_layers)
    del engine
    gc.collect()  # a student's engine is not needed any more, and frames of imports may hold it
    return plans


def _plain(args: argparse.Namespace, model: str | None = None, dtype: str = "float32") -> Any:
    """The model as transformers' model, or another one."""
    plain = {"model": model or args.model, "backend": "hf", "dtype": dtype, "device": "cpu", "quant": None}
    return common.load_engine(argparse.Namespace(**{**vars(args), **plain})).model


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
