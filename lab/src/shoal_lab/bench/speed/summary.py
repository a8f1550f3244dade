"""Figures from raw runs: medians with their spread, use of the memory bandwidth, ratios round by round.

As usual, TPOT = (E2E - TTFT) / (n - 1), and tokens/s = rows / TPOT, of decoding alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from shoal_lab.bench.idle import BUSY
from shoal_lab.bench.rounds import Ratio, figure, ratio
from shoal_lab.bench.speed.cells import OURS, Job, SpeedJob
from shoal_lab.bench.speed.outcome import CellResult, Measurements
from shoal_lab.bench.system import Setting

Raw = Mapping[str, Any]


def findings(outcome: Measurements, setting: Setting) -> dict[str, Any]:
    """The results as JSON values; the setting without the weights' format, which varies by cell."""
    return {
        "setting": {key: value for key, value in asdict(setting).items() if key != "quant"},
        "rounds": outcome.rounds.to_dict(),
        "roof": bandwidth_of(outcome),
        "idle": idle_of(outcome),
        "warnings": warnings_of(outcome),
        "results": results(outcome),
        "cost_cards": [{"quant": quant, **card} for (quant, _), card in outcome.cards.items()],
        "not_measured": [asdict(one) for one in dict.fromkeys(outcome.absent)],
    }


def tpot(run: Raw) -> float:
    """Seconds per token after the first."""
    times = run["times"]
    return float(times[-1] - times[0]) / (len(times) - 1)


def main_seconds(run: Raw, job: Job) -> float:
    """The figure by which systems are compared: TPOT, a prefill's time to first token, or a forward's median."""
    if job.kind == "forward":
        return float(statistics.median(run["seconds"]))
    return tpot(run) if job.kind == "generate" else float(run["times"][0])


def results(outcome: Measurements) -> list[dict[str, Any]]:
    """A JSON object per cell, raw runs included."""
    return [_result(measured, outcome.measured) for measured in outcome.measured]


def _result(measured: CellResult, every: Sequence[CellResult]) -> dict[str, Any]:
    cell, job = measured.cell, measured.cell.job
    return {
        "system": cell.system,
        "version": measured.about.version,
        "detail": measured.about.detail,
        "quant": cell.quant,
        "method": None if cell.method is None else dict(cell.method),
        "label": cell.label,
        "kind": job.kind,
        "rows": job.rows,
        "context": job.context,
        "new_tokens": job.new_tokens,
        "positions": job.positions,
        **_FIGURES[job.kind](measured),
        "ratios": _ratios(measured, every),
        **_against_full(measured, every),
        "weight_bytes": measured.about.weight_bytes,
        "peak_memory_bytes": measured.peak_memory,
        "load_seconds": measured.load_seconds,
        "warm_up_seconds": measured.warm_up_seconds,
        **measured.about.extra,
        "runs": [{key: value for key, value in run.items() if key != "tokens"} for run in measured.runs],
    }


def _generation(measured: CellResult) -> dict[str, Any]:
    runs, rows, expected = measured.runs, measured.cell.job.rows, measured.expected
    figures: dict[str, Any] = {
        "ttft_seconds": figure(run["times"][0] for run in runs),
        "tpot_seconds": figure(map(tpot, runs)),
        "e2e_seconds": figure(run["times"][-1] for run in runs),
        "tokens_per_second": figure(rows / tpot(run) for run in runs),
        "mean_layers": runs[0]["mean_layers"],
        "ideal_speedup": runs[0]["ideal_speedup"],
    }
    if expected is not None:
        step = expected.step_bytes
        figures["step_bytes"] = step
        figures["mbu"] = figure(step / tpot(run) / statistics.mean(run["roof"]) for run in runs)
        figures["predicted"] = {"seconds": expected.seconds, "tpot_seconds": expected.tpot}
    return figures


def _prefill(measured: CellResult) -> dict[str, Any]:
    tokens = measured.cell.job.rows * measured.cell.job.context
    firsts = [run["times"][0] for run in measured.runs]
    return {"ttft_seconds": figure(firsts), "prompt_tokens_per_second": figure(tokens / first for first in firsts)}


def _forward(measured: CellResult) -> dict[str, Any]:
    return {"seconds": figure(statistics.median(run["seconds"]) for run in measured.runs)}


_FIGURES: Mapping[str, Callable[[CellResult], dict[str, Any]]] = {
    "generate": _generation,
    "prefill": _prefill,
    "forward": _forward,
}


