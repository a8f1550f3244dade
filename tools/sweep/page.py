"""The page about swept models, made of the reports."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .joined import SUPPORTED, file_text, joined
from .people import ASKED, COUNTED, DOWNLOADS, LISTS, THREADS

ROOT = Path(__file__).resolve().parents[2]
NEWEST = ROOT / "docs" / "supported_models.json"
OLDEST = ROOT / "docs" / "supported_models-oldest.json"
_HEAD = """## Every type

Every causal model type of transformers, as a tiny random model, is decoded by Shoal and by transformers' own
`generate`. Shoal has to give the same tokens or to refuse the model with a reason when it is loaded:

- by the model's own modules and, where the type fits it, by the packed executor, in float32: plainly and with
  `prompt_lookup`, `d3_spec`, `aded` and `layerskip`, prompts of three lengths in a batch and each alone;
- by its own modules in float64, plainly, and with D3 against uncached passes that leave out what the plan leaves out.

Weights are drawn until the texts are not one token over and over: of the 42 tokens of the three texts of a type that
is right, {least} or more are different, of most {usual} or more. A difference where the reference prefers its token by
less than {ties} of its largest logit is a tie, and is counted.

<!-- not run: it takes minutes -->
```sh
python tools/sweep_models.py --out {newest}
```

"""
_PEOPLE = """# Model types

<!-- Written by tools/make_docs.py from {newest}, {oldest} and {counted}; run the sweep and then it. -->

## What people run

The hundred types of text models most named, the most named first; `shoal models --supported` prints them. Counted are
the types of transformers' causal language models, a text part with the model that it is part of, and two that
transformers has no causal model of. Three countings give each type a place each, and the lowest sums of places are
taken: the Hub's downloads in 30 days by [{hub}]({hub_file}) (May 2026, 1,852 models), how many of {titles:,} titles of
pull requests of 2026 in {projects} projects name it, and how many of {lists} projects' lists do. {asked} types that
were asked for stand in it in any case. [{counted}](people_run.json) has the counts and the sources, [the
script](../tools/sweep/people.py) counts again. Not counted: models that are for pictures above all, and types that run
by code in their own folders (`trust_remote_code`), which nobody has tried here. Of these {own} are on three lists or
more.

**Kernels**: packed weights, and for CPUs Shoal's own kernels. **Modules**: transformers' modules, layer by layer, with
every method but without the kernels. Compared with: transformers and llama.cpp on random weights, formulas of papers
written out in float64, published weights. Of {many} types {kernels} run on kernels, {modules} on modules, {refused} are
refused.

| model type | runs on | compared with | but |
|---|---|---|---|
"""


def page() -> str:
    """docs/supported_models.md."""
    newest, oldest = (json.loads(path.read_text("utf-8")) for path in (NEWEST, OLDEST))
    names = {"newest": f"docs/{NEWEST.name}", "oldest": f"docs/{OLDEST.name}"}
    varied = sorted(row["varied"] for row in newest["rows"] if row["outcome"] == "right")
    usual = {"least": varied[0], "usual": varied[len(varied) // 10]}
    parts = [people(joined(newest), names), _HEAD.format(**names, **usual, ties="1e-4 (float64: 1e-5)")]
    parts += [_summary(newest), _summary(oldest), "\n"]
    parts += [_right(newest["rows"]), _reasons("Refused", "refused", newest["rows"])]
    parts.append(_reasons("What transformers itself does not run as configured here", "broken", newest["rows"]))
    if any(row["outcome"] == "wrong" for row in newest["rows"]):
        parts.append(_reasons("Wrong", "wrong", newest["rows"]))
    parts.append(_changes(newest, oldest))
    return "".join(parts).rstrip() + "\n"


def documents() -> dict[Path, str]:
    """What is made of the reports: the page, and the package's own table."""
    rows = joined(json.loads(NEWEST.read_text("utf-8")))
    return {ROOT / "docs" / "supported_models.md": page(), SUPPORTED: file_text(rows)}


def people(rows: list[dict[str, Any]], names: dict[str, str]) -> str:
    """The table of what people run, and how it was counted."""
    counted, (hub, at, path) = json.loads(COUNTED.read_text("utf-8")), DOWNLOADS
    counts = Counter(row["runs"] for row in rows)
    head = _PEOPLE.format(
        **names, **counts, counted=f"docs/{COUNTED.name}", many=len(rows), hub=hub, projects=len(THREADS),
        hub_file=f"https://github.com/{hub}/blob/{at}/{path}", titles=counted["sources"]["threads"][0],
        lists=len(LISTS), asked=len(ASKED), own=", ".join(f"`{kind}`" for kind in counted["own_code"]))
    lines = [f"| `{row['model_type']}` | {row['runs']} | {', '.join(row['oracles'])} | {_cell(row['why'])} |\n"
             for row in rows]
    return head + "".join(lines) + "\n"


def _summary(report: dict[str, Any]) -> str:
    rows = report["rows"]
    counts = Counter(row["outcome"] for row in rows)
    packed, ties = sum(row["packed"] == "right" for row in rows), sum(row["ties"] for row in rows)
    return (f"With transformers {report['transformers']}: {len(rows)} configurations of "
            f"{len({row['model_type'] for row in rows})} types; {counts['right']} right ({packed} packed too, {ties} "
            f"ties), {counts['refused']} refused, {counts['broken']} that transformers itself does not run, "
            f"{counts['wrong']} wrong.\n")


def _right(rows: list[dict[str, Any]]) -> str:
    lines = ["## Right\n", "| model type | configuration | packed too | ties | without |",
             "|---|---|---|---|---|"]
    for row in rows:
        if row["outcome"] == "right":
            cells = ["yes" if row["packed"] == "right" else "", str(row["ties"] or ""), ", ".join(row["left_out"])]
            lines.append(f"| `{row['model_type']}` | {row['configuration']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def _reasons(title: str, outcome: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"## {title}\n", "| model type | configuration | why |", "|---|---|---|"]
    lines += [f"| `{row['model_type']}` | {row['configuration']} | {_cell(row['reason'])} |" for row in rows
              if row["outcome"] == outcome]
    return "\n".join(lines) + "\n\n"


def _changes(newest: dict[str, Any], oldest: dict[str, Any]) -> str:
    """What the older transformers runs to another outcome."""
    known = {(row["model_type"], row["configuration"]): row for row in newest["rows"]}
    lines = [f"## Otherwise with transformers {oldest['transformers']}\n",
             "| model type | configuration | outcome | why |", "|---|---|---|---|"]
    for row in oldest["rows"]:
        other = known.get((row["model_type"], row["configuration"]))
        if other is not None and other["outcome"] != row["outcome"]:
            what = f"| `{row['model_type']}` | {row['configuration']} | {row['outcome']} |"
            lines.append(f"{what} {_cell(row['reason'])} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text that a table, and a reader, can take."""
    text = " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
    return text if len(text) < 300 else text[:297] + "..."
