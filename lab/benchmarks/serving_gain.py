"""Summary of the measured loads: the aims, and D3's gain over full depth compared with the cost cards' prediction."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pages import current
from serving_expect import Costs, House, in_phase
from shoal.cli import env
from shoal.cli.options.parser import Parser, parse
from shoal.depth.plan import DepthPlan
from shoal.methods.d3 import D3
from shoal.types import ModelInfo
from shoal_lab.bench import report
from shoal_lab.bench.load.figures import speed
from shoal_lab.bench.load.loops import Load
from shoal_lab.bench.load.run import LoadConfig
from shoal_lab.bench.load.trace import Trace
from shoal_lab.bench.rounds import figure
from shoal_lab.cli import bench_serve
from shoal_lab.components.cost import CostCard

STREAMS, BASELINES, KEPT = 3.0, 1.0, 0.8
"""Aims: speed of many streams over one, ours over a baseline's, and the measured share of the predicted gain."""
MEAN = 0.6
Report = dict[str, Any]


def publish(out: Path, pictures: Path, command: list[str]) -> None:
    """Write gain.json and the plot from the reports in `out`, and print the aims."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(out.glob("*.json"))}
    result = {**report.heading(env.collect(), command), "aims": list(aims(found)), "gains": list(gains(found))}
    report.write(result, out / "gain.json")
    if result["gains"]:
        draw(result["gains"], pictures / "serving-gain.png")
    for aim in result["aims"]:
        print(f"{'reached' if aim['reached'] else 'MISSED'}: {aim['what']}: {aim['measured']:.2f}, "
              f"aimed at {aim['aim']:.2f}")


def aims(found: dict[str, Report]) -> Iterator[dict[str, Any]]:
    """The aims, and whether they were reached."""
    if "streams" in found:
        speeds = {one["concurrency"]: one["tokens_per_second"]["median"] for one in found["streams"]["results"]}
        for streams in sorted(speeds)[1:]:
            yield _aim(f"tokens/s of {streams} streams over one", speeds[streams] / speeds[1], STREAMS)
    if "peers" in found:
        for one in found["peers"]["results"]:
            for baseline, times in one["times_the_speed_of"].items() if one["system"] == "shoal" else ():
                yield _aim(f"tokens/s over {baseline.split()[0]}, {one['load']}", times["median"], BASELINES)
    for gain in gains(found):
        if "in_phase" in gain:
            kept = (gain["measured"]["median"] - 1) / (gain["in_phase"] - 1)
            yield _aim(f"share of D3's predicted gain, {gain['load']}, {gain['policy']}", kept, KEPT)


def _aim(what: str, measured: float, aim: float) -> dict[str, Any]:
    return {"what": what, "measured": measured, "aim": aim, "reached": measured >= aim}


def gains(found: dict[str, Report]) -> Iterator[dict[str, Any]]:
    """D3's gain in every load with it: tokens/s if clients wait, mean latency if they do not."""
    for stage in ("depth", "mixed", "arrivals"):
        for one in found.get(stage, {}).get("results", ()):
            if one["label"].startswith("d3"):
                yield _gain(stage, found[stage], one, found.get("card"))


def _gain(stage: str, load: Report, one: Report, card: Report | None) -> dict[str, Any]:
    policy = "waves" if one["label"].endswith(", waves") else "join"
    gain = {"stage": stage, "load": one["load"], "concurrency": one["concurrency"], "rate": one["rate"],
            "policy": policy, "of": "tokens/s" if one["rate"] is None else "mean latency",
            "measured": _measured(load, one)}
    if card is None:
        return gain
    layers = card["subject"]["num_hidden_layers"]
    cards = [CostCard.from_dict(values, (None,) * layers) for values in card["cost_cards"]]
    predicted = _on_paper(load, one, cards, policy)
    mine = [one for one in cards if one.rows == gain["concurrency"]]
    return {**gain, "predicted": predicted, **(_in_phase(load, one, mine[0]) if stage == "depth" and mine else {})}


