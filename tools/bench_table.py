"""Write the tables of benchmark results into README.md, benchmarks/README.md, docs/drafting.md and docs/serving.md.

    python tools/bench_table.py            writes them
    python tools/bench_table.py --check    says what is out of date, exit code 1 if anything is

The source are the reports in the order of their names: on real model files those that benchmarks/real.py wrote into
benchmarks/real, on random weights those that `shoal bench --json` wrote into benchmarks/results, with `--suite spec`
those in benchmarks/drafts, and what benchmarks/serving.py wrote into benchmarks/serving. The README shows real models
only. The tables go between the lines `<!-- benchmarks:begin -->` and `<!-- benchmarks:end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench import real, table
from shoal.bench.load import page as load

ROOT = Path(__file__).resolve().parents[1]
_FENCE = "<!-- not run: measures for minutes -->\n```sh\n"
_NOTHING = """
No real model has been measured for this table yet. Shapes with random weights have: [benchmarks](benchmarks/README.md).
"""
_MARKS = re.compile(r"(<!-- benchmarks:begin -->\n).*?(<!-- benchmarks:end -->)", re.DOTALL)


def main(words: list[str]) -> int:
    """Write the tables, or with `--check` compare them."""
    stale = {path: text for path, text in documents().items() if path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{'out of date' if '--check' in words else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in words:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and "--check" in words)


def documents(results: Path = ROOT / "benchmarks" / "results") -> dict[Path, str]:
    """Every document that is written here, with its text."""
    files, shapes = _reports(results.parent / "real"), _reports(results)
    overview = real.overview([report for _, report in files])
    found = {ROOT / "README.md": overview or _NOTHING}
    found[ROOT / "benchmarks" / "README.md"] = "\n".join([
        "\n## Results on real models", overview, *(long(*one) for one in files),
        "\n## Results on random weights in the shape of a model\n", *(long(*one) for one in shapes),
    ])
    suites = [json.loads(path.read_text("utf-8")) for path in sorted((results.parent / "drafts").glob("*.json"))]
    found[ROOT / "docs" / "drafting.md"] = "\n".join(map(drafts, suites))
    loads = {path.stem: json.loads(path.read_text("utf-8")) for path in (results.parent / "serving").glob("*.json")}
    found[ROOT / "docs" / "serving.md"] = load.section(loads, "pictures/serving-gain.png")
    return {page: filled(page.read_text("utf-8"), content) for page, content in found.items()}


def _reports(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem)
    return [(path, json.loads(path.read_text("utf-8"))) for path in paths]


def filled(text: str, content: str) -> str:
    """`text` with `content` between the marks."""
    if not _MARKS.search(text):
        raise ValueError("the marks <!-- benchmarks:begin --> and <!-- benchmarks:end --> are missing")
    return _MARKS.sub(lambda found: f"{found[1]}{content}{found[2]}", text)


def long(path: Path, report: dict[str, Any]) -> str:
    """All there is, with the command."""
    if "kind" in report:
        return real.page(path.stem, report)
    parts = [f"\n### {path.stem}\n", intro(report), ""]
    parts += [f"{system}: {what}. " for system, what in table.systems(report).items()]
    parts += ["", "```sh", report["command"], "```"]
    for title, header, rows in table.sections(report):
        parts += ["", f"{title}:", "", table.markdown(header, rows)]
    absent = [one for one in report["not_measured"] if one["what"] is None]
    parts += ["", *(f"- Not measured: {_who(one)}: {one['reason']}." for one in absent)]
    return "\n".join(parts) + "\n" + notes(report)


def drafts(report: dict[str, Any]) -> str:
    """A line per method, a column per kind of text: times faster than the plain loop, and tokens per forward."""
    rows = [row for row in report["results"] if row["system"] != "full"]
    systems, texts = list(dict.fromkeys(row["system"] for row in rows)), list(report["workloads"])
    cells = {(row["system"], row["workload"]): row for row in rows}
    best = {text: max(row["times_faster"]["median"] for row in rows if row["workload"] == text) for text in texts}
    lines = [[system, *(_draft(cells.get((system, text)), best[text]) for text in texts)] for system in systems]
    machine, setting = report["machine"], report["setting"]
    said = {"replay": "replay of recorded texts", "free": "the model's own answers"}[report["way"]]
    head = (f"**{report['subject']['name']}**, {said}, {setting['dtype']}, {table.processor(machine)}, "
            f"{setting['threads']} threads, {_rounds(report['rounds'])}, systems in turn token by token, "
            f"{report['date'][:10]}:")
    return f"\n{head}\n\n{table.markdown(['method', *texts], lines)}\n\n{_FENCE}{report['command']}\n```\n"


def _rounds(number: int, kind: str = "") -> str:
    return f"{number} {kind}round" + ("" if number == 1 else "s")


def _draft(row: dict[str, Any] | None, best: float) -> str:
    if row is None:
        return ""
    times, per, equal = row["times_faster"]["median"], row["tokens_per_forward"], row["equal_to_plain"]
    text = f"**{times:.2f}x**" if times == best and best > 1 else f"{times:.2f}x"
    return text + (f" ({per:.2f})" if per else "") + ("" if equal == 1 else f", {100 * equal:.0f} % same text")


def intro(report: dict[str, Any]) -> str:
    """What was measured on what."""
    machine, setting, roof = report["machine"], report["setting"], report["roof"]
    where = f"{table.processor(machine)}, {setting['threads']} threads" if setting["device"] == "cpu" else _gpu(machine)
    return (f"**{report['subject']['name']}** ({report['subject']['kind']}), {where}, "
            f"roof {roof['median'] / 1e9:.1f} GB/s ({roof['min'] / 1e9:.1f}-{roof['max'] / 1e9:.1f}), "
            f"median of {_rounds(report['rounds']['done'], 'interleaved ')} (smallest-largest), {report['date'][:10]}, "
            f"commit {(report['commit'] or 'unknown')[:7]}.")


def notes(report: dict[str, Any]) -> str:
    """What a reader has to know beside the figures."""
    lines = [f"Warning: {warning}." for warning in report["warnings"]]
    if any(r["label"] not in ("", "full") for r in report["results"]) and "random" in report["subject"]["kind"]:
        lines.append("Random weights say nothing about what a lossy method does to the text.")
    return "".join(f"\n{line}\n" for line in lines)


def _who(one: dict[str, Any]) -> str:
    return " ".join(filter(None, (one["system"], one["quant"])))


def _gpu(machine: dict[str, Any]) -> str:
    gpus: Sequence[str] = machine.get("gpus") or ["unknown device"]
    return gpus[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
