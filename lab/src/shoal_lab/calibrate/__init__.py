"""Searches on a model: what its layers are worth, and which settings save most for a given loss."""

from __future__ import annotations

from shoal_lab.calibrate.layers import LayerScores, measure_layers

__all__ = ["LayerScores", "measure_layers"]
