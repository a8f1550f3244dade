from __future__ import annotations

import pytest

from shoal.depth.budget import head_layers, ideal_speedup


def llama_head_layers(hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 32000) -> float:
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    return head_layers(vocab * hidden, attention + 3 * hidden * ffn)


@pytest.mark.parametrize(
    ("num_layers", "mean", "shape", "head", "speedup"),
    [
        (32, 19.17, (4096, 11008, 32, 32), 0.648, 1.65),
        (40, 20.33, (5120, 13824, 40, 40), 0.517, 1.94),
        (80, 48.43, (8192, 28672, 64, 8), 0.306, 1.65),
    ],
)
def test_the_figures_reported_for_llama_2(
    num_layers: int, mean: float, shape: tuple[int, int, int, int], head: float, speedup: float
) -> None:
    cost = llama_head_layers(*shape)
    assert cost == pytest.approx(head, abs=5e-4)
    assert ideal_speedup(num_layers, mean, cost) == pytest.approx(speedup, abs=5e-3)


def test_full_depth_gains_nothing_and_the_head_damps_the_gain() -> None:
    assert ideal_speedup(32, 32, 0.6) == 1
    assert ideal_speedup(32, 16) == 2
    assert ideal_speedup(32, 16, 32) == pytest.approx(64 / 48)


@pytest.mark.parametrize("mean", [0, -1, 33])
def test_the_mean_must_lie_in_the_stack(mean: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 32\]"):
        ideal_speedup(32, mean)


def test_a_layer_has_parameters() -> None:
    with pytest.raises(ValueError, match="layer"):
        head_layers(10, 0)
