"""Write the tables of benchmark results into README.md, lab/benchmarks/README.md, and pages of lab/reports.

    python lab/tools/bench_table.py            writes them
    python lab/tools/bench_table.py --check    prints what is out of date, with exit code 1

The reports are read in the order of their names: on real model files those of lab/benchmarks/real.py in
lab/reports/real, on random weights those of `shoal bench --json` in lab/reports/results, those of `shoal bench-drafts
--json` in lab/reports/drafts, those of lab/benchmarks/serving.py in lab/reports/serving, and those of a predecessor of
bench-drafts on `auto` in lab/reports/auto. The README and lab/reports/performance.md show the files in
lab/reports/real/avx512, and the latter those in lab/reports/real/amx as well. Tables go between the lines
`<!-- benchmarks:begin -->` and `<!-- benchmarks:end -->`, that of auto between `<!-- auto:begin -->` and
`<!-- auto:end -->`, and that of lab/reports/real/amx between `<!-- amx:begin -->` and `<!-- amx:end -->`. The page of
lab/reports/parts shows the results of `shoal bench-drafts` on trained layers there, and between `<!-- cards:begin -->`
and `<!-- cards:end -->` the cards of components, those that ship or are in hub and those in lab/reports/parts, and
between `<!-- kept:begin -->` and `<!-- kept:end -->` what lab/benchmarks/acceptance.py counted there. What
types of files cost, from lab/reports/types, goes between `<!-- types:begin -->` and `<!-- types:end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal_lab.bench.drafts import summary
from shoal_lab.bench.drafts.suite import PLAIN
from shoal_lab.bench.speed import table as speeds
from shoal_lab.bench.table import intervals, processor

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "lab" / "reports"
sys.path.insert(0, str(ROOT / "lab" / "benchmarks"))
import real_page as real  # noqa: E402 - beside the reports
import serving_page as load  # noqa: E402
import types_page  # noqa: E402
from pages import current, markdown  # noqa: E402

_FENCE = "<!-- not run: measures for minutes -->\n```sh\n"
_NOTHING = """
No real model has been measured for this table yet. Shapes with random weights have:
[benchmarks](lab/benchmarks/README.md).
"""


def main(argv: list[str]) -> int:
    """Write the tables, or with `--check` compare them."""
    stale = {path: text for path, text in documents().items() if path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{'out of date' if '--check' in argv else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in argv:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and "--check" in argv)


def documents(results: Path = ROOT / "lab" / "reports" / "results") -> dict[Path, str]:
    """Every document that is written here -> its text."""
    files, shapes = _reports(results.parent / "real"), _reports(results)
    overview = real.overview([report for _, report in files])
    wide = real.glance([report for _, report in _reports(results.parent / "real" / "avx512")])
    found = {ROOT / "README.md": wide or _NOTHING, PAGES / "performance.md": wide}
    found[ROOT / "lab" / "benchmarks" / "README.md"] = "\n".join([
        "\n## Results on real models", overview, *(long(*one) for one in files),
        "\n## Results on random weights in the shape of a model\n", *(long(*one) for one in shapes),
    ])
    suites = [json.loads(path.read_text("utf-8")) for path in sorted((results.parent / "drafts").glob("*.json"))]
    found[PAGES / "drafts" / "README.md"] = "\n".join(map(drafts, suites))
    trained = [report for _, report in _reports(results.parent / "parts") if _has_layer(report)]
    found[PAGES / "parts" / "README.md"] = "\n".join(map(drafts, trained))
    loads = {path.stem: json.loads(path.read_text("utf-8")) for path in (results.parent / "serving").glob("*.json")}
    found[PAGES / "serving" / "README.md"] = load.section(loads, "../pictures/serving-gain.png")
    pages = {page: filled(page.read_text("utf-8"), content) for page, content in found.items()}
    performance, units = PAGES / "performance.md", _reports(results.parent / "real" / "amx")
    pages[performance] = filled(pages[performance], real.glance([report for _, report in units]), "amx")
    types = types_page.section([report for _, report in _reports(results.parent / "types")])
    pages[performance] = filled(pages[performance], types, "types")
    drafting = PAGES / "drafts" / "README.md"
    pages[drafting] = filled(pages[drafting], autos(_reports(results.parent / "auto")), "auto")
    parts = PAGES / "parts" / "README.md"
    pages[parts] = filled(filled(pages[parts], cards(), "cards"), kept(_reports(results.parent / "parts")), "kept")
    return pages


def _reports(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem)
    return [(path, json.loads(path.read_text("utf-8"))) for path in paths]


def _has_layer(report: dict[str, Any]) -> bool:
    """Whether it is a report of `shoal bench-drafts` with a trained layer among the drafters."""
    return "lossless" in report and any(system.startswith("eagle") for system in report["asked"]["systems"])


def filled(text: str, content: str, name: str = "benchmarks") -> str:
    """`text` with `content` between the marks of that name."""
    marks = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not marks.search(text):
        raise ValueError(f"the marks <!-- {name}:begin --> and <!-- {name}:end --> are missing")
    return marks.sub(lambda found: f"{found[1]}{content}{found[2]}", text)


def long(path: Path, report: dict[str, Any]) -> str:
    """The whole report, with its command."""
    if "kind" in report:
        return real.page(path.stem, report)
    parts = [f"\n### {path.stem}\n", intro(report), ""]
    parts += [f"{system}: {what}. " for system, what in speeds.systems(report).items()]
    parts += ["", "```sh", current(report["command"]), "```"]
    for title, header, rows in speeds.sections(report):
        parts += ["", f"{title}:", "", markdown(header, rows)]
    absent = [one for one in report["not_measured"] if one["what"] is None]
    parts += ["", *(f"- Not measured: {_who(one)}: {one['reason']}." for one in absent)]
    return "\n".join(parts) + "\n" + notes(report)


def drafts(report: dict[str, Any]) -> str:
    """A table of lossless methods, or of lossy settings, with its subject and command."""
    asked, machine = report["asked"], report["machine"]
    count, threads = report["lossless"], report["setting"]["threads"]
    busy = [busy for text in report["texts"] for busy in text.get("busy", ())]
    others = f" (others used {statistics.median(busy):.1f})" if busy else ""
    head = (f"**{asked['model']}**, {processor(machine)}, {threads} of {machine['cpu_count']} cores{others}, "
            f"{asked['computes_in']}, {asked['new_tokens']} tokens, {_rounds(asked['rounds'])}, systems "
            f"in turn token by token, {report['date'][:10]}. Of {count['answers']} answers of lossless methods "
            f"{count['equal']} equal plain decoding's, {count['ties']} differ by a tie, {count['wrong']} otherwise:")
    lossy = [row["system"] for row in report["results"] if "lenient" in row["system"]]
    table = _dial(report) if lossy else _gains(report)
    return f"\n{head}\n\n{table}\n\n{_FENCE}{report['command']}\n```\n"


def _gains(report: dict[str, Any]) -> str:
    """A line per system, a column per kind of text."""
    rows = {(row["system"], row["kind"]): row for row in report["results"]}
    kinds = list(dict.fromkeys(kind for _, kind in rows))
    systems = [system for system in report["asked"]["systems"] if system != PLAIN]
    titles = [f"{kind} ({rows[PLAIN, kind]['texts']})" for kind in kinds]
    names = Counter(map(_short, systems))
    lines = [[_short(system) if names[_short(system)] == 1 else system,
              *(_gain(rows[system, kind]) for kind in kinds)] for system in systems]
    return markdown(["method", *titles], lines)


def _gain(row: dict[str, Any]) -> str:
    """Times faster with its interval; tokens per forward, accepted share."""
    times, per, kept = row["times_faster"], row["tokens_per_forward"], row["acceptance"]
    if times is None:
        return ""
    mean = f"{times['mean']:.2f}x"
    shown = f"**{mean}**" if times["low"] > 1 and row["texts"] > 1 else mean
    more = [f"{per:.2f}" if per else "", f"{100 * kept:.0f} %" if kept is not None else ""]
    spread = f" ({times['low']:.2f}-{times['high']:.2f})" if row["texts"] > 1 else ""
    return ", ".join(filter(None, [shown + spread, *more]))


def _dial(report: dict[str, Any]) -> str:
    """A line per setting over all texts together, the slowest first: its gain and its loss."""
    texts = summary.usable([{**text, "kind": "all"} for text in report["texts"]], "all")
    rows = [summary.row("all", system, texts) for system in report["asked"]["systems"]]
    rows.sort(key=lambda row: row["times_faster"]["mean"])
    lines = [[_short(row["system"]), f"{row['times_faster']['mean']:.2f}x ({row['times_faster']['low']:.2f}-"
              f"{row['times_faster']['high']:.2f})", f"{row['ideal_speedup']:.2f}x", f"{row['tokens_per_forward']:.2f}",
              f"{row['nats']:.3f}", f"{100 * row['agreement']:.0f}", f"{row['equal']} of {row['texts']}"]
             for row in rows]
    return markdown(["method", "times faster", "ideal", "tokens per forward", "nats below the best token",
                     "same tokens %", "same text"], lines)


def _short(system: str) -> str:
    """A method without its draft model or component and its rule, which the command shows."""
    return re.sub(r":(draft|text|part)=[^:]*|:rule=lenient", "", system)


def autos(files: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """A line per kind of text, a column per model: times faster than plain decoding, at least; tokens per forward."""
    known = [{row["kind"]: row for row in report["results"] if row["system"] == "auto"} for _, report in files]
    each = [sorted(ratio for row in rows.values() for ratio in row["times_faster"]["each"]) for rows in known]
    kinds = dict.fromkeys(kind for rows in known for kind in rows)
    lines = [[kind, *(_auto(rows.get(kind)) for rows in known)] for kind in kinds]
    lines += [["worst tenth of all texts", *(f"{ratios[len(ratios) // 10]:.3f}x" for ratios in each)],
              ["worst text", *(f"{ratios[0]:.3f}x" for ratios in each)]]
    found = ["", markdown(["kind", *(path.stem for path, _ in files)], lines), ""]
    for path, report in files:
        asked, exact = report["asked"], report["lossless"]
        found.append(f"- {path.stem}: {asked['model']}, {processor(report['machine'])}, {exact['answers']} texts, "
                     f"{asked['new_tokens']} tokens, {_rounds(asked['rounds'])}, {report['date'][:10]}; "
                     f"{exact['equal']} texts equal to plain decoding's. `{current(report['command'])}`")
    return "\n".join(found) + "\n\n"


def _auto(row: dict[str, Any] | None) -> str:
    ratio = None if row is None else row["times_faster"]
    return "" if row is None or ratio is None else (
        f"{ratio['mean']:.2f}x (at least {ratio['low']:.2f}), {row['tokens_per_forward']:.2f}")


def cards() -> str:
    """A line per component, from its card, and the figures of EAGLE's paper: existing ones, then experiments."""
    places = ("src/shoal/parts/*/part.json", "hub/*/part.json", "lab/reports/parts/*-card.json")
    lines = [_card(path) for place in places for path in sorted(ROOT.glob(place))]
    lines.append(["`eagle`", "7B models, as its paper reports it (arXiv 2401.15077)", "", "3.9, with trees",
                  "70 thousand conversations", "", ""])
    header = ["part", "for", "first, second, third guess right where those before it were, %", "tokens per forward",
              "trained on, thousand tokens", "minutes", "MB"]
    return "\n" + markdown(header, lines) + "\n\n"


