"""transformers' generate with a StaticCache and torch.compile on the decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.bench.peers.hf import HuggingFace
from shoal.bench.system import NotMeasured


class CompiledHuggingFace(HuggingFace):
    """See `shoal.bench.system.System`; the first generation compiles."""

    detail = "generate, sdpa, StaticCache, torch.compile"

    def options(self) -> dict[str, Any]:
        """Static cache, and compilation on any device."""
        from transformers import CompileConfig

        on_gpu = self.setting.device != "cpu"
        config = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
        # By itself generate compiles on accelerators only; this switch is the one that lifts that.
        config._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": config}

    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        """Refused: generate compiles a step of one token and nothing else."""
        raise NotMeasured("a forward of several positions is not compiled by generate")
