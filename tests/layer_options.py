"""Options that name layers: how a layer that the model has not is refused, and which say that they name some."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.methods.base import Method
from shoal.methods.options import field_docs
from shoal.types import ModelInfo

SIX = ModelInfo(6, scores={"influence": (0.1, 0.5, 0.2, 0.3, 0.4, 0.6)}, can_split=True)
REFUSED = r"99.*(0\.\.5|0\.\.6|1\.\.6|\b6 layers|at most [46]|1\.\.4|4\.\.6|2\.\.3)"
"""What a refusal of 99 says: the range, in one of its forms."""


def layered(kinds: Iterable[type[Method]]) -> set[tuple[str, str]]:
    """Names of methods and of those of their options whose words mention layers."""
    return {(kind.name, option) for kind in kinds for option, text in field_docs(kind).items()
            if option in kind.option_names() and "layer" in text.lower()}