def _against_full(measured: CellResult, every: Sequence[CellResult]) -> dict[str, Any]:
    """Compare with the plain loop on the same weights: the cost card's prediction, and how many first tokens agree."""
    cell = measured.cell
    full = next((other for other in every if other.cell.system == OURS and other.cell.label == "full"
                 and (other.cell.quant, other.cell.job) == (cell.quant, cell.job)), None)
    if cell.job.kind != "generate" or full is None or full is measured:
        return {}
    pairs = zip(measured.runs[0]["tokens"], full.runs[0]["tokens"], strict=True)
    found: dict[str, Any] = {"tokens_as_full": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))}
    ours, theirs = (one.expected.tpot if one.expected is not None else None for one in (measured, full))
    return found if ours is None or theirs is None else {**found, "predicted_speedup": theirs / ours}


def _ratios(measured: CellResult, every: Sequence[CellResult]) -> dict[str, Ratio]:
    """How many times faster than the plain loop and each baseline; for forwards, the cost over that of one position.

    Ratios are taken round by round, so that what slows both down cancels. A baseline without these quantised weights is
    compared unquantised.
    """
    cell, found = measured.cell, dict[str, Ratio]()
    for other in every:
        name = _ratio_name(cell, other.cell, every)
        if name is not None and other is not measured:
            found[name] = _quotients(other, measured)
    if cell.job.kind == "forward" and cell.job.positions > 1:
        one = next((o for o in every if _same_system(o.cell, cell) and o.cell.job.kind == "forward"
                    and o.cell.job.positions == 1), None)
        if one is not None:
            found["cost_of_one_position"] = _quotients(measured, one)
    return found


def _quotients(above: CellResult, below: CellResult) -> Ratio:
    job = below.cell.job
    pairs = zip(above.runs, below.runs, strict=True)
    return ratio(main_seconds(a, above.cell.job) / main_seconds(b, job) for a, b in pairs)


def _same_system(one: SpeedJob, other: SpeedJob) -> bool:
    return (one.system, one.quant, one.label) == (other.system, other.quant, other.label)


def _ratio_name(cell: SpeedJob, other: SpeedJob, every: Sequence[CellResult]) -> str | None:
    """The name of a ratio to `other`; None if the two cannot be compared."""
    if cell.system != OURS or other.job != cell.job:
        return None
    if other.system == OURS:
        return "full" if other.label == "full" and other.quant == cell.quant and cell.label != "full" else None
    exact = any(m.cell.system == other.system and m.cell.quant == cell.quant and m.cell.job == cell.job for m in every)
    if other.quant == cell.quant:
        return other.system
    return f"{other.system} unquantised" if other.quant is None and not exact else None


def bandwidth_of(outcome: Measurements) -> dict[str, Any]:
    """All readings of the bandwidth."""
    readings = [reading for measured in outcome.measured for run in measured.runs for reading in run["roof"]]
    return {"unit": "bytes/s", **(figure(readings) if readings else {}), "readings": readings}


def idle_of(outcome: Measurements) -> dict[str, Any]:
    """How busy other processes kept the machine."""
    during = [run["others"] for measured in outcome.measured for run in measured.runs if run["others"] is not None]
    return {
        "unit": "cores kept busy by other processes",
        "before": outcome.idle_before,
        "during": figure(during) if during else None,
        "busy_above": BUSY,
    }


def warnings_of(outcome: Measurements) -> list[str]:
    """Reasons to doubt the figures."""
    idle, rounds, found = idle_of(outcome), outcome.rounds, []
    seen = [idle["before"], (idle["during"] or {}).get("median")]
    worst = max((value for value in seen if value is not None), default=None)
    if worst is None:
        found.append("whether other processes kept the machine busy is unknown")
    elif worst > BUSY:
        found.append(f"the machine was busy: other processes used {worst:.2f} cores; these figures are not comparable")
    missing = {why for one in outcome.measured if (why := one.about.extra.get("native_kernels")) is not None}
    found += [f"Shoal ran without its native kernels: {why}" for why in sorted(missing)]
    if rounds.done < rounds.asked:
        found.append(f"the time box ended the benchmark after {rounds.done} of {rounds.asked} rounds")
    if rounds.done < 3:
        found.append(f"{rounds.done} rounds show no spread; run at least 3")
    return found
