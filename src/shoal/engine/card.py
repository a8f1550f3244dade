"""The calibration card that may lie beside a model's weights: `shoal.json`.

It holds what was measured about the model's layers: `layer_scores` (kind of score -> one number per layer) and
`order` (the recommended removal order: a kind of score, a name, or a list of layers).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "shoal.json"


@dataclass(frozen=True)
class Card:
    """See the module."""

    layer_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    order: str | tuple[int, ...] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], num_layers: int) -> Card:
        """Check and convert; ValueError where the numbers are not of a model with `num_layers` layers."""
        scores = {kind: tuple(map(float, values)) for kind, values in data.get("layer_scores", {}).items()}
        for kind, values in scores.items():
            if len(values) != num_layers:
                raise ValueError(
                    f"{FILE} holds {len(values)} scores of kind {kind!r}, but the model has {num_layers} layers; "
                    "calibrate this model or remove the file"
                )
        order = data.get("order")
        return cls(scores, tuple(order) if isinstance(order, list) else order)


def read_card(model: str | os.PathLike[str], num_layers: int, revision: str | None = None) -> Card:
    """The card of a local folder or a hub repository; an empty one where there is none."""
    path = find_card(model, revision)
    return Card() if path is None else Card.from_dict(json.loads(path.read_text(encoding="utf-8")), num_layers)


def find_card(model: str | os.PathLike[str], revision: str | None = None) -> Path | None:
    """Where the card is, if there is one."""
    if Path(model).exists():
        path = Path(model) / FILE
        return path if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        str(model),
        FILE,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
