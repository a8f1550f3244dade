"""Find the depth schedule that saves most for a given loss of quality, and write it as a card.

With --for double_sparsity, rank the dimensions of keys for that method instead; with --for tidal, find the layer that
selects KV slots again; with --for draft_and_verify, the sublayers that a draft can skip.

The card runs anywhere a method does (--method card.json) and refuses other models. Calibration reads other items than
an evaluation does. Two runs with one seed write the same card, except for measured times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import env
from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal_lab.cli import measuring

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal_lab.calibrate.skips import SkipCard
    from shoal_lab.eval.evaluate import Evaluator
    from shoal_lab.eval.items import Item

_SCORED = 64
"""Tokens at the end of a novel's stretch that are compared."""
EXAMPLES = """examples:
  shoal calibrate --suite gsm8k_renumbered --data DIR --max-drop 0.01 --out card.json
  shoal calibrate --suite wikitext2 --data DIR --metric perplexity --max-drop 0.02 --out card.json
  shoal calibrate --for double_sparsity --suite wikitext2 --data DIR --out channels.json
  shoal calibrate --for tidal --suite needle,novels --context 4k --data DIR --out tidal.json
  shoal calibrate --for draft_and_verify --suite chat --data DIR --minutes 10 --out skips.json
  shoal calibrate --for adadec --suite humaneval --data DIR --out adadec.json
  shoal calibrate --for atts --draft SMALLER --suite humaneval --data DIR --out atts.json
  shoal generate --method card.json "Tom has 15 cups. He buys 4 boxes with 6 cups each. How many cups does he have now?"
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    aim = parser.add_argument_group("aim")
    aim.add_argument("--for", dest="purpose", default="depth",
                     choices=("depth", "adadec", "atts", "double_sparsity", "draft_and_verify", "tidal"),
                     help="a depth schedule, the entropy from which on adadec pauses, the scores that atts compares "
                     "with, the dimensions that double_sparsity scores by, the sublayers that draft_and_verify skips, "
                     "or the layer in which tidal selects anew; for all but the first only --suite, --data, --loss-n, "
                     "--seed, --threads and --out count, for draft_and_verify --trials and --minutes too")
    aim.add_argument("--metric", choices=("accuracy", "perplexity", "agreement"), default="accuracy",
                     help="what must not drop; agreement is ROUGE-L with the full model's answers")
    aim.add_argument("--max-drop", metavar="X", type=float, default=0.01, help="how much it may drop: 0.01 is one "
                     "point of accuracy or agreement, or 1 %% of perplexity")
    aim.add_argument("--core", metavar="N", type=int, help="layers that always run; max(4, L/8) if none")
    pair = parser.add_argument_group("for atts")
    pair.add_argument("--draft", metavar="M", help="the smaller model")
    pair.add_argument("--draft-tokens", metavar="N", type=int, default=64, help="tokens of a chunk")
    pair.add_argument("--samples", metavar="N", type=int, default=4, help="chunks of each item")
    pair.add_argument("--temperature", metavar="T", type=float, default=0.8, help="at which they are drawn")
    drafts = parser.add_argument_group("for draft_and_verify")
    drafts.add_argument("--texts", metavar="N", type=int, default=8, help="answers on which sets are judged, in place "
                        "of --loss-n")
    drafts.add_argument("--into", metavar="CARD.json", type=Path, help="a model's card that the sets go to as well; "
                        "they are then judged by the bytes that they read, so that this machine does not count")
    long = parser.add_argument_group("for tidal, whose --suite names suites of long contexts: needle, novels, ...")
    long.add_argument("--context", metavar="N", default="4k", help="tokens of a context")
    long.add_argument("--contexts", metavar="N", type=int, default=2, help="contexts of each suite")
    long.add_argument("--questions", metavar="N", type=int, default=20, help="questions on each")
    long.add_argument("--k", metavar="N", type=int, default=256, help="slots that a query reads where a layer does "
                      "not select")
    data = parser.add_argument_group("data")
    data.add_argument("--suite", metavar="S", help="a suite that `shoal eval --list` names, or FILE.jsonl; its "
                      "calibration part is read")
    data.add_argument("--data", metavar="DIR", type=Path, help="folder that holds gsm8k/, wikitext2/, novels/")
    data.add_argument("--loss-n", metavar="N", type=int, default=64, help="items on which schedules are searched")
    data.add_argument("--answer-n", metavar="N", type=int, default=256, help="items on which answers are judged")
    data.add_argument("--max-new-tokens", metavar="N", type=int, default=256, help="the longest answer")
    data.add_argument("--seed", metavar="N", type=int, default=0, help="which items, in which order")
    how = parser.add_argument_group("procedure")
    how.add_argument("--trials", metavar="N", type=int, default=400, help="most schedules to try")
    how.add_argument("--minutes", metavar="T", type=float, help="end the command then, about, "
                     "and take as many items as fit; the card says what was cut")
    how.add_argument("--batch", metavar="N", type=int, default=64, help="items decoded together")
    how.add_argument("--out", metavar="CARD.json", type=Path, default=Path("card.json"), help="where the card goes")
    how.add_argument("--threads", metavar="N", type=int, help="CPU threads; as torch chooses if none")
    how.add_argument("--plot", metavar="F.png", type=Path, help="draw the layers' scores (needs matplotlib)")
    how.add_argument("--no-timing", action="store_true", help="predict no speed-up in time on this machine")
    how.add_argument("--force", action="store_true", help="search even where no schedule can gain anything here")
    common.add_model(parser)
    common.add_json(parser)
    parser.show_usual("--for", "--model", "--metric", "--max-drop", "--suite", "--data", "--minutes", "--out", "--plot")


def run(args: argparse.Namespace) -> int:
    """Calibrate, print the result, end with one JSON line."""
    if args.purpose != "depth":
        return {"adadec": _learn_pauses, "atts": _score_chunks, "double_sparsity": _channels,
                "draft_and_verify": _search_skips, "tidal": _reselection}[args.purpose](args)
    from shoal_lab.calibrate.calibration import Aim, card, search
    from shoal_lab.eval import suites
    from shoal_lab.eval.evaluate import Evaluator

    began = time.monotonic()
    aim = Aim(args.metric, args.max_drop, args.trials, args.loss_n, args.answer_n, args.core, args.minutes)
    suite = suites.get(_suite(args))
    if suite.kind == "text" and aim.metric != "perplexity":
        raise ValueError(f"suite {suite.name} has no answers to judge; take --metric perplexity, or another suite")
    _check_out(args.out)
    items = suite.items(args.data, "calibration", max(args.loss_n, args.answer_n), args.seed)
    measuring.check_plot(args.plot)
    engine = _engine(args)
    _tell("timing its steps on this machine" if not args.no_timing else "leaving out each layer")
    evaluator = Evaluator(engine, max_new_tokens=args.max_new_tokens, batch=args.batch)
    measured = {} if args.no_timing else _predict(args, evaluator, items[: args.loss_n])
    found = search(evaluator, items, aim, began=began)
    made = card(engine, found, aim, seed=args.seed, suite=suite.name, items=items, measured=measured,
                versions=_versions())
    if measured:
        _speedup(engine, made)
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        from shoal_lab.eval.plots import draw_layers

        draw_layers(made, args.plot)
    if not args.json:
        print(_text(made, args.out))
    common.print_json(made)
    return 0


def _channels(args: argparse.Namespace) -> int:
    """Rank dimensions, and write the card of the method that uses them; ends with one JSON line."""
    from shoal_lab.calibrate.channels import channel_card
    from shoal_lab.eval import suites

    suite = suites.get(_suite(args))
    _check_out(args.out)
    items = suite.items(args.data, "calibration", args.loss_n, args.seed)
    made = channel_card(_engine(args), items, suite.name, args.seed)
    args.out.write_text(json.dumps(made) + "\n", encoding="utf-8")
    if not args.json:
        print(f"the dimensions of keys, ranked on {len(items)} texts; it is run by --method {args.out}")
    common.print_json(made)
    return 0


def _reselection(args: argparse.Namespace) -> int:
    """Find the layer in which tidal selects again; ends with one JSON line."""
    from shoal_lab.calibrate.reselection import OTHER_SEEDS, reselection_card
    from shoal_lab.eval.long.budgets import lengths_of
    from shoal_lab.eval.long.contexts import LONGEST, Maker, Wanted

    names = _suite(args).split(",")
    if wrong := [name for name in names if name not in LONGEST]:
        raise ValueError(f"suite {wrong[0]} has no long contexts; with --for tidal there are {', '.join(LONGEST)}")
    for option in ("contexts", "questions", "k"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option} is {getattr(args, option)}; it must be at least 1")
    _check_out(args.out)
    engine = _engine(args)
    if engine.tokenizer is None:
        raise ValueError("the model has no tokenizer, so there is no text that it can read")
    wanted = [Wanted(name, length, args.contexts, args.questions, LONGEST[name] or _SCORED, args.seed + OTHER_SEEDS)
              for name in names for length in lengths_of(args.context, engine.runner.max_positions)]
    made = reselection_card(engine, wanted, Maker(engine.tokenizer, args.data), args.k)
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if not args.json:
        print(_layers_text(made, args.out))
    common.print_json(made)
    return 0


def _layers_text(made: dict[str, Any], out: Path) -> str:
    """The agreement with the full model's tokens by layer, and the chosen layer."""
    names = [f"{one['suite']} {one['length']}" for one in made["data"]]
    rows = [f"{layer:>5}  " + "  ".join(f"{100 * share:{len(name)}.1f}" for share, name in
                                        zip(shares, names, strict=True)) for layer, shares in made["agreement"].items()]
    return "\n".join(["layer  " + "  ".join(names), *rows, f"layer {made['reselect']} selects anew, {made['default']} "
                      f"without this card; the number of layers: none does. It is run by --method {out}"])


