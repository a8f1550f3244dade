"""Search for depth schedules: first removal orders, then budgets over the best order.

The search is greedy and deterministic: two searches over the same samples try the same schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shoal.depth.order import Core, removal_order
from shoal.methods.schedule import Schedule
from shoal_lab.calibrate.trials import OutOfTrials, Trial, TrialRunner
from shoal_lab.eval.controls import STARTS, schedule
from shoal_lab.eval.equal_depth import Counts, linear, power_law, two_levels

LADDER = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)
"""Mean depths, as shares of L, at which budgets are tried."""
_SEGMENTS = 4
_PLACES = ("center_out", "late_middle", "low_first", "spread")


def leave_one_out(runner: TrialRunner, layers: Sequence[int]) -> list[float]:
    """Rise of the loss when each of these layers alone is left out after the prompt."""
    return runner.rises([Schedule((layer,), (1,)) for layer in layers])


def greedy_order(runner: TrialRunner, core: Core, most: float, ahead: Sequence[int]) -> tuple[int, ...]:
    """Repeatedly remove the layer that costs least loss, until the loss has risen by `most` nats.

    Args:
        runner: tries schedules.
        core: layers that always run.
        most: rise at which the search ends.
        ahead: order of the flex layers that are left when the search or its trials end.
    """
    flex, gone = list(core.flex(runner.num_layers)), list[int]()
    while flex:
        tried = [Schedule((*gone, layer), (1,) * (len(gone) + 1)) for layer in flex]
        try:
            rises = runner.rises(tried)
        except OutOfTrials:
            break
        best = min(range(len(flex)), key=lambda i: (rises[i], -flex[i]))
        gone.append(flex.pop(best))
        if rises[best] > most:
            break
    return (*gone, *(layer for layer in ahead if layer not in gone))


def orders(num_layers: int, core: Core, scores: Mapping[str, Sequence[float]]) -> dict[str, tuple[int, ...]]:
    """Named removal orders, each permutation once."""
    found: dict[str, tuple[int, ...]] = {}
    for name in (*scores, *_PLACES):
        order = removal_order(name, num_layers, *core, scores)
        if order not in found.values():
            found[name] = order
    return found


def compare_orders(
    runner: TrialRunner, named: Mapping[str, tuple[int, ...]], core: Core, share: float = 0.8
) -> list[Trial]:
    """All orders at one constant depth, best first."""
    table = two_levels(runner.lengths, runner.num_layers, core.size, max(share * runner.num_layers, core.size + 1))
    tried = [(name, schedule(table, order, runner.num_layers)) for name, order in named.items()]
    return sorted(runner.try_all(tried), key=lambda trial: trial.rise)


def budgets(runner: TrialRunner, order: tuple[int, ...], core: Core) -> Iterator[Trial]:
    """D3 with every start, constant depth and the linear budget, at each depth of the ladder."""
    layers, lengths = runner.num_layers, runner.lengths
    for share in LADDER:
        mean, tables = share * layers, dict[str, Counts]()
        for start in (0.0, *STARTS):
            try:
                tables[f"d3, start {start:g}"] = power_law(lengths, layers, core.size, mean, start)[1]
            except ValueError:  # cannot reach the mean
                continue
        for name, make in (("constant", two_levels), ("linear", lambda *at: linear(*at)[2])):
            try:
                tables[name] = make(lengths, layers, core.size, mean)
            except ValueError:
                continue
        yield from runner.try_all([(name, schedule(table, order, layers)) for name, table in tables.items()])


def free_budget(runner: TrialRunner, order: tuple[int, ...], core: Core, most: float) -> Iterator[Trial]:
    """Greedily lower a staircase of any shape: each move takes the layers that cost the least loss per layer saved.

    The stairs are at quartiles of the answer's tokens. A move lowers one stair by one layer, and every later one that
    would then be higher.
    """
    layers = runner.num_layers
    edges = _edges(runner)
    stairs, last = [layers] * len(edges), Trial("free", Schedule((), ()), float(layers), 0.0)
    while True:
        moves = [_lowered(stairs, index) for index in range(len(stairs)) if stairs[index] > core.size]
        if not moves:
            return
        tried = [("free", schedule(_table(move, edges, layers), order, layers)) for move in moves]
        found = runner.try_all(tried)
        best = min(range(len(found)), key=lambda i: _price(last, found[i]))
        stairs, last = moves[best], found[best]
        yield last
        if last.rise > most:
            return


def _price(before: Trial, after: Trial) -> float:
    return (after.rise - before.rise) / (before.mean_layers - after.mean_layers)


def _edges(runner: TrialRunner) -> list[int]:
    """First steps of the stairs."""
    alive = runner.lengths.still_going()
    total, seen, edges = sum(alive), 0, [1]
    for step, count in enumerate(alive):
        seen += count
        if len(edges) < _SEGMENTS and seen >= total * len(edges) / _SEGMENTS and step + 1 > edges[-1]:
            edges.append(step + 1)
    return edges


def _lowered(stairs: Sequence[int], index: int) -> list[int]:
    low = stairs[index] - 1
    return [*stairs[:index], *(min(level, low) for level in stairs[index:])]


def _table(stairs: Sequence[int], edges: Sequence[int], num_layers: int) -> Counts:
    table = [num_layers] * edges[0]
    for level, first, after in zip(stairs, edges, [*edges[1:], edges[-1] + 1], strict=True):
        table += [level] * (after - first)
    return tuple(table)


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other beats in both depth and loss, deepest first."""
    best: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.mean_layers, t.rise)):
        if not best or trial.rise < best[-1].rise:
            best.append(trial)
    return best[::-1]
