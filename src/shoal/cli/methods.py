"""List the methods: paper, exactness, needs, and whether a model can run each.

`exact` means that the output equals the full model's: greedy tokens one by one, sampled ones in distribution. It is
derived from the parts that a method's default knobs put together, not declared by the method.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

from shoal import methods
from shoal.cli import common
from shoal.cli.parser import Parser
from shoal.methods.base import Method
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

EXAMPLES = """examples:
  shoal methods
  shoal methods --model path/to/model
  shoal methods --json | python -m json.tool
"""
_LAYERS = 32
NOMINAL = ModelInfo(
    num_layers=_LAYERS,
    scores={kind: tuple(map(float, range(_LAYERS))) for kind in ("influence", "leave_one_out")},
    can_split=True,
)
"""A calibrated model of a common size, to ask a method what it promises where it has all it needs."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_model(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    engine = common.load_engine(args) if args.model else None
    info = None if engine is None else engine.info()
    rows = [describe(name, info) for name in methods.names()]
    if args.json:
        common.print_json({"methods": rows, "model": args.model, "card": None if engine is None else _card(engine)})
    else:
        print("\n\n".join(_text(row) for row in rows))
        if engine is not None:
            print(f"\n{_said(engine)}")
    return 0


def _card(engine: Engine) -> dict[str, Any]:
    """What is known about the model's layers."""
    card = engine.card
    return {"origin": card.origin or None, "borrowed": card.borrowed, "bears": card.bears, "empty": card.empty}


def _said(engine: Engine) -> str:
    card = engine.card
    if card.empty:
        return ("Nothing is known about this model's layers: depth methods drop them by position. The first use of one "
                "with `shoal generate` measures them.")
    bears = "" if card.bears is None else f" It bears {card.bears:g} of {engine.stack.num_layers} layers on average."
    return f"What its layers are worth is known: {card.origin}.{bears}"


def describe(name: str, info: ModelInfo | None) -> dict[str, Any]:
    """One method as a JSON object; `runs` and `why_not` speak of the model behind `info` (None where there is none)."""
    try:
        cls = methods.get(name)
        row = {
            "name": name,
            "summary": (cls.__doc__ or "").strip().split("\n")[0],
            "paper": cls.paper,
            "needs": list(cls.needs),
            **_exactness(cls),
            "options": _options(cls),
        }
    except Exception as error:  # somebody else's method must not take the list down
        return {"name": name, "summary": "", "paper": "", "needs": [], "exact": None, "exact_to": None, "options": {},
                "runs": False, "why_not": f"cannot be imported: {error}"}
    why_not = _refusal(cls, info)
    return {**row, "runs": None if info is None else why_not is None, "why_not": why_not}


def _exactness(cls: type[Method]) -> dict[str, Any]:
    try:
        exact_to = cls().recipe(NOMINAL).exact_to
    except (ValueError, TypeError):  # no defaults: its promise depends on knobs that have to be given
        return {"exact": None, "exact_to": None}
    return {"exact": exact_to == "full", "exact_to": exact_to}


def _options(cls: type[Method]) -> dict[str, Any]:
    return {field.name: None if field.default is dataclasses.MISSING else _plain(field.default)
            for field in dataclasses.fields(cls) if field.init}


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, Method) else value


def _refusal(cls: type[Method], info: ModelInfo | None) -> str | None:
    if info is None:
        return None
    try:
        cls().recipe(info)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def _text(row: dict[str, Any]) -> str:
    promise = {"full": "exact", "plan": "lossy, exact to its plan", "none": "lossy", None: "depends on its options"}
    head = f"{row['name']:<24} {promise[row['exact_to']]}{'; ' + row['paper'] if row['paper'] else ''}"
    notes = [row["summary"]]
    if row["needs"]:
        notes.append(f"Needs {', '.join(row['needs'])}.")
    if row["runs"] is not None:
        notes.append("Runs on this model." if row["runs"] else f"Does not run on this model: {row['why_not']}")
    return "\n".join([head, *(textwrap.fill(note, 110, initial_indent="  ", subsequent_indent="  ") for note in notes)])
