"""List the methods: family, paper, exactness, needs, what each combines with, and whether a model can run it.

`exact` means that the output equals the full model's: greedy tokens one by one, sampled ones in distribution. It is
derived from the components of a method with default options, not declared by the method. Two methods combine if they
fill different components and neither excludes a component of the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal import methods
from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal.errors import Unsupported
from shoal.methods.base import Method, check_order
from shoal.methods.common.combined import FAMILIES, QUESTIONS, family_of
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.recipe import Recipe
    from shoal.engine.engine import Engine

EXAMPLES = """examples:
  shoal methods
  shoal methods --model path/to/model
  shoal methods --json | python -m json.tool
"""
_LAYERS = 32
NOMINAL = ModelInfo(num_layers=_LAYERS,
                    scores={kind: tuple(map(float, range(_LAYERS))) for kind in ("influence", "leave_one_out")},
                    can_split=True)
"""A calibrated model of a common size, for which methods are asked what they promise."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_model(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    engine = common.load_engine(args) if args.model else None
    rows = table(None if engine is None else engine.info())
    text = "\n\n".join(_text(row, rows) for row in rows)
    told: dict[str, Any] = {"methods": rows, "model": args.model, "card": None, "changes": ""}
    if engine is not None:
        card, text = engine.card, f"{text}\n\n{_layers(engine)}"
        told |= {"changes": engine.changes, "card": {"origin": card.origin or None, "borrowed": card.borrowed,
                                                     "bears": card.bears, "empty": card.empty}}
        if engine.changes:
            text += f"\nIt was made of another model ({engine.changes}): exact means equal to this one, not to that."
    return common.show(args, told, text)


def _layers(engine: Engine) -> str:
    """What is known about the model's layers, in words."""
    card = engine.card
    if card.empty:
        return ("Nothing is known about this model's layers: depth methods drop them by position. The first use of one "
                "with `shoal generate` measures them.")
    bears = "" if card.bears is None else f" It bears {card.bears:g} of {engine.runner.num_layers} layers on average."
    return f"What its layers are worth is known: {card.origin}.{bears}"


def table(info: ModelInfo | None) -> list[dict[str, Any]]:
    """Every method, from `describe`, with the names of the methods that it combines with; None if that is open."""
    rows = [describe(name, info) for name in methods.names()]
    recipes = {row["name"]: None if row["parts"] is None else _default(methods.get(row["name"])) for row in rows}
    for row in rows:
        own = recipes[row["name"]]
        fitting = [other["name"] for other in rows if _combine(row, other) and _fit(own, recipes[other["name"]])]
        row["combines_with"] = None if row["parts"] is None else fitting
    return rows


def _combine(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    known = None not in (row["parts"], other["parts"])
    return known and other is not row and set(row["parts"]).isdisjoint([*other["parts"], *other["excludes"]]) and (
        set(row["excludes"]).isdisjoint(other["parts"]))


def _fit(one: Recipe | None, other: Recipe | None) -> bool:
    """Whether the different components of two methods work together; True if a recipe is missing."""
    if one is None or other is None:
        return True
    try:
        dataclasses.replace(one, **{part: getattr(other, part) for part in other.components})
    except Unsupported:
        return False
    return True


def partners(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What a method combines with, in words: whole families by name; baselines add nothing and are left out."""
    found: list[str] = []
    for family in list(FAMILIES)[1:]:
        members = [other["name"] for other in rows if other["family"] == family]
        fitting = [name for name in members if name in (row["combines_with"] or ())]
        whole = len(fitting) == len(members) or (row["family"] == family and len(fitting) == len(members) - 1)
        found += [family] if whole and fitting else fitting
    return ", ".join(found)


def describe(name: str, info: ModelInfo | None) -> dict[str, Any]:
    """One method as a JSON object; `runs` and `why_not` are about the model of `info`, if there is one."""
    try:
        cls = methods.get(name)
        recipe = _default(cls)
        parts = cls.fills or None if recipe is None else recipe.components
        row = {
            "name": name,
            "family": cls.family or None if parts is None else family_of(cls, parts),
            "parts": None if parts is None else list(parts),
            "excludes": [] if recipe is None else list(recipe.excludes),
            "summary": (cls.__doc__ or "").strip().split("\n")[0],
            "paper": cls.paper, "needs": list(cls.needs),
            "exact": None if recipe is None else recipe.exact_to == "full",
            "exact_to": None if recipe is None else recipe.exact_to, "options": _options(cls),
        }
    except Exception as error:  # a broken method of another package must not break the list
        return {"name": name, "family": None, "parts": None, "excludes": [], "summary": "", "paper": "", "needs": [],
                "exact": None, "exact_to": None, "options": {}, "runs": False,
                "why_not": f"cannot be imported: {error}"}
    why_not = _refusal(cls, info)
    return {**row, "runs": None if info is None else why_not is None, "why_not": why_not}


def _default(cls: type[Method]) -> Recipe | None:
    try:
        return cls().recipe(NOMINAL)
    except (ValueError, TypeError):  # some options have no default, so the recipe depends on them
        return None


def _options(cls: type[Method]) -> dict[str, Any]:
    defaults = {field.name: None if field.default is dataclasses.MISSING else field.default
                for field in dataclasses.fields(cls) if field.init}
    return {name: value.to_dict() if isinstance(value, Method) else value for name, value in defaults.items()}


def _refusal(cls: type[Method], info: ModelInfo | None) -> str | None:
    if info is None:
        return None
    absent = [field.name for field in dataclasses.fields(cls)
              if field.init and field.default is field.default_factory is dataclasses.MISSING]
    if absent:
        return f"there is no default for {' and '.join(absent)}; give a card that has them: --method CARD.json"
    try:
        check_order(cls.name, cls().recipe(info), info)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def filled(row: Mapping[str, Any]) -> str:
    """The components that a method fills, in words."""
    if row["parts"] is None:
        return "what its options say"
    return ", ".join(f"{part} ({QUESTIONS.get(part, part)})" for part in row["parts"]) or "nothing"


def _text(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    promise = {"full": "exact", "plan": "lossy, exact to its plan", "none": "lossy", None: "depends on its options"}
    head = f"{row['name']:<24} {promise[row['exact_to']]}{'; ' + row['paper'] if row['paper'] else ''}"
    notes = [row["summary"], f"Family: {row['family'] or 'open'}. Fills {filled(row)}."]
    if others := partners(row, rows):
        notes[-1] += f" Combines with: {others}."
    if row["needs"]:
        notes.append(f"Needs {', '.join(row['needs'])}.")
    if row["runs"] is not None:
        notes.append("Runs on this model." if row["runs"] else f"Does not run on this model: {row['why_not']}")
    return "\n".join([head, *(textwrap.fill(note, 110, initial_indent="  ", subsequent_indent="  ") for note in notes)])
