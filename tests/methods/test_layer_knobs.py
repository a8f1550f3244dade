"""Knobs that name layers: an index or a number that the model does not have is refused, and the range is named."""

from __future__ import annotations

import pytest

from drafts import draft_of
from method_matrix import CHANNELS
from shoal.methods import get, names
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.early_exit import EarlyExit
from shoal.methods.knobs import field_docs
from shoal.methods.kv_int4 import KVInt4
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.schedule import Schedule
from shoal.methods.shortgpt import ShortGPT
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.types import ModelInfo
from shoal_lab.methods.del_ import DEL
from shoal_lab.methods.draft_and_verify import DraftAndVerify
from shoal_lab.methods.first import First
from shoal_lab.methods.layerskip import LayerSkip
from shoal_lab.methods.mirror_sd import MirrorSD
from shoal_lab.methods.skipdecode import SkipDecode
from trained_parts import part_for

SIX = ModelInfo(6, scores={"influence": (0.1, 0.5, 0.2, 0.3, 0.4, 0.6)}, can_split=True)
OUTSIDE: dict[tuple[str, str], Method] = {
    ("d3", "core"): D3(core=99),
    ("d3", "mean"): D3(mean=99.0),
    ("d3", "order"): D3(order=(1, 99)),
    ("d3_spec", "core"): D3Spec(core=99),
    ("d3_spec", "mean"): D3Spec(mean=99.0),
    ("d3_spec", "order"): D3Spec(order=(1, 99)),
    ("del", "exits"): DEL(exits=(2, 99)),
    ("double_sparsity", "first"): DoubleSparsity(CHANNELS, first=99),
    ("draft_and_verify", "skip_attention"): DraftAndVerify((1, 99)),
    ("draft_and_verify", "skip_mlp"): DraftAndVerify(None, (1, 99)),
    ("early_exit", "exit_layer"): EarlyExit(99),
    ("first", "layers"): First(part_for("first", "llama"), layers=99),
    ("first", "core"): First(part_for("first", "llama"), core=99),
    ("kv_int4", "first"): KVInt4(99),
    ("kv_int8", "first"): KVInt8(99),
    ("layerskip", "exit_layer"): LayerSkip(99),
    ("mirror_sd", "exit_layer"): MirrorSD(draft_of("llama"), exit_layer=99),
    ("schedule", "order"): Schedule((99,), (1,)),
    ("shortgpt", "removed"): ShortGPT(removed=99),
    ("skipdecode", "maximum"): SkipDecode(maximum=99),
    ("skipdecode", "minimum"): SkipDecode(maximum=99, minimum=99),
    ("skipdecode", "warm_up"): SkipDecode(warm_up=99),
    ("tidal", "select"): Tidal(select=99),
    ("tidal", "reselect"): Tidal(reselect=99),
    ("topk_oracle", "first"): TopKOracle(first=99),
}
NAME_NO_LAYER = {
    ("del", "head"), ("double_sparsity", "channels"), ("draft_and_verify", "share"), ("eagle", "stop"),
    ("first", "inner"), ("first", "threshold"), ("snapkv", "random"), ("swift", "ratio"), ("tidal", "k"),
    ("unified_layer_skipping", "speedup"),
}
"""Their words mention layers, but their values count none."""


@pytest.mark.parametrize(("name", "knob"), OUTSIDE)
def test_a_layer_outside_the_model_is_refused_with_the_range(name: str, knob: str) -> None:
    with pytest.raises(ValueError, match=r"99.*(0\.\.5|0\.\.6|1\.\.6|\b6 layers|at most [46]|1\.\.4|4\.\.6|2\.\.3)"):
        OUTSIDE[name, knob].recipe(SIX)


def test_every_knob_that_names_layers_is_there() -> None:
    docs = {(name, knob): text for name in names() for knob, text in field_docs(get(name)).items()
            if knob in get(name).knobs()}
    layered = {pair for pair, text in docs.items() if "layer" in text.lower()}
    assert layered - NAME_NO_LAYER - set(OUTSIDE) == set()


def test_the_number_of_layers_changes_nothing() -> None:
    for method in (KVInt8(6), KVInt4(6), TopKOracle(first=6), DoubleSparsity(CHANNELS, first=6)):
        assert method.recipe(SIX).exact_to == "full"
    assert TopKOracle().recipe(ModelInfo(1)).exact_to == "full"