def _measured(load: Report, one: Report) -> dict[str, float]:
    full = one["label"].replace(one["label"].split(",")[0], "full")
    if one["rate"] is None:
        times: dict[str, float] = one["times_the_speed_of"][f"shoal {full}"]
        return times
    other = next(x for x in load["results"] if (x["label"], x["load"]) == (full, one["load"]))
    return {"median": other["latency_seconds"]["mean"] / one["latency_seconds"]["mean"]}


def _on_paper(load: Report, one: Report, cards: list[CostCard], policy: str) -> dict[str, float]:
    """The same gain of simulated servers, round by round."""
    wish, layers = _wish(load), len(cards[0].windows)
    prompt = round(one["prompt_tokens"] / one["requests"])
    house = partial(House, Costs(cards), waves=policy == "waves", max_seqs=16, prompt=prompt)
    full, d3 = (house(plan=plan) for plan in (lambda _: DepthPlan.full(layers), partial(_d3, layers)))
    at = Load(one["concurrency"], one["rate"])
    rounds = range(load["rounds"]["done"])
    return figure([_ratio(wish, at, number, full, d3) for number in rounds])


def _ratio(wish: LoadConfig, load: Load, number: int, full: House, d3: House) -> float:
    turn, prompts = wish.turn(load, number), wish.prompts_of(number)
    before, after = full.serve(turn, prompts), d3.serve(turn, prompts)
    return _latency(before) / _latency(after) if load.rate is not None else speed(after) / speed(before)


def _latency(traces: list[Trace]) -> float:
    return sum(trace.end - trace.due for trace in traces) / len(traces)


def _in_phase(load: Report, one: Report, card: CostCard) -> dict[str, float]:
    """The ratio by `CostCard.predict` alone."""
    layers, answer = len(card.windows), _wish(load).prompts.new_tokens[0]
    prompt = round(one["prompt_tokens"] / one["requests"])
    full, d3 = (in_phase(card, plan, prompt, answer) for plan in (DepthPlan.full(layers), _d3(layers, answer)))
    return {"in_phase": d3 / full}


def _wish(load: Report) -> LoadConfig:
    """The load that the command asked for."""
    parser = Parser(add_help=False)
    bench_serve.add_arguments(parser)
    return bench_serve.wish_of(parse(parser, shlex.split(current(load["command"]))[2:]))


def _d3(layers: int, answer: int) -> DepthPlan:
    return D3(mean=MEAN).recipe(ModelInfo(layers, answer)).plan


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """The gain by load and policy, measured and predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    closed, arriving = figure.subplots(1, 2, sharey=True)
    _lines(closed, [one for one in found if one["stage"] == "mixed"], "clients", lambda one: one["concurrency"])
    _lines(arriving, [one for one in found if one["stage"] == "arrivals"], "requests a second", lambda one: one["rate"])
    for one in found:
        if one["stage"] == "depth":
            closed.plot(one["concurrency"], one["measured"]["median"], "k*", label="waves, answers of one length")
    closed.set(title="tokens/s, clients that wait for answers", ylabel=f"D3 at {MEAN:.0%} of layers over full depth")
    arriving.set(title="mean latency, requests at random moments")
    for axes in (closed, arriving):
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _lines(axes: Any, found: list[dict[str, Any]], label: str, place: Callable[[dict[str, Any]], float]) -> None:
    axes.set(xlabel=label)
    for policy, colour in (("join", "tab:blue"), ("waves", "tab:orange")):
        mine = sorted((one for one in found if one["policy"] == policy), key=place)
        if not mine:
            continue
        measured = [one["measured"] for one in mine]
        middle = [one["median"] for one in measured]
        bars = [[one["median"] - one.get("min", one["median"]) for one in measured],
                [one.get("max", one["median"]) - one["median"] for one in measured]]
        places = [place(one) for one in mine]
        axes.errorbar(places, middle, bars, fmt="o-", color=colour, capsize=3, label=f"{policy}, measured")
        if all("predicted" in one for one in mine):
            axes.plot(places, [one["predicted"]["median"] for one in mine], "--", color=colour,
                      label=f"{policy}, predicted")
