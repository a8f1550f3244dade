"""Tables and plots of lab/reports/evidence, and the evidence in the cards that ship.

    python lab/benchmarks/evidence.py            writes them
    python lab/benchmarks/evidence.py --check    prints what is out of date, with exit code 1

In lab/reports/evidence, MODEL-distance.json is the results.json of `shoal eval --measure distance`, MODEL-controls.json
the same with fewer answers under all controls, MODEL-times.json the same with `--timed`, MODEL-SUITE.json that of
checked answers (MODEL-SUITE-N.json of fewer), and MODEL-why.json the result of lab/benchmarks/why.py;
lab/reports/auto/MODEL.json holds the speed-ups of drafts. Tables go between lines such as `<!-- distance:begin -->` and
`<!-- distance:end -->`, short ones in README.md, long ones in tables.md; `shoal recommend` reads the cards.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import checked
import equal_time
import why_page
from pages import markdown
from quality_tables import between

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "lab" / "reports" / "evidence"
PAGES = (REPORTS / "README.md", REPORTS / "tables.md")
CARDS = {"smollm2-135m": "smollm2-135m-instruct", "gemma3-270m": "gemma-3-270m",
         "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct"}
"""Model -> its card in src/shoal/cards."""
SHOWN = ("d3", "constant", "linear", "d3, start 0.2", "reversed d3", "unified layer skipping", "early exit",
         "skipdecode")
"""Schedules in the tables, in this order; the reports hold all."""
_PAIRED = "draft_model:"
_EVERY, _LEAST = 32, 400
"""Positions of a column, and least number of its tokens."""

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    """Write the page's tables and the cards, or compare them; plots are only written."""
    reports = load()
    found = tables(reports, answered())
    new = {**{page: between(page.read_text("utf-8"), found) for page in PAGES}, **cards()}
    stale = [path for path, text in new.items() if path.read_text("utf-8") != text]
    for path in stale:
        print(f"{'out of date' if '--check' in argv else 'written'}: {path.relative_to(ROOT)}")
    if "--check" in argv:
        return int(bool(stale))
    for path in stale:
        path.write_text(new[path], encoding="utf-8")
    draw(reports, answered(), ROOT / "lab" / "reports" / "pictures")
    return 0


def cards() -> dict[Path, str]:
    """The cards of the measured models, with the evidence on methods."""
    found, answers = {}, answered()
    for name, card in CARDS.items():
        path = ROOT / "src" / "shoal" / "cards" / f"{card}.json"
        rows, machine = lossless(name)
        known = {"lossless": rows,
                 "lossy": [row for (model, _), one in answers.items() if model == name for row in checked.lossy(one)],
                 "machine": f"{machine['cpu']} with {machine['cpu_capability']}"}
        found[path] = json.dumps({**json.loads(path.read_text("utf-8")), "evidence": known}) + "\n"
    return found


def lossless(name: str) -> tuple[list[dict[str, Any]], Report]:
    """Speed-ups of `auto` on each kind of text as a card holds them, and the report with the machine.

    If a smaller model drafts, both are in one report, in which they took turns.
    """
    alone, path = auto(name), ROOT / "lab" / "reports" / "drafts" / f"{name}.json"
    beside = json.loads(path.read_text("utf-8")) if path.is_file() else {"results": []}
    if not any(row["system"].startswith(_PAIRED) for row in beside["results"]):
        rows = alone["kinds"].items()
        return [_lossless(kind, "auto", row["ratio"], row["low"], row["texts"]) for kind, row in rows], alone["machine"]
    rows = [row for row in beside["results"] if row["system"] == "auto" or row["system"].startswith(_PAIRED)]
    return [_lossless(row["kind"], row["system"], row["times_faster"]["mean"], row["times_faster"]["low"], row["texts"])
            for row in rows], beside["machine"]


def _lossless(task: str, label: str, speedup: float, low: float, texts: int) -> dict[str, Any]:
    return {"task": task, "label": label, "speedup": round(speedup, 3), "low": round(low, 3), "texts": texts}


def load(kind: str = "distance") -> dict[str, Report]:
    """Reports of a kind by model."""
    return {path.stem.removesuffix(f"-{kind}"): json.loads(path.read_text("utf-8"))
            for path in sorted(REPORTS.glob(f"*-{kind}.json"))}


def answered(folder: Path = REPORTS) -> dict[tuple[str, str], Report]:
    """Reports of checked answers by model and suite: the one with most items first; others add what it lacks."""
    found: dict[tuple[str, str], list[Report]] = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        if "suites" in report:
            suite = report["suites"][0]["suite"]
            model, _, _ = path.stem.rpartition(f"-{suite}")
            found.setdefault((model, suite), []).append(report)
    return {key: checked.merged(reports) for key, reports in found.items()}


