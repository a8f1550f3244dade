"""Results as text tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_Cell = Callable[[dict[str, Any]], str]


def _points(key: str, scale: float, digits: int) -> _Cell:
    def cell(row: dict[str, Any]) -> str:
        found = row[key]
        spread = f"[{scale * found['low']:+.{digits}f}, {scale * found['high']:+.{digits}f}]"
        return f"{scale * found['mean']:+.{digits}f} {spread}"

    return cell


def _p(key: str, name: str = "p") -> _Cell:
    def cell(row: dict[str, Any]) -> str:
        p = row[key].get(f"{name}_holm", row[key].get(name))
        return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"

    return cell


def _could_show(row: dict[str, Any]) -> str:
    """The detectable difference, if the items show none."""
    found = row["difference"]
    shown = found.get("p_cluster", found["p"]) < 0.05 or "p_holm" not in found
    return "" if shown else f"{100 * found['detectable']:.1f}"


def _timed(row: dict[str, Any], key: str, form: str) -> str:
    value = (row.get("timing") or {}).get(key)
    return "" if value is None else form.format(value)


def _ended(row: dict[str, Any]) -> str:
    """Mean layers of the answers that ended, if any did."""
    layers = row["mean_layers_ended"]
    return "" if layers is None else f"{layers:.2f}"


_ANSWERS: dict[str, _Cell] = {
    "method": lambda row: row["label"],
    "n": lambda row: str(row["n"]),
    "layers": lambda row: f"{row['mean_layers']:.2f}",
    "of ended": _ended,
    "ideal": lambda row: f"{row['ideal_speedup']:.2f}x",
    "real": lambda row: _timed(row, "realised_speedup", "{:.2f}x"),
    "right %": lambda row: f"{100 * row['accuracy']:.1f}",
    "difference, points [95 %]": _points("difference", 100, 1),
    "p": _p("difference"),
    "p, clusters": _p("difference", "p_cluster"),
    "could show": _could_show,
    "F1": lambda row: f"{100 * row['f1']:.1f}" if "f1" in row else "",
    "same %": lambda row: f"{100 * row['same']:.0f}",
    "ROUGE-L": lambda row: f"{row['rouge_l']:.3f}",
    "tokens": lambda row: f"{row['tokens_per_answer']:.1f}",
    "s/answer": lambda row: _timed(row, "seconds_per_answer", "{:.3f}"),
    "cut %": lambda row: f"{100 * row['share_cut']:.1f}",
}
_SOME = ("p, clusters", "could show", "F1", "score", "loss", "- window", "- random")
_LOSS: dict[str, _Cell] = {
    "method": lambda row: row["label"],
    "n": lambda row: str(row["n"]),
    "layers": lambda row: f"{row['mean_layers']:.2f}",
    "ideal": lambda row: f"{row['ideal_speedup']:.2f}x",
    "perplexity": lambda row: f"{row['perplexity']:.3f}",
    "loss difference, nats [95 %]": _points("loss_difference", 1, 3),
    "p": _p("loss_difference"),
}


_TASKS: dict[str, _Cell] = {
    "task": lambda row: row["task"],
    "method": lambda row: row["label"],
    "n": lambda row: str(row["n"]),
    "layers": lambda row: f"{row['mean_layers']:.2f}",
    "ideal": lambda row: f"{row['ideal_speedup']:.2f}x",
    "right %": lambda row: f"{100 * row['accuracy']:.1f}",
    "difference, points [95 %]": _points("difference", 100, 1),
    "p": _p("difference"),
}


def _versus(key: str, scale: float, digits: int) -> _Cell:
    def cell(row: dict[str, Any]) -> str:
        compared = row.get("versus_d3", {})
        return "" if row["label"] == "d3" or key not in compared else _points(key, scale, digits)(compared)

    return cell


_DISTANCE: dict[str, _Cell] = {
    "method": lambda row: row["label"],
    "n": lambda row: str(row["n"]),
    "tokens": lambda row: str(row["tokens"]),
    "layers": lambda row: f"{row['mean_layers']:.2f}",
    "ideal": lambda row: f"{row['ideal_speedup']:.2f}x",
    "KL, nats": lambda row: f"{row['kl']['mean']:.4f}",
    "- D3's [95 %]": _versus("kl", 1, 4),
    "kept %": lambda row: f"{100 * row['kept']['mean']:.1f}",
    "- D3's, points [95 %]": _versus("kept", 100, 1),
    "added loss": lambda row: f"{row['added_loss']['mean']:+.3f}",
    "common tokens": lambda row: f"{row['prefix']['mean']:.1f}" if "prefix" in row else "",
    "- D3's [95 %] ": _versus("prefix", 1, 1),
}


_TIMES: dict[str, _Cell] = {
    "method": lambda row: row["label"],
    "asked for": lambda row: f"{row['speedup'] or 1:g}x",
    "expected, ms/token": lambda row: f"{1000 * row['predicted']:.2f}",
    "expected": lambda row: f"{row['predicted_speedup']:.2f}x",
    "measured, ms/token": lambda row: f"{1000 * row['seconds_per_token']:.2f}",
    "measured": lambda row: f"{row['realised_speedup']:.2f}x",
}


def _against(control: str) -> _Cell:
    def cell(row: dict[str, Any]) -> str:
        compared = row.get("versus", {})
        return _points(control, 100, 1)(compared) if control in compared else ""

    return cell


_LONG: dict[str, _Cell] = {
    "method": lambda row: row["label"],
    "n": lambda row: str(row["n"]),
    "score": lambda row: f"{100 * row['score']:.1f}" if "score" in row else "",
    "loss": lambda row: f"{row['loss']:.3f}" if "loss" in row else "",
    "difference, x100 [95 %]": _points("difference", 100, 1),
    "p": _p("difference"),
    "- window": _against("window"),
    "- random": _against("random"),
    "agreement % [95 %]": lambda row: "{:.1f} [{:.1f}, {:.1f}]".format(
        *(100 * x for x in (row["agreement"], *row["agreement_interval"]))),
    "KV %": lambda row: f"{100 * row['kv']:.0f}",
}


def long_table(part: dict[str, Any]) -> str:
    """Table of `long.study.run` for a suite at one length; differences in hundredths of the score, or of a nat."""
    said = ", ".join(f"{name} {100 * score:.1f}" for name, score in part.get("floors", {}).items())
    return _aligned(_LONG, part["rows"]) + (f"\nscore of trivial answers: {said}" if said else "")


def times_table(rows: Sequence[dict[str, Any]]) -> str:
    """Table of `distance_study.times`."""
    return _aligned(_TIMES, rows)


def distance_table(rows: Sequence[dict[str, Any]]) -> str:
    """Table of `distance_study.run`."""
    return _aligned(_DISTANCE, rows)


def tasks_table(rows: Sequence[dict[str, Any]]) -> str:
    """Table of `harness.compare`."""
    return _aligned(_TASKS, rows)


def answers_table(rows: Sequence[dict[str, Any]]) -> str:
    """Table of `summary.answers_row`, each row with its `label`."""
    return _aligned(_ANSWERS, rows)


def floors_line(floors: dict[str, dict[str, float]]) -> str:
    """A line with the figures of `floors.floors`."""
    said = (f"{name} {100 * found['accuracy']:.1f}" + (f" (F1 {100 * found['f1']:.1f})" if "f1" in found else "")
            for name, found in floors.items())
    return f"right % of trivial answers: {', '.join(said)}"


def loss_table(rows: Sequence[dict[str, Any]]) -> str:
    """Table of `summary.loss_row`, each row with its `label`."""
    return _aligned(_LOSS, rows)


def _aligned(columns: dict[str, _Cell], rows: Sequence[dict[str, Any]]) -> str:
    """A line per row; optional columns are left out if they are empty."""
    every = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    every = {name: cells for name, cells in every.items() if name not in _SOME or any(cells)}
    grid = [list(every), *map(list, zip(*every.values(), strict=True))]
    widths = [max(len(line[i]) for line in grid) for i in range(len(every))]
    return "\n".join(
        "  ".join(word.ljust(width) if i == 0 else word.rjust(width)
                  for i, (word, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in grid
    )
