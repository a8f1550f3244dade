"""Hypothesis strategies for depth budgets."""

from __future__ import annotations

from hypothesis import strategies as st

from shoal.depth.budget import Constant, PowerLaw, StepDown

shares = st.floats(0.05, 1.0)
power_laws = st.builds(
    PowerLaw,
    st.floats(0.01, 1.0),
    st.one_of(st.floats(0.0, 1.0), st.integers(0, 100)),
    st.sampled_from(["floor", "ceil", "round"]),
)
stairs = st.lists(st.tuples(st.integers(1, 150), shares), max_size=5).map(
    lambda pairs: tuple(
        zip(sorted({s for s, _ in pairs}), sorted((c for _, c in pairs), reverse=True), strict=False)
    )
)
budgets = st.one_of(
    power_laws,
    shares.map(Constant),
    stairs.map(StepDown),
)