def _learn_pauses(args: argparse.Namespace) -> int:
    """Learn the threshold of adadec; ends with one JSON line."""
    from shoal_lab.calibrate import pauses
    from shoal_lab.eval import suites

    suite = suites.get(_suite(args))
    if suite.kind != "problems":
        raise ValueError(f"suite {suite.name} has no reference solutions; give another, such as humaneval")
    _check_out(args.out)
    items = suite.items(args.data, "calibration", args.loss_n, args.seed)
    engine = _engine(args)
    _tell("reading reference solutions")
    entropies, right = pauses.observe(engine, items, args.batch)
    made = pauses.card(engine, pauses.learn(entropies, right, args.seed), suite=suite.name, items=items,
                       seed=args.seed, versions=_versions())
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if not args.json:
        found = made["learned"]
        print(f"adadec pauses from {found['threshold']:.3f} nats on: at {found['pauses']:.1%} of {found['tokens']} "
              f"tokens of reference solutions. The likeliest token is right at {found['right']:.1%} of all; by its "
              f"entropy, as many right as wrong, that is told in {found['accuracy']:.1%} of held-out tokens\n"
              f"written to {args.out}")
    common.print_json(made)
    return 0


def _score_chunks(args: argparse.Namespace) -> int:
    """Measure the scores of atts; ends with one JSON line."""
    from shoal_lab.calibrate import chunks
    from shoal_lab.eval import suites
    from shoal_lab.methods.atts import ATTS

    if args.draft is None or args.draft_tokens < 1 or args.samples < 1:
        raise ValueError("scores for atts take --draft, the smaller model; --draft-tokens and --samples are at least 1")
    suite, method = suites.get(_suite(args)), ATTS(args.draft, draft_tokens=args.draft_tokens)
    _check_out(args.out)
    items = suite.items(args.data, "calibration", args.loss_n, args.seed)
    engine = _engine(args)
    scores = chunks.observe(engine, items, method, args.samples, args.temperature, args.seed)
    made = chunks.card(engine, method, scores, suite=suite.name, items=items, samples=args.samples,
                       temperature=args.temperature, seed=args.seed, versions=_versions())
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if not args.json:
        print(f"{len(scores)} chunks of {args.draft_tokens} tokens, mean losses of {scores[0]:.3f} to {scores[-1]:.3f} "
              f"nats per token, {scores[len(scores) // 2]:.3f} in the middle; they are compared with by "
              f"--method {args.out}")
    common.print_json(made)
    return 0


