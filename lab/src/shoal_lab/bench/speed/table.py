"""A report of speeds as tables, and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import needs
from shoal_lab.bench.engines import ENGINES
from shoal_lab.bench.table import Row, aligned, intervals, paired, processor, spread

Result = Mapping[str, Any]


def text(report: Mapping[str, Any]) -> str:
    """The whole report for a terminal."""
    machine, model = report["machine"], report["subject"]
    setting = report["setting"]
    lines = [
        f"{model['name']} ({model['kind']}), {setting['dtype']}, {processor(machine)}, "
        f"{setting['threads']} threads, {report['rounds']['done']} rounds{intervals(report)}, "
        f"roof {_bandwidth(report)}"
    ]
    lines += [f"{system}: {what}" for system, what in systems(report).items()]
    for title, header, rows in sections(report):
        lines += ["", title, *aligned([header, *rows])]
    lines += _absent(report)
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)


def systems(report: Mapping[str, Any]) -> dict[str, str]:
    """Description of each system by name."""
    found: dict[str, str] = {}
    for result in report["results"]:
        found.setdefault(result["system"], f"{result['version'] or 'unknown version'}, {result['detail']}")
    return found


def sections(report: Mapping[str, Any]) -> list[tuple[str, Row, list[Row]]]:
    """Title, header and rows of every kind of measurement in the report."""
    found = []
    for kind, (title, header, make) in _SECTIONS.items():
        rows = [make(result, report) for result in report["results"] if result["kind"] == kind]
        if rows:
            found.append((title, header, rows))
    return found


def name(result: Result, dtype: str) -> str:
    """Name of the system with its weights, and Shoal's method."""
    label = f" {result['label']}" if result["label"] else ""
    return f"{result['system']}{label}, {weights(result, dtype)}"


def weights(result: Result, dtype: str) -> str:
    """Format of the weights, as the system itself calls it if it does."""
    first = str(result["detail"]).split(",")[0]
    if result["system"] in {"llama.cpp", *ENGINES}:
        return first
    return dtype if result["system"] != "shoal" and result["quant"] == "file" else result["quant"] or dtype


def _generation(result: Result, report: Mapping[str, Any]) -> Row:
    mbu, predicted = result.get("mbu"), (result.get("predicted") or {}).get("tpot_seconds")
    return [
        name(result, report["setting"]["dtype"]),
        str(result["rows"]),
        str(result["context"]),
        spread(result["tokens_per_second"], "{:.1f}"),
        _milliseconds(result["ttft_seconds"]["median"]),
        _milliseconds(result["tpot_seconds"]["median"]),
        "" if predicted is None else _milliseconds(predicted),
        "" if mbu is None else f"{100 * mbu['median']:.0f} %",
        f"{result['mean_layers']:.1f}",
        _speedups(result),
        _memory(result["peak_memory_bytes"]),
        ratios(result),
    ]


def _prefill(result: Result, report: Mapping[str, Any]) -> Row:
    speed = spread(result["prompt_tokens_per_second"], "{:.0f}")
    first = _milliseconds(result["ttft_seconds"]["median"])
    return [name(result, report["setting"]["dtype"]), str(result["context"]), speed, first, ratios(result)]


def _forward(result: Result, report: Mapping[str, Any]) -> Row:
    seconds = {key: 1000 * value for key, value in result["seconds"].items()}
    one = result["ratios"].get("cost_of_one_position")
    cost = "" if one is None else paired(one)
    return [name(result, report["setting"]["dtype"]), str(result["positions"]), spread(seconds, "{:.2f}"), cost,
            ratios(result)]


_SECTIONS: Mapping[str, tuple[str, Row, Callable[[Result, Mapping[str, Any]], Row]]] = {
    "generate": (
        "Generation",
        ["system", "rows", "context", "tokens/s", "TTFT ms", "TPOT ms", "card", "MBU", "layers",
         "ideal, card", "memory", "times faster than"],
        _generation,
    ),
    "prefill": ("Prompt alone", ["system", "tokens", "tokens/s", "ms", "times faster than"], _prefill),
    "forward": ("One forward", ["system", "positions", "ms", "of one", "times faster than"], _forward),
}


def _speedups(result: Result) -> str:
    """Speed-ups of a method over the plain loop by layers and by cost card; the measured one is among the ratios."""
    if "predicted_speedup" not in result:
        return ""
    return f"{result['ideal_speedup']:.2f}, {result['predicted_speedup']:.2f}"


def ratios(result: Result) -> str:
    """Every ratio except those within a system."""
    found = result["ratios"].items()
    return ", ".join(f"{other} {paired(value)}" for other, value in found if other != "cost_of_one_position")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def _memory(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def _bandwidth(report: Mapping[str, Any]) -> str:
    bandwidth = report["roof"]
    if "median" not in bandwidth:
        return "not read"
    return spread({key: bandwidth[key] / 1e9 for key in ("median", "min", "max")}, "{:.1f}") + " GB/s"


def _absent(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for one in report["not_measured"]:
        what = " ".join(word for word in (one["system"], one["quant"], one["what"]) if word)
        lines.append(f"  {what}: {one['reason']}")
    return ["", "Not measured", *lines] if lines else []


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot.

    Raises:
        ValueError: matplotlib is missing, or the report holds no generation.
    """
    with needs("plot", "--plot", "shoal-lab"):
        from matplotlib.figure import Figure
    results = [result for result in report["results"] if result["kind"] == "generate"]
    if not results:
        raise ValueError("there is no generation to draw")
    labels = [f"{name(r, report['setting']['dtype'])}\n{r['rows']} x {r['context']}" for r in results]
    speeds = [result["tokens_per_second"] for result in results]
    middle = [speed["median"] for speed in speeds]
    below = [speed["median"] - speed["min"] for speed in speeds]
    above = [speed["max"] - speed["median"] for speed in speeds]
    figure = Figure(figsize=(8, 1 + 0.45 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    colors = ["tab:blue" if result["system"] == "shoal" else "tab:gray" for result in results]
    axes.barh(labels, middle, xerr=[below, above], color=colors, capsize=3)
    limits = [r["rows"] * report["roof"]["median"] / r["step_bytes"] for r in results if "step_bytes" in r]
    if len(limits) == len(results):
        axes.scatter(limits, labels, marker="|", s=200, color="black", label="all bytes at the roof")
        axes.legend()
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second, median and spread", title=f"{report['subject']['name']}")
    figure.savefig(path, dpi=150)
