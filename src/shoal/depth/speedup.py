"""The ideal speed-up of a depth schedule: what it would gain if only layers and LM head cost anything.

The figure that D3's paper reports (arXiv 2503.08524, BBH) follows from it. It leaves out the prefill, attention over
the context and every per-step overhead, so it is a yardstick and not a promise.
"""

from __future__ import annotations


def head_layers(head_parameters: float, layer_parameters: float) -> float:
    """e, the cost of the LM head in decoder layers: parameters (or bytes) of the head over those of one layer."""
    if layer_parameters <= 0 or head_parameters < 0:
        raise ValueError(
            f"a head of {head_parameters} and a layer of {layer_parameters} parameters; "
            f"the layer must have some, and the head cannot have less than none"
        )
    return head_parameters / layer_parameters


def ideal_speedup(num_layers: int, mean_layers: float, head_layers: float = 0.0) -> float:
    """(L + e) / (mean + e).

    Args:
        num_layers: L.
        mean_layers: decoder layers per generated token as realised, token 0 at L.
        head_layers: e, see `head_layers`.
    """
    if not 0 < mean_layers <= num_layers:
        raise ValueError(f"mean_layers is {mean_layers}; it must be in (0, {num_layers}]")
    return (num_layers + head_layers) / (mean_layers + head_layers)
