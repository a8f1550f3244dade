"""Recommend a method for a model and a kind of task, from measurements, and say what is not known.

Recommended methods give the full model's output, unless --max-drop allows a loss. A loss counts by the upper end of its
95 % interval.
"""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser

EXAMPLES = """examples:
  shoal recommend --model SmolLM2-135M-Instruct.Q4_1.gguf
  shoal recommend --model path/to/model --task code --max-drop 0.015
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--task", metavar="T", help="kind of task, such as chat or code; by default all known ones")
    parser.add_argument("--max-drop", metavar="X", type=float, default=0.0,
                        help="share of right answers that may be lost; 0.015 is 1.5 points, 0 none")
    common.add_model(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the advice."""
    if not 0 <= args.max_drop < 1:
        raise ValueError(f"--max-drop is {args.max_drop}; it must be in [0, 1): 0.015 is 1.5 points")
    from shoal.engine.cards import card as cards
    from shoal.engine.cards.recommend import Evidence, report
    from shoal.engine.loading.checkpoint import shown_name

    engine = common.load_engine(args)
    found = Evidence.from_dict(cards.evidence(engine))
    if args.task is not None and found.tasks and args.task not in found.tasks:
        raise ValueError(f"--task is {args.task!r}; of this model {', '.join(found.tasks)} were measured")
    tasks = found.tasks if args.task is None or not found.tasks else (args.task,)
    told = {"model": shown_name(engine.model_name), **report(found, tasks, args.max_drop)}
    if not tasks:
        told["not_known"] = ["what drafts bring: `shoal bench-drafts --model M`", "what fewer layers lose: `shoal eval "
                             "--suite S --data DIR --model M --controls 1.05,1.1`, or `shoal calibrate` for a card"]
    if not args.json:
        print(_text(told, engine.card.bears, engine.stack.num_layers))
    common.print_json(told)
    return 0


def _text(told: dict[str, Any], bears: float | None, layers: int) -> str:
    lines = []
    for advice in told["advice"]:
        lines.append(f"{advice['task']}: --method {advice['method']}\n  {advice['why']}")
    if not lines:
        lines.append("Nothing was measured of this model. Begin with --method auto, which is exact and drafts only "
                     "where that pays.")
    if bears is not None:
        lines.append(f"A D3 schedule moves its distribution by 0.1 nats a token at {bears:.1f} of {layers} layers.")
    lines.append("Not known:\n" + "\n".join(f"  - {words}" for words in told["not_known"]))
    if told["machine"]:
        lines.append(f"Times were taken on {told['machine']}.")
    return "\n".join(lines)
