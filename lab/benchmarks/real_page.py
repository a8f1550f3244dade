"""Tables of real model files: speed, prompts, loading, memory and fidelity of Shoal, llama.cpp and transformers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pages import current, markdown
from shoal_lab.bench import table
from shoal_lab.bench.model import FILE
from shoal_lab.bench.speed import startup_table
from shoal_lab.bench.speed.cells import OURS
from shoal_lab.bench.speed.startup import AGAINST
from shoal_lab.bench.speed.startup_table import NAMES, megabytes

Report = Mapping[str, Any]
Row = table.Row

BASELINES = {name: shown for name, shown in NAMES.items() if name != OURS}
"""A system's name in reports -> its name in tables, column by column."""

HEADER = ["model", "what", "Shoal", *BASELINES.values(), *(f"times better than {name}" for name in BASELINES.values())]


def overview(reports: Sequence[Report]) -> str:
    """All files in a Markdown table: a line per file and measurement. Empty without reports of files."""
    rows = [row for name in _names(reports) for row in _rows(name, [r for r in reports if _name(r) == name])]
    if not rows:
        return ""
    used = [report for report in reports if report.get("kind") == "startup" or _speed(report)]
    lines = [*_machines(used), "", markdown(HEADER, rows), ""]
    return "\n" + "\n".join([*lines, *(f"Warning: {warning}.\n" for warning in _warnings(used))])


GLANCE = {("generate", 1, 64): "decode, tokens/s", ("generate", 8, 64): "8 rows together",
          ("prefill", 1, 64): "prompt of 64", ("prefill", 1, 512): "prompt of 512",
          ("prefill", 1, 2048): "prompt of 2,048"}
"""Columns of a model's line, where some model has one: kind, rows, context, and the heading."""


def glance(reports: Sequence[Report]) -> str:
    """A Markdown line per file: tokens per second, and the ratio to each baseline. Empty without reports."""
    if not reports:
        return ""
    rows = {key: row for report in reports for key, row in _measured(report).items()}
    keys = [key for key in GLANCE if key in rows]
    header = ["file", *(GLANCE[key] for key in keys), "8 positions over one; 16"]
    lines = [*_machines(reports, spread=False), "", markdown(header, [_glance(report, keys) for report in reports]), ""]
    return "\n" + "\n".join(lines) + "\n"


def _ours(report: Report) -> list[Mapping[str, Any]]:
    return [row for row in _speed(report) if row["system"] == OURS and row["label"] == "full"]


def _measured(report: Report) -> dict[tuple[str, int, int], Mapping[str, Any]]:
    return {(row["kind"], row["rows"], row["context"]): row for row in _ours(report) if row["kind"] != "forward"}


def _glance(report: Report, keys: Sequence[tuple[str, int, int]]) -> Row:
    costs = {row["positions"]: row["ratios"]["cost_of_one_position"]["median"]
             for row in _ours(report) if "cost_of_one_position" in row["ratios"]}
    found = _measured(report)
    cells = [_glance_cell(found[key]) if key in found else "" for key in keys]
    return [_name(report), *cells, "; ".join(f"{costs[number]:.2f}x" for number in (8, 16) if number in costs)]


def _glance_cell(row: Mapping[str, Any]) -> str:
    key = "tokens_per_second" if row["kind"] == "generate" else "prompt_tokens_per_second"
    times = [f"{row['ratios'][baseline]['median']:.2f}x" for baseline in BASELINES if baseline in row["ratios"]]
    return f"{_number(row[key]['median'])} ({', '.join(times)})"


def page(stem: str, report: Report) -> str:
    """One whole report of loading or fidelity, as Markdown."""
    header, *rows = startup_table.rows(report) if report["kind"] == "startup" else fidelity_rows(report)
    when = f"{report['date'][:10]}, {_commit(report)}"
    lines = [f"\n### {stem}\n", f"**{_name(report)}**, {_machine(report)}, {when}.", ""]
    lines += ["```sh", current(report["command"]), "```", "", markdown(header, rows), ""]
    lines += [f"- Not measured: {one['system']}: {one['reason']}." for one in report["not_measured"]]
    lines += [f"\nWarning: {warning}." for warning in report.get("warnings", ())]
    return "\n".join(lines) + "\n"


def fidelity_rows(report: Report) -> list[Row]:
    """Header and a row per system."""
    header = ["system", "bits per weight", "perplexity", "over the reference's", "tokens read",
              "largest logit difference", "greedy texts equal, ties, wrong"]
    return [header, *map(_fidelity_row, report["results"])]


