"""`shoal methods` on methods with a loop of their own."""

from __future__ import annotations

from shoal.cli import methods as command


def test_what_a_loop_combines_with() -> None:
    row = next(row for row in command.table(None) if row["name"] == "jacobi")
    assert row["excludes"] == ["proposer", "rule", "experts", "search"]
    assert {"d3", "kv_int8"} <= set(row["combines_with"])
    assert not {"prompt_lookup", "rsd", "best_of"} & set(row["combines_with"])
