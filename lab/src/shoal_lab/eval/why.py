"""Why a schedule loses quality: depth of a position, depth of its context, removal order, sublayers.

Each question is a set of variants for `shoal_lab.eval.distance`, read on the same texts. Depths are numbers of layers
in one removal order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.runner import ModelRunner
from shoal_lab.eval.distance import FullReading, Readings, Variant
from shoal_lab.eval.equal_depth import Counts, Lengths
from shoal_lab.eval.rising import Executor, RisingPlan, executor

_HALVINGS = 40
Losses = Sequence[Sequence[float]]
"""KL of a token in nats, by bin of positions and by number of skipped layers: [bin][L - depth]."""


def apart(runner: ModelRunner, context: int, judged: int, order: Sequence[int]) -> Executor:
    """Tokens judged at one depth that see tokens computed at another: see `Reread.apart`.

    A layer that a token runs and its context skipped still finds keys and values there, made from the passing hidden
    states: see `shoal_lab.eval.rising`.

    Raises:
        Unsupported: the context is shallower, and the model is not packed.
    """
    layers = runner.num_layers
    if judged > context:
        return executor(runner, RisingPlan((layers, context, judged), tuple(order), layers))
    steps = [NEVER] * layers
    for layer in order[: layers - judged]:
        steps[layer] = 2
    for layer in order[: layers - context]:
        steps[layer] = 1
    return runner, DepthPlan.whole_layers(steps)


def judged_apart(runner: ModelRunner, context: int, judged: int, order: Sequence[int]) -> Variant:
    """Tokens at one depth, their context at another."""
    how = apart(runner, context, judged, order)

    def read(judge: FullReading) -> list[Readings]:
        return judge.apart(how)

    spec = {"method": "apart", "method_args": {"context": context, "judged": judged, "order": list(order)}}
    return Variant(spec, read, _layers(runner, judged))


def at_depth(runner: ModelRunner, depth: int, order: Sequence[int]) -> Variant:
    """Every token after the first at one depth."""
    drops = [1 if layer in order[: runner.num_layers - depth] else NEVER for layer in range(runner.num_layers)]
    return _planned(runner, DepthPlan.whole_layers(drops))


def without(runner: ModelRunner, layer: int, part: str) -> Variant:
    """Every token after the first without the attention, the MLP, or both, of one layer."""
    every = (NEVER,) * runner.num_layers
    less = (*every[:layer], 1, *every[layer + 1 :])
    return _planned(runner, DepthPlan(every if part == "mlp" else less, every if part == "attention" else less))


def _planned(runner: ModelRunner, plan: DepthPlan) -> Variant:
    drops = {part: [None if drop == NEVER else drop for drop in drops]
             for part, drops in (("attention", plan.attention), ("mlp", plan.mlp))}
    return Variant({"method": "plan", "method_args": drops}, lambda judge: judge.under((runner, plan)),
                   plan.layer_tokens)


def _layers(runner: ModelRunner, depth: int) -> Callable[[int], float]:
    """All layers for the first token, then `depth`."""
    return lambda tokens: runner.num_layers + (tokens - 1) * depth


def best_counts(losses: Losses, lengths: Lengths, num_layers: int, width: int, mean: float, falling: bool) -> Counts:
    """The layers by position with the least loss at a mean, if a token's loss depends on its own depth alone.

    Args:
        losses: of a token in each bin of `width` positions; later positions count to the last bin.
        lengths: number of tokens at each position.
        num_layers: L.
        width: positions of a bin.
        mean: layers per token; token 0 runs all of them.
        falling: whether depth must not rise again.

    Returns:
        Layers of steps 0, 1, ...: two solutions for prices of a layer, the deeper one up to some step.
    """
    sizes = _tokens(lengths, width, len(losses))

    def table(price: float) -> Counts:
        gone = _cheapest([[size * (loss - price * less) for less, loss in enumerate(row)]
                          for size, row in zip(sizes, losses, strict=True)], falling)
        steps = range(1, max(lengths.tokens))
        return (num_layers, *(num_layers - gone[min(step // width, len(gone) - 1)] for step in steps))

    low, high = 0.0, 1e3
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths.mean(table(middle)) > mean else (low, middle)
    deep, shallow = table(low), table(high)
    blends = [(*deep[:step], *shallow[step:]) for step in range(len(deep) + 1)]
    return min(blends, key=lambda counts: abs(lengths.mean(counts) - mean))


def _tokens(lengths: Lengths, width: int, bins: int) -> list[int]:
    """Tokens in each bin without token 0; the last bin takes all that follow."""
    found = [0] * bins
    for step, alive in enumerate(lengths.still_going()):
        if step:
            found[min(step // width, bins - 1)] += alive
    return found


def _cheapest(costs: Losses, falling: bool) -> list[int]:
    """Skipped layers in each bin with the least sum of the costs [bin][skipped layers]."""
    if not falling:
        return [min(range(len(row)), key=row.__getitem__) for row in costs]
    ways: list[tuple[float, list[int]]] = [(cost, [gone]) for gone, cost in enumerate(costs[0])]
    for row in costs[1:]:
        best = [min(ways[: gone + 1], key=lambda one: one[0]) for gone in range(len(row))]
        ways = [(sum_ + row[gone], [*before, gone]) for gone, (sum_, before) in enumerate(best)]
    return min(ways, key=lambda one: one[0])[1]
