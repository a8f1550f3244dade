"""Options that name layers: an index or a number that the model does not have is refused, and the range is named."""

from __future__ import annotations

import pytest

from layer_options import REFUSED, SIX, layered
from method_matrix import CHANNELS, CORE
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.early_exit import EarlyExit
from shoal.methods.kv_int4 import KVInt4
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.schedule import Schedule
from shoal.methods.shortgpt import ShortGPT
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.types import ModelInfo

OUTSIDE: dict[tuple[str, str], Method] = {
    ("d3", "core"): D3(core=99),
    ("d3", "mean"): D3(mean=99.0),
    ("d3", "order"): D3(order=(1, 99)),
    ("d3_spec", "core"): D3Spec(core=99),
    ("d3_spec", "mean"): D3Spec(mean=99.0),
    ("d3_spec", "order"): D3Spec(order=(1, 99)),
    ("double_sparsity", "first"): DoubleSparsity(CHANNELS, first=99),
    ("early_exit", "exit_layer"): EarlyExit(99),
    ("kv_int4", "first"): KVInt4(99),
    ("kv_int8", "first"): KVInt8(99),
    ("schedule", "order"): Schedule((99,), (1,)),
    ("shortgpt", "removed"): ShortGPT(removed=99),
    ("tidal", "select"): Tidal(select=99),
    ("tidal", "reselect"): Tidal(reselect=99),
    ("topk_oracle", "first"): TopKOracle(first=99),
}
NAME_NO_LAYER = {
    ("d3", "fill"), ("double_sparsity", "channels"), ("eagle", "stop"), ("mtp", "stop"), ("snapkv", "random"),
    ("tidal", "k"), ("unified_layer_skipping", "speedup"),
}
"""Their words mention layers, but their values count none."""


@pytest.mark.parametrize(("name", "option"), OUTSIDE)
def test_a_layer_outside_the_model_is_refused_with_the_range(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        OUTSIDE[name, option].recipe(SIX)


def test_every_option_that_names_layers_is_there() -> None:
    assert layered({type(method) for method in CORE}) - NAME_NO_LAYER == set(OUTSIDE)


def test_the_number_of_layers_changes_nothing() -> None:
    for method in (KVInt8(6), KVInt4(6), TopKOracle(first=6), DoubleSparsity(CHANNELS, first=6)):
        assert method.recipe(SIX).exact_to == "full"
    assert TopKOracle().recipe(ModelInfo(1)).exact_to == "full"
