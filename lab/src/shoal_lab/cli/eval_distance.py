"""`shoal eval --measure distance`: runs a comparison by distance, and writes its report."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal_lab.eval.items import Item
    from shoal_lab.eval.study import Study
    from shoal_lab.eval.suites import Suite


def measure(
    args: argparse.Namespace, engine: Engine, study: Study, suites: Sequence[tuple[Suite, Sequence[Item]]]
) -> int:
    """Measure, print the table, end with one JSON line."""
    from shoal.cli import env
    from shoal_lab.bench.report import heading
    from shoal_lab.eval import distance_study
    from shoal_lab.eval.distance import LONGEST, Distances
    from shoal_lab.eval.outcomes import Outcomes
    from shoal_lab.eval.study import engine_facts

    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    kept = Outcomes(None if args.out is None else args.out / "outcomes.jsonl")
    distances = Distances(engine, kept, args.max_new_tokens or LONGEST, until=until)
    try:
        texts = distance_study.texts_of(distances, suites)
        report: dict[str, Any] = {**heading(env.collect(), args.argv), **engine_facts(engine), "seed": args.seed,
                                  "distance": distance_study.run(distances, texts, study, _others(args))}
    except TimeoutError as error:
        print(error)
        return 0
    report["minutes"] = kept.minutes
    read = report["distance"]["read"]
    if read < len(texts):
        report["distance"]["warning"] = (f"{read} of {len(texts)} texts are read; depths are equal over all of them "
                                         "only, so look at mean layers before comparing. The same command goes on")
        print(f"warning: {report['distance']['warning']}", file=sys.stderr)
    if args.timed:
        from shoal_lab.calibrate import cost

        card = cost.measure(engine)
        report["distance"]["cost"] = card.to_dict()
        report["distance"]["times"] = distance_study.times(distances, texts, study, args.timed, card)
    if args.out is not None:
        text = re.sub(r"\{[^{}\[\]]*\}", lambda found: " ".join(found[0].split()), json.dumps(report, indent=1))
        (args.out / "results.json").write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        from shoal_lab.eval.plots import draw_distance

        draw_distance(report, args.plot)
    if not args.json:
        from shoal_lab.eval.table import distance_table, times_table

        print(distance_table(report["distance"]["rows"]))
        if args.timed:
            print(f"\n{times_table(report['distance']['times'])}")
    common.print_json(report)
    return 0


def _others(args: argparse.Namespace) -> dict[str, Engine]:
    """The models of `--others` by name, loaded like `--model` or with the quantisation that their name ends with."""
    from shoal.engine.loading.checkpoint import shown_name

    found = {}
    for name in filter(None, (args.others or "").split(",")):
        model, quant = quantised(name)
        changes = {"model": model, "method": None, "quant": quant or args.quant}
        found[shown_name(model) + (f"@{quant}" if quant else "")] = common.load_engine(
            argparse.Namespace(**{**vars(args), **changes}))
    return found


def quantised(name: str) -> tuple[str, Any]:
    """A model and its quantisation: both of `M@int4`, None for another name."""
    model, at, quant = name.rpartition("@")
    return (model, quant) if at and quant in ("int8", "int4") else (name, None)