def auto(name: str) -> Report:
    """What `auto` brought on a model, by kind of text, and the machine."""
    report = json.loads((ROOT / "lab" / "reports" / "auto" / f"{name}.json").read_text("utf-8"))
    rows = [(row, row["times_faster"]) for row in report["results"] if row["system"] == "auto"]
    return {"machine": report["machine"], "kinds": {
        row["kind"]: {"ratio": ratio["mean"], "low": ratio["low"], "texts": row["texts"]} for row, ratio in rows}}


def tables(reports: Mapping[str, Report], answers: Mapping[tuple[str, str], Report]) -> dict[str, str]:
    """Markdown tables by the name of their mark."""
    some = {kind: load(kind) for kind in ("controls", "why", "times")}
    every = {**reports, **{f"{model}, {suite}{more}": report for (model, suite), one in answers.items()
                           for more, report in {"": one, **one.get("others", {})}.items()},
             **{f"{model}, {kind}": report for kind, one in some.items() for model, report in one.items()}}
    return {
        "answers": "\n\n".join(checked.table(model, report) for (model, _), report in answers.items()),
        "answers-short": checked.short(answers),
        "bearable": checked.bearable(answers, {name: auto(name) for name in CARDS}),
        "distance": "\n\n".join(distance(name, report) for name, report in reports.items()),
        "distance-short": short(reports),
        "controls": "\n\n".join(distance(name, report) for name, report in some["controls"].items()),
        "orders": orders({**reports, **some["controls"]}),
        "positions": "\n\n".join(positions(name, report) for name, report in reports.items()),
        "why": "\n\n".join(why_page.long(name, report) for name, report in some["why"].items()),
        "why-short": why_page.short(some["why"]),
        "times": times(some["times"]),
        "equal-time": equal_time.distances(reports, some["times"]),
        "equal-time-answers": equal_time.answers(answers),
        "commands": "\n\n".join(command(name, report) for name, report in every.items()),
    }


def distance(name: str, report: Report) -> str:
    """D3 and its controls at each speed-up."""
    rows = report["distance"]["rows"]
    head = f"**{name}**, {rows[0]['n']} answers of the full model, {rows[0]['tokens']:,} tokens:"
    header = ["ideal", "schedule", "mean layers", "KL, nats [95 %]", "difference from D3 [95 %]", "p", "kept %",
              "tokens in common"]
    lines = [_distance_line(row) for speed in _speeds(rows) for label in SHOWN
             for row in rows if row.get("speedup") == speed and row["label"] == label]
    return f"{head}\n\n{markdown(header, lines)}"


def short(reports: Mapping[str, Report]) -> str:
    """D3, constant depth and the control nearest to the full model: a line per model and speed-up."""
    header = ["model", "ideal", "D3: KL, nats [95 %]", "constant minus D3", "nearest control, minus D3",
              "likeliest token kept by D3, %"]
    lines = []
    for name, report in reports.items():
        for speed in _speeds(report["distance"]["rows"]):
            at = {row["label"]: row for row in report["distance"]["rows"] if row.get("speedup") == speed}
            best = min((row for label, row in at.items() if label != "d3"), key=lambda row: row["kl"]["mean"])
            lines.append([name, f"{speed:g}x", _interval(at["d3"]["kl"], ".3f"), _gap(at["constant"]),
                          f"{best['label']}: {_gap(best)}", f"{100 * at['d3']['kept']['mean']:.0f}"])
    return markdown(header, lines)


def _gap(row: Row) -> str:
    """How much farther from the full model than D3, bold if significant."""
    found = row["versus_d3"]["kl"]
    text = f"{found['mean']:+.3f} [{found['low']:+.3f} to {found['high']:+.3f}]"
    return f"**{text}**" if found.get("p_holm", found["p"]) < 0.05 else text


def _distance_line(row: Row) -> list[str]:
    versus, gap = row["versus_d3"], ["", ""]
    if row["label"] != "d3":
        p = versus["kl"].get("p_holm", versus["kl"]["p"])
        gap = [_interval(versus["kl"], "+.3f"), "<0.001" if p < 0.001 else f"{p:.3f}"]
    return [f"{row['speedup']:.2f}x", row["label"], f"{row['mean_layers']:.2f}", _interval(row["kl"], ".3f"), *gap,
            f"{100 * row['kept']['mean']:.1f}", f"{row['prefix']['mean']:.0f}" if "prefix" in row else ""]


