"""What a model's layers are worth: measured once on a few texts, used as removal order by every depth method."""

from __future__ import annotations

from shoal.calibrate.layer_card import measure_card, quick_card
from shoal.calibrate.layers import LayerScores, measure_layers

__all__ = ["LayerScores", "measure_card", "measure_layers", "quick_card"]
