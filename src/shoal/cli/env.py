"""Print versions, hardware, threads and number types for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

from shoal import __version__, compat
from shoal.cli.options import common, config
from shoal.cli.options.parser import Parser

EXAMPLES = """examples:
  shoal env
  shoal env --json
"""
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "matplotlib")


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    facts = {**collect(), "config_files": [str(path) for path in config.files()]}
    width = max(map(len, facts))
    return common.show(args, facts, "\n".join(f"{name:<{width}}  {_text(value)}" for name, value in facts.items()))


def collect() -> dict[str, Any]:
    """All facts by name, in printed order."""
    versions = {package: compat.installed_version(package) for package in _PACKAGES}
    return {"shoal": __version__, "python": sys.version.split()[0], "platform": platform.platform(), **versions,
            **_cpu(), **_accelerators(), **_defaults()}


def _cpu() -> dict[str, Any]:
    import torch

    from shoal.model.packed import native

    kernels = native.vector_set() if native.available() else f"none: {native.why_not()}"
    return {"cpu": cpu_name(), "cpu_count": os.cpu_count(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "native_kernels": kernels, "torch_threads": torch.get_num_threads(),
            "mkldnn": torch.backends.mkldnn.is_available()}


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name, or the platform's name for it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _accelerators() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {"cuda": torch.version.cuda, "mps": torch.backends.mps.is_available(),
            "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in gpus]}


def _defaults() -> dict[str, Any]:
    from shoal.engine.cards import card as cards
    from shoal.engine.loading.device import default_device, default_dtype

    device = default_device()
    return {"cards_shipped": [path.stem for path in sorted(cards.SHIPPED.glob("*.json"))],
            "cards_cached": len(list(cards.cached().glob("*.json"))),
            "default_device": str(device), "default_dtype": str(default_dtype(device)).removeprefix("torch.")}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