def orders(reports: Mapping[str, Report]) -> str:
    """KL of D3 by removal order: a line per order, a column per model and speed-up."""
    columns = [(name, speed) for name, report in reports.items() for speed in _speeds(report["distance"]["rows"])]
    found = {(name, row["speedup"], row["label"]): row["kl"]["mean"] for name, report in reports.items()
             for row in report["distance"]["rows"] if "speedup" in row}
    others = {key for key in found if key[2].startswith("d3, ") and "start" not in key[2]}
    columns = [column for column in columns if any(key[:2] == column for key in others)]
    labels = dict.fromkeys(["d3", *(label for _, _, label in found if any(label == key[2] for key in others))])
    lines = [["calibrated, as in D3" if label == "d3" else label.removeprefix("d3, "),
              *(f"{found[name, speed, label]:.2f}" if (name, speed, label) in found else "" for name, speed in columns)]
             for label in labels]
    return markdown(["order", *(f"{name}, {speed:g}x" for name, speed in columns)], lines)


def times(reports: Mapping[str, Report]) -> str:
    """The time behind an ideal speed-up, for D3 and constant depth: measured, and predicted by the cost card."""
    lines = []
    for name, report in reports.items():
        rows = {(row["label"], row["speedup"]): row for row in report["distance"]["times"]}
        for speed in sorted({speed for label, speed in rows if label == "d3"}):
            cells = [f"{rows[label, speed]['realised_speedup']:.3f}x ({rows[label, speed]['predicted_speedup']:.3f}x)"
                     for label in ("d3", "constant")]
            lines.append([name, f"{speed:g}x", *cells, str(rows["d3", speed]["items"])])
    return markdown(["model", "ideal", "D3 (expected)", "constant (expected)", "answers"], lines)


def positions(name: str, report: Report) -> str:
    """The full model's loss, and the KL of D3 and similar schedules, by position."""
    rows, width = report["distance"]["rows"], report["distance"]["bin"]
    step = _EVERY // width
    bins = [index for index in range(0, len(rows[0]["by_position"]), step)
            if sum(one["tokens"] for one in rows[0]["by_position"][index : index + step]) >= _LEAST]
    lines = [["loss at full depth", *(_over(rows[0], "nll", index, step) for index in bins)]]
    speed = _speeds(rows)[min(1, len(_speeds(rows)) - 1)]
    for label in ("d3", "constant", "linear", "reversed d3"):
        row = next(row for row in rows if row.get("speedup") == speed and row["label"] == label)
        lines.append([f"KL of {label} at {speed:g}x", *(_over(row, "kl", index, step) for index in bins)])
    return markdown([f"{name}: tokens from", *(str(index * width) for index in bins)], lines)


def _over(row: Row, measure: str, index: int, step: int) -> str:
    bins = row["by_position"][index : index + step]
    return f"{sum(one[measure]['mean'] * one['tokens'] for one in bins) / sum(one['tokens'] for one in bins):.3f}"


def command(name: str, report: Report) -> str:
    """The command of a report, its machine and its duration."""
    machine, minutes = report["machine"], report.get("minutes")
    what = f"{machine['cpu']}, {machine['cpu_capability']}, {report['dtype']}, {report['date'][:10]}"
    cores = f"{machine['torch_threads']} of {machine['cpu_count']} cores"
    took = "" if minutes is None else f", {minutes:.0f} minutes on {cores}"
    return f"{name} ({what}{took}):\n\n<!-- not run: takes an hour -->\n```sh\n{report['command']}\n```"


def draw(reports: Mapping[str, Report], answers: Mapping[tuple[str, str], Report], folder: Path) -> None:
    """All models side by side; for each model KL over mean depth, and by position."""
    import evidence_plots
    from shoal_lab.eval import plots

    evidence_plots.draw_answers(answers, checked.TASKS, {name: auto(name) for name in CARDS}, folder / "lost.png")
    evidence_plots.draw_distances(reports, folder / "distances.png")
    for name, report in reports.items():
        rows = report["distance"]["rows"]
        shown = [row for row in rows if row["label"] in SHOWN[:5]]
        plots.draw_depth(shown, folder / f"{name}-depth.png")
        for speed in _speeds(rows)[1:2]:
            at = [row for row in rows if row.get("speedup") == speed]
            plots.draw_kl_positions(at, speed, folder / f"{name}-positions.png")


def _speeds(rows: Sequence[Row]) -> list[float]:
    return sorted({row["speedup"] for row in rows if "speedup" in row})


def _interval(found: Mapping[str, float], form: str) -> str:
    return f"{found['mean']:{form}} [{found['low']:{form}} to {found['high']:{form}}]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
