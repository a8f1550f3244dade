"""Whether a member that a model writes after a dot exists, with a monitor and without.

    python benchmarks/members.py --model FILE [--draws 2] [--json OUT]

Each case is a short file that makes an object of a standard class (`constraints/values.json`), says in a comment what
is wanted and ends with the object and a dot. The first answer is greedy, the others are drawn at temperature 0.8.
Another process makes the object and looks whether it has what stands behind the dot; jedi is not asked. The last line
on stdout is the report as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shoal
from shoal.bench import report
from shoal.cli import env

VALUES: dict[str, list[str]] = json.loads((Path(__file__).parent / "constraints" / "values.json").read_text("utf-8"))
WISHES = ("its size", "a copy of it", "its name as text")
ENDS = ["\n", "(", ")", " ", ".", ",", "[", ":", "#", "="]
JUDGE = """
import importlib, json, sys
for line in sys.stdin:
    module, made, member = json.loads(line)
    print(hasattr(eval(made, vars(importlib.import_module(module))), member))
"""


def main(words: Sequence[str]) -> int:
    """Ask, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    engine = shoal.load(args.model)
    cases = [(module, made, wish) for module, several in VALUES.items() for made in several for wish in WISHES]
    found = [answered(engine, *case, draw, monitor)
             for case in cases for draw in range(1 + args.draws) for monitor in (False, True)]
    for one, exists in zip(found, judged(found), strict=True):
        one["exists"] = exists
    result = {
        **report.heading(env.collect(), ["python", "benchmarks/members.py", *words]), "kind": "members",
        "model": Path(engine.model_name).name, "cases": len(cases), **summary(found),
        "missing": [one for one in found if not one["exists"]],
    }  # fmt: skip
    report.publish(result, args.json)
    return 0


def answered(engine: shoal.Engine, module: str, made: str, wish: str, draw: int, monitor: bool) -> dict[str, Any]:
    """What a model writes behind the dot, up to the member's end."""
    name = made.partition("(")[0].partition(".")[0]
    prompt = f"from {module} import {name}\n\nvalue = {made}\n# {wish}\nresult = value."
    drawn = {"temperature": 0.8, "seed": draw} if draw else {}
    bound = {"constraint": shoal.PythonMembers()} if monitor else {}
    text = engine.generate(prompt, max_new_tokens=12, stop=ENDS, **drawn, **bound).text
    return {"module": module, "made": made, "wish": wish, "draw": draw, "monitor": monitor, "member": text}


def judged(found: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether each object has its member, by making it; what is no name is none."""
    lines = [json.dumps([one["module"], one["made"], one["member"]]) for one in found]
    words = [sys.executable, "-c", JUDGE]
    ran = subprocess.run(words, input="\n".join(lines), text=True, capture_output=True, check=True)
    return [line == "True" and one["member"].isidentifier()
            for line, one in zip(ran.stdout.split(), found, strict=True)]


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many exist, greedy and drawn; and what became of the plain answers whose member exists."""
    def counted(greedy: bool, monitor: bool) -> dict[str, int]:
        some = [one["exists"] for one in found if (one["draw"] == 0, one["monitor"]) == (greedy, monitor)]
        return {"answers": len(some), "exist": sum(some)}

    pairs = [(one, two) for one, two in zip(found[::2], found[1::2], strict=True) if one["draw"] == 0 and one["exists"]]
    return {
        **{kind: {"plain": counted(greedy, False), "monitor": counted(greedy, True)}
           for kind, greedy in (("greedy", True), ("drawn", False))},
        "greedy_that_exist_plain": {"all": len(pairs), "same": sum(a["member"] == b["member"] for a, b in pairs)},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
