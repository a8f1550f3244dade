"""Methods that draft with trained heads or vectors: they only change the number of forwards."""

from __future__ import annotations

import pytest

from backends import HF, Backend, on_backends
from part_checks import check_tokens
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal_lab.methods.medusa import Medusa
from shoal_lab.methods.ppd import PPD
from state_head_drafters import HEADS_FORMS, heads_drafter
from trained_parts import part_for
from turns import by_turns


def methods(family: str) -> dict[str, Method]:
    heads, vectors, d3 = part_for("medusa", family), part_for("ppd", family), D3(alpha=0.93, core=2)
    return {
        "medusa": Medusa(heads),
        "medusa tree": Medusa(heads, nodes=7),
        "medusa on d3": Medusa(heads, length=2, inner=d3),
        "ppd": PPD(vectors),
        "ppd tree": PPD(vectors, nodes=12),
        "ppd on d3": PPD(vectors, length=2, inner=d3),
    }


NAMES = list(methods("llama"))


@pytest.mark.parametrize("method", NAMES)
@on_backends("hybrid", "llama")
def test_no_greedy_token_changes(backend: Backend, name: str, method: str) -> None:
    check_tokens(backend, name, methods(name)[method], "greedy")


@pytest.mark.parametrize("form", [name for name, form in HEADS_FORMS.items() if form.method == "medusa"])
@on_backends("llama")
def test_heads_of_other_tools_change_no_token(backend: Backend, name: str, form: str) -> None:
    """Random heads, which know nothing of the guesses before theirs, are seldom all right."""
    engine = Engine(backend.runner(name))
    for options in ({}, {"length": 2}, {"inner": D3(alpha=0.93, core=2)}):
        method = Medusa(heads_drafter(form), **options)  # type: ignore[arg-type]
        check_tokens(backend, name, method, "greedy", engine, ("none",))


def test_heads_of_other_tools_have_no_ranks() -> None:
    with pytest.raises(ValueError, match="nodes is 4, and heads of another tool do not say"):
        Engine(HF.runner("llama")).recipe(Medusa(heads_drafter("medusa"), nodes=4), 16)


@by_turns("method, sampling", NAMES, ["sampled", "penalised"])
def test_no_sample_changes(method: str, sampling: str) -> None:
    check_tokens(HF, "hybrid", methods("hybrid")[method], sampling)
