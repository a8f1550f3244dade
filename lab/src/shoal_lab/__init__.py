"""What studies the models that Shoal runs: evaluation, training, calibration, benchmarks, and methods under study."""

from __future__ import annotations

__version__ = "0.1.0"
