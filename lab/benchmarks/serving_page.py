"""Load reports as a section of a page: the aims, D3's gains, and every table with its command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pages import current, markdown
from shoal_lab.bench.table import processor, spread

_STAGES = {
    "streams": "Full depth, clients that ask again once answered",
    "depth": "D3 beside full depth, in waves, answers of one length",
    "peers": "Beside other software on the same weights",
    "mixed": "Answers of random lengths",
    "arrivals": "Requests at random moments",
}
_HEADER = ["system", "load", "tokens/s", "TTFT p50, p90 ms", "TPOT p50, p90 ms", "failed", "cores"]
_LOAD = "load-"
"""Prefix of reports with other servers on the same GGUF file."""
_FENCE = "<!-- not run: measures for minutes -->\n```sh\n"


def section(reports: Mapping[str, Mapping[str, Any]], picture: str) -> str:
    """Markdown for the reports of `lab/benchmarks/serving.py`; empty if there are none.

    Args:
        reports: reports by the name of their stage; `gain` is the summary.
        picture: path of the plot, relative to the page.
    """
    parts = [_summary(reports["gain"], picture)] if "gain" in reports else []
    parts += [_stage(title, reports[name]) for name, title in _STAGES.items() if name in reports]
    parts += _files([report for name, report in reports.items() if name.startswith(_LOAD)])
    return "\n" + "\n\n".join(parts) + "\n" if parts else ""


def _summary(report: Mapping[str, Any], picture: str) -> str:
    aims = [[aim["what"], f"{aim['measured']:.2f}", f"{aim['aim']:g}", "yes" if aim["reached"] else "no"]
            for aim in report["aims"]]
    gains = [[gain["load"], gain["policy"], gain["of"], *_gain(gain)] for gain in report["gains"]]
    parts = [markdown(["aim", "measured", "aimed at", "reached"], aims)]
    if gains:
        header = ["load", "admission", "D3 over full depth in", "measured", "predicted, turn by turn", "in phase"]
        parts += [markdown(header, gains), f"![D3's gain over full depth by load and policy]({picture})"]
    return "\n\n".join(parts)


def _gain(gain: Mapping[str, Any]) -> list[str]:
    measured, expected = gain["measured"], gain.get("predicted")
    return [
        spread(measured, "{:.2f}") if "min" in measured else f"{measured['median']:.2f}",
        "" if expected is None else f"{expected['median']:.2f}",
        f"{gain['in_phase']:.2f}" if "in_phase" in gain else "",
    ]


def _stage(title: str, report: Mapping[str, Any]) -> str:
    machine, rounds, setting = report["machine"], report["rounds"]["done"], report["setting"]
    head = (f"{title}: **{report['subject']['name']}**, {setting['dtype']}, {processor(machine)}, "
            f"{setting['threads']} threads, {rounds} round{'s' if rounds > 1 else ''}, {report['date'][:10]}, "
            f"commit {(report['commit'] or 'unknown')[:7]}:")
    table = markdown(_HEADER, [_row(one) for one in report["results"]])
    absent = "".join(f"\nNot measured: {one['system']}: {one['reason']}.\n" for one in report["not_measured"])
    return f"{head}\n\n{table}\n{absent}\n{_FENCE}{current(report['command'])}\n```"


def _files(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table of all loads on GGUF files, by file and number of clients."""
    if not reports:
        return []
    found = sorted(reports, key=lambda report: (report["subject"]["name"], report["results"][0]["concurrency"]))
    rows = [[report["subject"]["name"].removesuffix(".gguf"), *_row(one), _times(one)]
            for report in found for one in report["results"]]
    header = ["file", *_HEADER, "times the speed of"]
    commands = "\n".join(current(report["command"]) for report in found)
    head = (f"Beside other servers on the same GGUF file, {processor(found[0]['machine'])}, "
            f"{found[0]['setting']['threads']} threads, {found[0]['date'][:10]}; transformers has the weights in "
            f"{found[0]['setting']['dtype']}:")
    return [f"{head}\n\n{markdown(header, rows)}\n\n{_FENCE}{commands}\n```"]


def _times(one: Mapping[str, Any]) -> str:
    """Ratios of Shoal over the others."""
    others = one["times_the_speed_of"] if one["system"] == "shoal" else {}
    return ", ".join(f"{name.split()[0]} {spread(value, '{:.2f}')}" for name, value in others.items())


def _row(one: Mapping[str, Any]) -> list[str]:
    return [
        f"{one['system']} {one['label']}".strip(),
        one["load"],
        spread(one["tokens_per_second"], "{:.1f}"),
        _two(one["ttft_seconds"]),
        _two(one["tpot_seconds"]),
        f"{one['errors']} of {one['requests']}",
        "" if one["cores"] is None else f"{one['cores']['median']:.2f}",
    ]


def _two(found: Mapping[str, float] | None, shares: Sequence[str] = ("p50", "p90")) -> str:
    return "" if found is None else ", ".join(f"{1000 * found[share]:.0f}" for share in shares)