def _fidelity_row(row: Mapping[str, Any]) -> Row:
    greedy, ratio = row["greedy"], row.get("ratio")
    interval = f" ({row['ratio_low']:.4f}-{row['ratio_high']:.4f})" if "ratio_low" in row else ""
    return [
        row["system"], f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.3f}" if ratio is not None else "",
        f"{ratio:.4f}{interval}" if ratio is not None else "", str(row["tokens"]),
        f"{100 * row['logits']['relative']:.2g} %", f"{greedy['equal']}, {greedy['ties']}, {greedy['wrong']}",
    ]


def _names(reports: Iterable[Report]) -> list[str]:
    return list(dict.fromkeys(map(_name, reports)))


def _name(report: Report) -> str:
    return str(report["subject"]["name"]).removesuffix(".gguf")


def _speed(report: Report) -> list[Mapping[str, Any]]:
    """Results on the file's own weights."""
    return [] if "kind" in report else [result for result in report["results"] if result["quant"] == FILE]


def _rows(name: str, reports: Sequence[Report]) -> Iterator[Row]:
    """A model's lines; its name stands in the first."""
    shown = name
    for report in reports:
        made = _startup_lines(report) if report.get("kind") == "startup" else _speed_lines(_speed(report))
        for what, *cells in made:
            yield [shown, what, *cells]
            shown = ""


def _speed_lines(results: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for ours in results:
        if ours["system"] != OURS or ours["kind"] == "forward" or ours["rows"] != 1:
            continue
        key = "tokens_per_second" if ours["kind"] == "generate" else "prompt_tokens_per_second"
        same = {other["system"]: other for other in results
                if all(other[part] == ours[part] for part in ("kind", "context", "rows", "new_tokens"))}
        method = "" if ours["label"] == "full" else f" by {ours['label']}"
        what = f"decode{method}, tokens/s" if ours["kind"] == "generate" else f"prompt of {ours['context']}, tokens/s"
        cells = [_number(same[baseline][key]["median"]) if baseline in same else "" for baseline in BASELINES]
        ratios = [_ratio(ours["ratios"].get(baseline)) for baseline in BASELINES]
        yield [what, _number(ours[key]["median"]), *cells, *ratios]


def _startup_lines(report: Report) -> Iterator[Row]:
    found = {(row["system"], row["condition"]): row for row in report["results"]}
    wanted = [
        ("first", "first load, s", "load_seconds"), ("cached", "load, s", "load_seconds"),
        ("cold", "load from a cold disk, s", "load_seconds"), ("cached", "memory at most, MB", "peak_bytes"),
    ]
    for condition, what, key in wanted:
        ours = found.get((OURS, condition))
        if ours is not None:
            rows = [ours, *(found.get((baseline, AGAINST[condition])) for baseline in BASELINES)]
            ratios = [_ratio(ours["ratios"].get(f"{baseline} {key}")) for baseline in BASELINES]
            yield [what, *("" if row is None else _measure(row[key]["median"], key) for row in rows), *ratios]


def _measure(value: float, key: str) -> str:
    return megabytes(value) if key.endswith("bytes") else f"{value:.2f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return ""
    return table.spread(figure, "{:.2f}") if figure.get("low") is None else table.paired(figure)


def _machines(reports: Sequence[Report], spread: bool = True) -> list[str]:
    """A line per machine: on what the figures below were measured, and how their spread is shown, if it is."""
    lines = []
    for machine in dict.fromkeys(map(_machine, reports)):
        own = [report for report in reports if _machine(report) == machine]
        bandwidths = [report["roof"] for report in own if "median" in report["roof"]]
        bandwidth = {"median": statistics.median(one["median"] / 1e9 for one in bandwidths),
                "min": min(one["min"] / 1e9 for one in bandwidths), "max": max(one["max"] / 1e9 for one in bandwidths)}
        rounds = sorted({report["rounds"]["done"] for report in own})
        dates, commits = ({made(report): None for report in own} for made in (lambda r: r["date"][:10], _commit))
        number = "-".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
        shown = f" (smallest-largest){''.join(dict.fromkeys(map(table.intervals, own)))}" if spread else ""
        lines.append(
            f"{machine}, roof {table.spread(bandwidth, '{:.1f}')} GB/s, medians of {number} interleaved rounds{shown}, "
            f"{', '.join(dates)}, {', '.join(commits)}."
        )
    return lines


def _machine(report: Report) -> str:
    threads = report.get("setting", report["machine"]).get("threads", report["machine"].get("torch_threads"))
    return f"{table.processor(report['machine'])}, {threads} threads"


def _commit(report: Report) -> str:
    return f"commit {(report['commit'] or 'unknown')[:7]}"


def _warnings(reports: Sequence[Report]) -> list[str]:
    return list(dict.fromkeys(f"{_name(report)}: {one}" for report in reports for one in report.get("warnings", ())))