def kept(reports: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """What lab/benchmarks/acceptance.py counted, each of its reports as a table with its command."""
    header = ["texts", "method", "tokens per forward", "guesses kept, %",
              "first, second, third, fourth guess kept, % of forwards"]
    found = []
    for _, report in (one for one in reports if "acceptance.py" in one[1].get("command", "")):
        rows = [[f"{row['texts']} ({row['n']})", f"`{row['method']}`", f"{row['tokens_per_forward']:.2f}",
                 f"{100 * row['kept']:.0f}", ", ".join(f"{100 * one / row['forwards']:.0f}" for one in row["kept_at"])]
                for row in report["rows"]]
        found.append(f"\n**{report['model']}**, {report['new_tokens']} tokens, {report['date'][:10]}:\n\n"
                     f"{markdown(header, rows)}\n\n{_FENCE}{current(report['command'])}\n```\n")
    return "\n".join(found)


def _card(path: Path) -> list[str]:
    card = json.loads(path.read_text("utf-8"))
    shares = [100 * now / before for before, now in pairwise([1.0, *card["acceptance"]])]
    return [f"`{card['part']}`", f"[{card['model']}](../../../{path.relative_to(ROOT).as_posix()})",
            ", ".join(f"{share:.0f}" for share in shares), f"{card['tokens_per_forward']:.2f}",
            f"{card['training_tokens'] / 1e3:,.0f}", f"{card['minutes']:.0f}", f"{card['bytes'] / 1e6:.1f}"]


def _rounds(number: int, kind: str = "") -> str:
    return f"{number} {kind}round" + ("" if number == 1 else "s")


def intro(report: dict[str, Any]) -> str:
    """The model, the machine and the setting."""
    machine, setting, bandwidth = report["machine"], report["setting"], report["roof"]
    where = f"{processor(machine)}, {setting['threads']} threads" if setting["device"] == "cpu" else _gpu(machine)
    return (f"**{report['subject']['name']}** ({report['subject']['kind']}), {where}, "
            f"roof {bandwidth['median'] / 1e9:.1f} GB/s ({bandwidth['min'] / 1e9:.1f}-{bandwidth['max'] / 1e9:.1f}), "
            f"median of {_rounds(report['rounds']['done'], 'interleaved ')} (smallest-largest){intervals(report)}, "
            f"{report['date'][:10]}, commit {(report['commit'] or 'unknown')[:7]}.")


def notes(report: dict[str, Any]) -> str:
    """Remarks for the reader."""
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
