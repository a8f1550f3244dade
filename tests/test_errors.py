"""What is said where an extra is missing."""

from __future__ import annotations

import sys

import pytest

from shoal.errors import Unsupported, needs


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "colorsys", None)
    with pytest.raises(Unsupported) as caught, needs("serve", "a picture"):
        import colorsys  # noqa: F401
    assert str(caught.value) == "a picture: colorsys is not installed. Install the extra: pip install 'shoal[serve]'"


def test_other_errors_and_success_pass() -> None:
    with pytest.raises(KeyError), needs("serve", "a picture"):
        raise KeyError("x")
    with needs("serve", "a picture"):
        import math
    assert math.pi > 3
