"""Options that name layers: an index or a number that the model lacks is refused, and the range is named."""

from __future__ import annotations

import pytest

from drafts import draft_of
from lab_matrix import LAB, MASKED
from layer_options import REFUSED, SIX, layered
from shoal.methods.base import Method
from shoal_lab.methods.del_ import DEL
from shoal_lab.methods.draft_and_verify import DraftAndVerify
from shoal_lab.methods.first import First
from shoal_lab.methods.layerskip import LayerSkip
from shoal_lab.methods.mirror_sd import MirrorSD
from shoal_lab.methods.skipdecode import SkipDecode
from trained_parts import part_for

OUTSIDE: dict[tuple[str, str], Method] = {
    ("del", "exits"): DEL(exits=(2, 99)),
    ("draft_and_verify", "skip_attention"): DraftAndVerify((1, 99)),
    ("draft_and_verify", "skip_mlp"): DraftAndVerify(None, (1, 99)),
    ("first", "layers"): First(part_for("first", "llama"), layers=99),
    ("first", "core"): First(part_for("first", "llama"), core=99),
    ("layerskip", "exit_layer"): LayerSkip(99),
    ("mirror_sd", "exit_layer"): MirrorSD(draft_of("llama"), exit_layer=99),
    ("skipdecode", "maximum"): SkipDecode(maximum=99),
    ("skipdecode", "minimum"): SkipDecode(maximum=99, minimum=99),
    ("skipdecode", "warm_up"): SkipDecode(warm_up=99),
}
NAME_NO_LAYER = {
    ("del", "head"), ("draft_and_verify", "share"), ("first", "inner"), ("first", "threshold"),
    ("mirror_sd", "overlap"), ("swift", "ratio"),
}
"""Their names mention layers, but their values do not count any."""


@pytest.mark.parametrize(("name", "option"), OUTSIDE)
def test_a_layer_outside_the_model_is_refused_with_the_range(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        OUTSIDE[name, option].recipe(SIX)


def test_every_option_that_names_layers_is_there() -> None:
    assert layered({type(method) for method in (*LAB, *MASKED)}) - NAME_NO_LAYER - set(OUTSIDE) == set()
