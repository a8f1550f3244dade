"""Results of `shoal eval` as the Markdown tables of lab/reports/quality/README.md."""

from __future__ import annotations

import json
import math
from pathlib import Path


def merged(out: Path) -> list[dict]:
    """The reports, those of one suite at several speed-ups joined."""
    reports: dict[str, dict] = {}
    for path in sorted(path for path in out.glob("*.json") if path.name != "dial.json"):
        report = json.loads(path.read_text("utf-8"))
        for suite in report.get("suites", ()):
            name = suite["suite"]
            if name not in reports:
                reports[name] = {**report, "suites": [suite]}
                continue
            first = reports[name]["suites"][0]
            for key, value in suite.items():
                if key in ("answers", "loss") and key in first:
                    first[key] += [row for row in value if "speedup" in row]
                else:
                    first.setdefault(key, value)
    return list(reports.values())


def times_of(out: Path) -> dict[str, dict]:
    """Figures of quality_times.py by the key of the method; empty if it has not run."""
    path = out / "times.json"
    measured = json.loads(path.read_text("utf-8"))["times"] if path.is_file() else []
    return {key_of(time["method"]): time for time in measured}


def key_of(method: dict) -> str:
    """A method's description as one string."""
    return json.dumps(method, sort_keys=True)


def timing(row: dict, times: dict[str, dict]) -> list[str]:
    """Cells for the realised speed-up and the seconds per answer; blank if it was not timed."""
    time = times.get(key_of(row["method"]))
    return ["", ""] if time is None else [f"{time['realised_speedup']:.2f}x", f"{time['seconds_per_answer']:.3f}"]


def tables(out: Path) -> dict[str, str]:
    """Markdown tables of the page, by the name of their mark."""
    found, times = {}, times_of(out)
    for report in merged(out):
        suite = report["suites"][0]
        name = suite["suite"]
        if "answers" in suite:
            found[f"{name} answers"] = answers(suite["answers"], times)
        if any("speedup" in row for row in suite.get("loss", ())):
            found[f"{name} loss"] = losses(suite["loss"])
        if "full_by_group" in suite:
            found[f"{name} groups"] = groups(suite["full_by_group"])
        if "by_position" in suite:
            found[f"{name} positions"] = positions(suite)
    return found


def answers(rows: list[dict], times: dict[str, dict]) -> str:
    lines = ["| ideal | method | mean layers | right % | difference from full, points [95 %] | p | difference from D3, "
             "points [95 %] | p | same answer % | ROUGE-L | tokens | cut % | realised | s/answer |", "|---" * 14 + "|"]
    for row in rows:
        cells = [
            f"{row['ideal_speedup']:.2f}x", row["label"], f"{row['mean_layers']:.2f}", f"{100 * row['accuracy']:.1f}",
            *gap(row, "difference", 100, 1), *gap(row, "versus_d3", 100, 1), f"{100 * row['same']:.0f}",
            f"{row['rouge_l']:.3f}", f"{row['tokens_per_answer']:.0f}", f"{100 * row['share_cut']:.1f}",
            *timing(row, times),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def losses(rows: list[dict]) -> str:
    lines = ["| ideal | method | mean layers | perplexity | added loss, nats [95 %] | p | against D3 [95 %] | p |",
             "|---" * 8 + "|"]
    for row in rows:
        cells = [f"{row['ideal_speedup']:.2f}x", row["label"], f"{row['mean_layers']:.2f}", f"{row['perplexity']:.3f}",
                 *gap(row, "loss_difference", 1, 3), *gap(row, "versus_d3", 1, 3)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def groups(found: dict[str, dict]) -> str:
    lines = ["| problems | n | right % | 95 % interval |", "|---|---|---|---|"]
    for name, row in found.items():
        low, high = (100 * end for end in row["accuracy_interval"])
        lines.append(f"| {name} | {row['n']} | {100 * row['accuracy']:.1f} | {low:.1f} to {high:.1f} |")
    return "\n".join(lines)


def positions(suite: dict) -> str:
    kinds = [("reference text", "by_position"), ("own answers", "own_by_position")]
    shown = [(name, suite[key]) for name, key in kinds if suite.get(key)]
    most = shown[0][1][0]["tokens"]
    enough = most // 4 if suite["kind"] == "text" else 200  # the last bins of a text hold few, unusual tokens
    firsts = [found["first"] for found in shown[0][1] if found["tokens"] >= enough]
    lines = ["| tokens from | " + " | ".join(map(str, firsts)) + " |", "|---" * (len(firsts) + 1) + "|"]
    for name, bins in shown:
        by = {found["first"]: f"{math.exp(found['loss']):.4g}" for found in bins if found["tokens"] >= enough}
        lines.append(f"| perplexity, {name} | " + " | ".join(by.get(first, "") for first in firsts) + " |")
    return "\n".join(lines)


def gap(row: dict, key: str, scale: float, digits: int) -> list[str]:
    """A difference with its interval, and its adjusted p-value; blank for a row compared with itself."""
    if key not in row or row["label"] == "full" or (key == "versus_d3" and row["label"] == "d3"):
        return ["", ""]
    found = row[key]
    p = found.get("p_holm", found["p"])
    interval = " to ".join(f"{scale * found[end]:+.{digits}f}" for end in ("low", "high"))
    return [f"{scale * found['mean']:+.{digits}f} [{interval}]", "<0.001" if p < 0.001 else f"{p:.3f}"]


def between(text: str, found: dict[str, str]) -> str:
    """`text` with each table between its lines `<!-- name:begin -->` and `<!-- name:end -->`, if it has them."""
    for name, table in found.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin in text and end in text:
            before, _, rest = text.partition(begin)
            text = before + begin + table + "\n" + end + rest.partition(end)[2]
    return text
