"""Whether a member that a model writes after a dot exists, with a monitor and without.

    python lab/benchmarks/members.py --model FILE [--draws 0] [--json OUT]

Each case is a short file that makes an object of a standard class (`constraints/values.json`), says in a comment what
is wanted and ends with the object: once with a dot, which splits the tokens of `.member`, once without, where only
answers that begin with a dot count. The first answer is greedy, others are sampled at temperature 0.8. Another process
makes the object and checks that it has the member; jedi is not used for that. Shares of answers with an existing member
have Wilson's 95 % intervals, the gain of the monitor a paired one; an answer without a member counts as wrong. With
`--draws 2` there are 351 answers of each kind, three per case, which the intervals treat as independent. The last line
on stdout is the report as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import script
import shoal
from shoal_lab.eval.paired import accuracy_difference, wilson

CONSTRAINTS = Path(__file__).parents[1] / "reports" / "constraints"
VALUES: dict[str, list[str]] = json.loads((CONSTRAINTS / "values.json").read_text("utf-8"))
WISHES = ("its size", "a copy of it", "its name as text")
ENDS = ["\n", "(", ")", " ", ",", "[", ":", "#", "="]
JUDGE = """
import importlib, json, sys
for line in sys.stdin:
    module, made, member = json.loads(line)
    print(hasattr(eval(made, vars(importlib.import_module(module))), member))
"""


def main(argv: Sequence[str]) -> int:
    """Ask, judge and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draws", type=int, default=0)
    args = parser.parse_args(argv)
    engine = shoal.load(args.model)
    cases = [(module, made, wish) for module, several in VALUES.items() for made in several for wish in WISHES]
    found = [answered(engine, *case, dot, draw, monitor) for case in cases for dot in (True, False)
             for draw in range(1 + args.draws) for monitor in (False, True)]
    asked = [one for one in found if one["member"] is not None]
    for one, exists in zip(asked, judged(asked), strict=True):
        one["exists"] = exists
    result = {
        "kind": "members",
        "model": Path(engine.model_name).name, "cases": len(cases), **summary(found),
        "missing": [one for one in asked if not one["exists"]],
    }  # fmt: skip
    script.publish(__file__, argv, result, args.json)
    return 0


def answered(
    engine: shoal.Engine, module: str, made: str, wish: str, dot: bool, draw: int, monitor: bool
) -> dict[str, Any]:
    """The model's continuation of the object; its member is None if that is not a dot."""
    name = made.partition("(")[0].partition(".")[0]
    prompt = f"from {module} import {name}\n\nvalue = {made}\nprint(value.__doc__)\n\n# {wish}\nresult = value"
    drawn = {"temperature": 0.8, "seed": draw} if draw else {}
    bound = {"constraint": shoal.PythonMembers()} if monitor else {}
    text = engine.generate(prompt + "." * dot, max_new_tokens=12, stop=ENDS, **drawn, **bound).text
    member = re.match(r"\w*" if dot else r"\.\w*", text)
    return {"module": module, "made": made, "wish": wish, "dot": dot, "draw": draw, "monitor": monitor,
            "member": member and member[0].lstrip("."), "exists": None}  # fmt: skip


def judged(found: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether each object has its member, by making it; what is not a name counts as missing."""
    lines = "\n".join(json.dumps([one["module"], one["made"], one["member"]]) for one in found)
    ran = subprocess.run([sys.executable, "-c", JUDGE], input=lines, text=True, capture_output=True, check=True)
    return [line == "True" and one["member"].isidentifier()
            for line, one in zip(ran.stdout.split(), found, strict=True)]


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many members exist, and how many of those that exist without the monitor it leaves unchanged."""

    def counted(ones: Sequence[dict[str, Any]]) -> dict[str, Any]:
        exist = sum(bool(one["exists"]) for one in ones)
        return {"answers": len(ones), "members": sum(one["member"] is not None for one in ones), "exist": exist,
                "interval": list(wilson(exist, len(ones))) if ones else None}

    result: dict[str, Any] = {}
    for name, dot, drawn in (("dot_given", True, False), ("dot_not_given", False, False),
                             ("dot_given_drawn", True, True), ("dot_not_given_drawn", False, True),
                             ("dot_given_all", True, None), ("dot_not_given_all", False, None)):
        some = [one for one in found if one["dot"] == dot and drawn in (None, one["draw"] > 0)]
        plain, bound = ([bool(one["exists"]) for one in some[first::2]] for first in (0, 1))
        added = accuracy_difference(plain, bound) if some else None
        good = [(one, two) for one, two in zip(some[::2], some[1::2], strict=True) if one["exists"]]
        result[name] = {"plain": counted(some[::2]), "monitor": counted(some[1::2]),
                        "added": added and [added.mean, added.low, added.high],
                        "left_as_they_are": sum(one["member"] == two["member"] for one, two in good)}
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
