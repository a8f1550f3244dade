"""The KV's peak with methods that merge or prune KV never exceeds the prediction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.model.kv.memory as kv_memory
from backends import NATIVE
from kv_peaks import engine_of, run
from shoal.methods.base import Method
from shoal_lab.methods.centroid_kv import CentroidKV
from shoal_lab.methods.layerskip import LayerSkip
from shoal_lab.methods.mustafar import Mustafar


@given(
    family=st.sampled_from(["llama", "hybrid", "gemma3"]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    new=st.integers(1, 40),
    method=st.sampled_from([LayerSkip(exit_layer=2, length=3), CentroidKV(chunk=8, window=4, sinks=1, every=8),
                            Mustafar(sparsity=0.5, window=4, every=8)]),
)
@settings(max_examples=20, deadline=None)
def test_it_is_never_less(family: str, lengths: list[int], new: int, method: Method) -> None:
    found: list[int] = []
    predicted = run(engine_of(NATIVE, family), lengths, new, method,
                    lambda cache: found.append(cache.bytes().allocated))
    assert predicted.counted >= max(found)


@pytest.mark.parametrize("paged", [True, False])
def test_columns_that_settle_late_are_counted_in_both_forms(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "PAGED", paged)
    found: list[int] = []
    predicted = run(engine_of(NATIVE), [60], 40, Mustafar(sparsity=0.05, window=4, every=8),
                    lambda cache: found.append(cache.bytes().allocated))
    assert predicted.counted >= max(found)
