"""A node of a tree has the bits that it has at the end of its path as a straight text, in every form of the KV."""

from __future__ import annotations

import pytest

from native_trees import FORMS, READS, trials
from shoal.model.packed import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick(8)
def test_trees_have_the_bits_of_their_paths(form: str, reads: str) -> None:
    for number, trial in enumerate(trials(form, reads, 30)):
        assert not trial.differences(), (number, trial.tree, trial.kv.slots, trial.kv.case)


@pytest.mark.slow
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("form", FORMS)
def test_many_trees_have_the_bits_of_their_paths(form: str, reads: str) -> None:
    for number, trial in enumerate(trials(form, reads, 500, seed=1)):
        assert not trial.differences(), (number, trial.tree, trial.kv.slots, trial.kv.case)
