"""Answer a file of prompts. After a kill at any point, the same command resumes the job.

A line of the input is a JSON object with a prompt (text or token ids) or messages, and any options: id, method,
method_args, max_new_tokens, temperature, stop, seed, guided_json, ... A line of the output names the input's line and
id. Answers come in the order in which they end. A line in error gets a record that says why; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import catalog
from shoal.cli.options import common
from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.batch.job import Answer, Report
    from shoal.batch.lines import Line, Record
    from shoal.engine.scheduling.scheduler import Scheduler

EXAMPLES = """examples:
  shoal batch questions.jsonl answers.jsonl --max-new-tokens 128
  shoal batch questions.jsonl answers.jsonl --regex "yes|no"
  shoal batch questions.jsonl answers.jsonl --model path/to/model --method d3 --alpha 0.99 --admission waves
  shoal batch questions.jsonl answers.jsonl --model path/to/model --ray 4
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("input", metavar="IN.jsonl", type=Path, help="one JSON object per line")
    parser.add_argument("output", metavar="OUT.jsonl", type=Path, help="the answers; OUT.jsonl.job identifies the job")
    common.add_method(parser)
    sampling = common.add_sampling(parser, greedy=True)
    sampling.add_argument("--logprobs", metavar="N", type=int, help="log-probabilities and N alternatives")
    common.add_constraint(sampling)
    common.add_adapter(common.add_model(parser))
    scheduling = common.add_scheduling(parser)
    scheduling.add_argument("--ray", metavar="N", type=int, help="share the lines among N processes, each with its own "
                            "model; needs the extra ray")
    common.add_json(parser)
    parser.show_usual("--model", "--method", "--max-new-tokens", "--temperature", "--seed", "--stop", "--json-schema",
                      "--max-seqs", "--json")


def run(args: argparse.Namespace) -> int:
    """Answer the lines that are left."""
    from shoal.batch import job

    if args.ray is not None and args.ray < 1:
        raise ValueError(f"--ray is {args.ray}; it must be at least 1")
    if args.ray is not None:
        from shoal.integrations import local_ray

        local_ray.require(f"shoal batch --ray {args.ray}")
    try:
        report = job.run(args.input, args.output, _settings(args), partial(_here if args.ray is None else _ray, args))
    except KeyboardInterrupt:
        print(f"the answers so far are in {args.output}; the same command resumes the job", file=sys.stderr)
        raise
    print(summary(report), file=sys.stderr)
    if args.json:
        common.print_json(report.to_dict())
    return 1 if report.errors else 0


def _here(args: argparse.Namespace) -> Answer:
    """Load the model in this process, to answer lines with it."""
    from shoal.batch.job import BatchRunner

    made = _scheduler(args)

    def answer(lines: Iterable[Line]) -> Iterator[Record]:
        with made as scheduler:
            yield from BatchRunner(scheduler, _defaults(args)).answers(lines)

    return answer


def _ray(args: argparse.Namespace) -> Answer:
    """Answer lines with models in other processes."""
    from shoal.batch.ray_data import Actors, answers

    actors = Actors(args.ray, args.device, args.max_seqs)
    return partial(answers, make=partial(_scheduler, args), defaults=_defaults(args), actors=actors)


def _scheduler(args: argparse.Namespace, max_waiting: int = 256) -> Scheduler:
    """A scheduler with a newly loaded model."""
    engine = common.load_engine(args)
    engine.recipe(args.method, args.max_new_tokens)  # a method that cannot run at all is an error of the whole job
    return common.make_scheduler(args, engine, max_waiting=max_waiting)


def _defaults(args: argparse.Namespace) -> dict[str, Any]:
    bound = {} if (one := common.constraint(args)) is None else {"constraint": one}
    return {**common.sampling(args), **bound, "logprobs": args.logprobs, "method": args.method.to_dict()}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the answers depend on; they identify the job."""
    model = {"name": args.model, "revision": args.revision}
    place = catalog.find(args.model)
    if os.path.exists(place):
        from shoal.engine.cards.fingerprint import of_model

        model = {"fingerprint": of_model(None, place)}
    options = _defaults(args)
    if "constraint" in options:
        options["constraint"] = {type(options["constraint"]).__name__: options["constraint"].text}
    if args.lora:  # absent otherwise, so that jobs that were begun before there were adapters go on
        model["lora"] = [f"{wish.path}:{wish.scale}" for wish in args.lora]
    return {"model": {**model, "dtype": args.dtype, "backend": args.backend, "quant": args.quant}, "option": options}


def summary(report: Report) -> str:
    """The line of figures at the end."""
    found = report.to_dict()
    errors = f"{report.errors} in error" if report.errors else "none in error"
    if not report.written:
        return f"[all {report.lines} lines were done before, {errors}]"
    depth = f", {found['mean_layers']:.2f} layers on average" if report.new_tokens else ""
    return (f"[{report.before + report.written} of {report.lines} lines, {errors}; now {report.written} lines and "
            f"{report.new_tokens} tokens in {report.seconds:.1f} s, {found['tokens_per_second']:.1f} tokens/s{depth}]")
