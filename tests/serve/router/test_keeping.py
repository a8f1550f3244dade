"""How long a model stays, as Ollama's clients say it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.serve.router.keeping import seconds_of


@pytest.mark.parametrize(("value", "seconds"), [
    (0, 0.0), (90, 90.0), (1.5, 1.5), ("90", 90.0), ("0", 0.0), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25),
    ("2.5s", 2.5), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), (" 10s ", 10.0),
])
def test_durations(value: Any, seconds: float) -> None:
    assert seconds_of(value) == seconds


@pytest.mark.parametrize("value", ["", "m", "5x", "5 m", "1h30", True, None, [5], {}, "nan", math.nan])
def test_what_is_no_duration_is_named_with_the_remedy(value: Any) -> None:
    with pytest.raises(ValueError, match=r"keep_alive is .*must be seconds.*-1 never"):
        seconds_of(value)