def _search_skips(args: argparse.Namespace) -> int:
    """Search for the sublayers that a draft can skip; ends with one JSON line."""
    from shoal.engine.cards.card import load_json
    from shoal_lab.calibrate import skips
    from shoal_lab.eval import suites
    from shoal_lab.eval.items import encode

    for option in ("texts", "trials"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option} is {getattr(args, option)}; it must be at least 1")
    suite, own = suites.get(_suite(args)), None if args.into is None else load_json(args.into)
    _check_out(args.out)
    items = suite.items(args.data, "calibration", args.texts, args.seed)
    engine = _engine(args)
    if engine.tokenizer is None:
        raise ValueError("the model has no tokenizer, so there is no text that it can read")
    samples = encode(items, engine.tokenizer, None, engine.runner.max_positions)
    _tell("answering, and trying sets of sublayers")
    found = skips.search_skips(
        engine, [list(one.prompt) for one in samples], seconds=60 * (args.minutes or 1.0), rounds=args.trials,
        seed=args.seed, costs=None if own is None else skips.byte_costs(engine))
    made = skips.method_card(engine, found, suite=suite.name, items=items, seed=args.seed, versions=_versions(),
                             costs="measured times" if own is None else "bytes")
    if own is not None:
        args.into.write_text(json.dumps(skips.filled(own, engine, found)) + "\n", encoding="utf-8")
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if not args.json:
        print(_skips_text(found, args.out))
    common.print_json(made)
    return 0


def _skips_text(found: SkipCard, out: Path) -> str:
    """What the best set leaves out, and what it promises."""
    if not found.length:
        return (f"none of {found.rounds} sets of sublayers can be skipped with a gain: a draft without them is not "
                f"right often enough for what it costs. Written to {out}")
    return (f"attention of layers {list(found.skips.attention)} and MLP of layers {list(found.skips.mlp)} are "
            f"skipped: {found.rate:.1%} of the words are the same, {found.speedup:.2f}x with {found.length} guesses at "
            f"a time, as far as costs say; the best of {found.rounds} sets. It is run by --method {out}")


