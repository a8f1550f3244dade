"""Drafting with the model's own layers: refused settings, and the default.

Tests of `d3_spec` check that drafts change no token: the methods here are in `lab_matrix.SELF_DRAFTING`.
"""

from __future__ import annotations

from typing import Any

import pytest

from drive import SHORT
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.types import ModelInfo
from shoal_lab.methods.del_ import DEL
from shoal_lab.methods.draft_and_verify import DraftAndVerify
from shoal_lab.methods.layerskip import LayerSkip
from shoal_lab.methods.swift import Swift
from test_matrix import engine_of


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LayerSkip(0), "exit_layer is 0; it must be at least 1"),
        (lambda: LayerSkip(7).recipe(ModelInfo(6)), r"exit_layer is 7, but the model has 6 layers; use 1\.\.6"),
        (lambda: LayerSkip(2, 0), "length is 0; it must be at least 1 token"),
        (lambda: LayerSkip(2, stop=1.5), r"stop is 1\.5; it must be in \[0, 1\]"),
        (lambda: LayerSkip(2, inner=LayerSkip(1)).recipe(ModelInfo(6)), "inner of layerskip is layerskip"),
        (lambda: DraftAndVerify((7,), ()).recipe(ModelInfo(6)), r"layers \[7\] are to be skipped.*0\.\.5"),
        (lambda: DraftAndVerify((2,), ()).recipe(ModelInfo(6)), "cannot be told apart.*the same layers"),
        (lambda: DraftAndVerify(length=0), "length is 0"),
        (lambda: DraftAndVerify(accepted=2.0), r"accepted is 2\.0"),
        (lambda: Swift().recipe(ModelInfo(6)), "swift: attention and MLP cannot.*d3_spec or layerskip"),
        (lambda: Swift(ratio=1.0), r"ratio is 1\.0; it must be in \[0, 1\)"),
        (lambda: Swift(length=8, nodes=8), "nodes is 8; it must be at least 9"),
        (lambda: Swift(length=0), "length is 0"),
        (lambda: Swift(window=1), "window is 1"),
        (lambda: DEL((0, 2)), r"exits are \[0, 2\]"),
        (lambda: DEL(()), r"exits are \[\]"),
        (lambda: DEL((7,)).recipe(ModelInfo(6)), r"exits are \[7\], but the model has 6 layers"),
        (lambda: DEL(longest=0), "length is 0"),
        (lambda: DEL(head=-1.0), r"head is -1\.0"),
        (lambda: DEL(probe=0), "probe is 0"),
    ],
)
def test_bad_options_are_named(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_default_of_layerskip_takes_a_quarter_of_the_layers() -> None:
    plan = LayerSkip().recipe(ModelInfo(32)).proposer.plan
    assert [plan.layers(step) for step in (1, 6)] == [tuple(range(8))] * 2


@pytest.mark.parametrize("drafting", [LayerSkip(4, 3), DEL((4, 5), window=0, head=0.0)], ids=repr)
def test_drafts_change_no_sample_of_a_search(drafting: Method) -> None:
    options = {"temperature": 1.0, "seed": 11, "max_new_tokens": 12}
    plain = engine_of("llama").generate(SHORT, method=BestOf(3), **options)
    drafted = engine_of("llama").generate(SHORT, method=BestOf(3, inner=drafting), **options)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(r.stats.drafted for r in drafted) > 0
