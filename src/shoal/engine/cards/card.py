"""The calibration card that may lie beside a model's weights: `shoal.json`.

It holds what was measured about the model's layers: `layer_scores` (kind of score -> one number per layer), `order`
(the recommended removal order: a kind of score, a name, or a list of layers), and what the model bears.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FILE = "shoal.json"
FORMAT = 2
"""Version of the form that cards with a model's identity have."""
BEARABLE = 0.1
"""KL in nats per token, against all layers, up to which a model is said to bear a depth schedule."""


@dataclass(frozen=True)
class Card:
    """What is known about a model's layers.

    Attributes:
        layer_scores: kind of score -> one number per layer, low meaning cheap to drop.
        order: the recommended removal order: a kind of score, a name, or a list of layers.
        bears: mean depth in layers at which D3 moves the distribution by no more than `BEARABLE`; None if unknown.
        skips: layers whose attention, and layers whose MLP, a draft does best without; None if unknown.
        origin: where the card is from, in words, for those who ask.
        borrowed: whether it was measured on other weights of the same model, such as quantised ones.
    """

    layer_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    order: str | tuple[int, ...] | None = None
    bears: float | None = None
    skips: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    origin: str = ""
    borrowed: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing is known that a depth method could use."""
        return not self.layer_scores and self.order is None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], num_layers: int, name: str = FILE) -> Card:
        """Check and convert; ValueError where the numbers are not of a model with `num_layers` layers."""
        try:
            scores = {kind: tuple(map(float, values)) for kind, values in data.get("layer_scores", {}).items()}
            order, skips = data.get("order"), data.get("skips")
            bears = data.get("bears", {}).get("mean_layers")
            chosen = None if skips is None else (tuple(map(int, skips["attention"])), tuple(map(int, skips["mlp"])))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{name} is no calibration card ({error}); calibrate this model or remove the file"
            raise ValueError(why) from error
        for kind, values in scores.items():
            if len(values) != num_layers:
                raise ValueError(
                    f"{name} holds {len(values)} scores of kind {kind!r}, but the model has {num_layers} layers; "
                    "calibrate this model or remove the file"
                )
        if bears is not None and not (_number(bears) and 0 < bears <= num_layers):
            raise ValueError(f"{name} says the model bears {bears!r} layers; it must be in (0, {num_layers}]")
        removal = tuple(order) if isinstance(order, list) else order
        return cls(scores, removal, bears, chosen)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def load_json(path: Path) -> dict[str, Any]:
    """The object in a card's file.

    Raises:
        ValueError: it cannot be read, or is no JSON object; names the file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"the calibration card {str(path)!r} cannot be read ({error}); remove it, or calibrate this "
                         "model anew") from error
    if not isinstance(data, dict):
        raise ValueError(f"the calibration card {str(path)!r} holds no JSON object; remove it, or calibrate this model "
                         "anew")
    return data


def read_card(model: str | os.PathLike[str], num_layers: int, revision: str | None = None) -> Card:
    """The card of a local folder or a hub repository; an empty one where there is none."""
    path = find_card(model, revision)
    if path is None:
        return Card()
    return replace(Card.from_dict(load_json(path), num_layers), origin=f"the card beside the model, {FILE}")


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