def _engine(args: argparse.Namespace) -> Engine:
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    _tell("reading the model")
    engine = common.load_engine(args)
    engine.recipe("full", 1)  # layers are measured on texts read from left to right
    return engine


def _check_out(path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {str(path.resolve().parent)!r} to write {path.name} to")


def _tell(message: str) -> None:
    """Print progress for a user at a terminal."""
    if sys.stderr.isatty():
        print(f"{message} ...", file=sys.stderr)


def _suite(args: argparse.Namespace) -> str:
    from shoal_lab.eval import suites

    if not args.suite:
        raise ValueError(f"--suite is missing; there are {', '.join(suites.names())}, or give a FILE.jsonl")
    return str(args.suite)


def _predict(args: argparse.Namespace, evaluator: Evaluator, items: list[Item]) -> dict[str, Any]:
    """The machine's cost card, and the most that any schedule could gain by it; refuses if that is nothing."""
    from statistics import median

    from shoal.depth.order import default_core
    from shoal.depth.plan import NEVER, DepthPlan
    from shoal_lab.calibrate.cost import measure

    engine = evaluator.engine
    samples = evaluator.samples(items)
    prompt = int(median(len(sample.prompt) for sample in samples))
    answer = int(median(len(sample.reference) for sample in samples))
    cost = measure(engine, seconds=0.5)
    layers = engine.runner.num_layers
    kept = args.core or default_core(layers).size
    least = DepthPlan.whole_layers([NEVER] * kept + [1] * (layers - kept))
    new = max(answer, 2)
    most = cost.predict(DepthPlan.full(layers), prompt, new) / cost.predict(least, prompt, new)
    print(f"predicted on this machine, prompt {prompt}, answer {new} tokens: running the {kept} core layers alone "
          f"would be {most:.2f}x as fast; no schedule gains more", file=sys.stderr)
    if most < 1.05 and not args.force:
        raise ValueError(f"depth schedules are not worth it here: at most {most:.2f}x, since layers are not what a "
                         "step's time goes into. Use --force to calibrate all the same")
    return {"cost": cost.to_dict(), "windows": list(cost.windows), "prompt": prompt, "answer": new, "most": most,
            "machine": env.collect()}


def _speedup(engine: Engine, made: dict[str, Any]) -> None:
    """Add the chosen schedule's predicted speed-up in time."""
    from shoal.methods import make
    from shoal_lab.components.cost import CostCard

    measured = made["measured"]
    numbers = {**measured["cost"], "prefill": tuple(map(tuple, measured["cost"]["prefill"]))}
    cost = CostCard(**numbers, windows=tuple(measured.pop("windows")))
    times = [cost.predict(engine.recipe(method, measured["answer"]).plan, measured["prompt"], measured["answer"])
             for method in ("full", make(made["method"]))]
    measured["predicted_speedup"] = times[0] / times[1]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from shoal import __version__

    return {"shoal": __version__, "torch": version("torch"), "transformers": version("transformers")}


def _text(made: dict[str, Any], path: Path) -> str:
    scores, costs = made["layer_scores"], made["model"]["num_layers"] + made["model"]["head_layers"]
    lines = [f"{'layer':>5}  {'influence':>9}  {'loss change':>11}  {'share of a token':>16}"]
    lines += [f"{layer:>5}  {scores['influence'][layer]:>9.4f}  {scores['leave_one_out'][layer]:>+11.4f}  "
              f"{1 / costs:>15.1%} " for layer in range(made["model"]["num_layers"])]
    lines += ["", f"{'schedule':<16} {'layers':>6} {'ideal':>6} {'loss change':>11}"]
    lines += [f"{p['label']:<16} {p['mean_layers']:>6.2f} {p['ideal_speedup']:>5.2f}x {p['loss_rise']:>+11.4f}"
              for p in made["curve"]]
    return "\n".join([*lines, "", _verdict(made), f"written to {path}"])


def _verdict(made: dict[str, Any]) -> str:
    aim, chosen = made["aim"], made["chosen"]
    short = " The search was cut short by time." if made["trials"]["cut_short"] else ""
    if chosen is None:
        return (f"No schedule keeps the drop of {aim['metric']} within {aim['max_drop']:g}: depth schedules are not "
                f"worth it for this model and data. The card runs all layers.{short}")
    predicted = made["measured"].get("predicted_speedup")
    said = "" if predicted is None else f", predicted {predicted:.2f}x in time here"
    poor = " That is hardly worth a loss of quality." if predicted is not None and predicted < 1.05 else ""
    return (f"{chosen['label']}: {chosen['mean_layers']:.2f} of {made['model']['num_layers']} layers, ideal "
            f"{chosen['ideal_speedup']:.2f}x{said}.{poor}{short}")
