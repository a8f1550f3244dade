"""Of each model type that people run: what runs it, why not more, and what it was compared with.

The list is `people.py`'s, the outcomes are the sweep's. What else a type was compared with follows from what its tests
read: files that llama.cpp made and computes with, kinds of layers whose formulas are written out in float64, and the
published models of `shoal.catalog`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.packed.kinds import MODELS
from shoal.model.packed.shape import OWN_CONFIGS

from .people import COUNTED, ROOT

SUPPORTED = ROOT / "src" / "shoal" / "cli" / "supported.json"
FILES = ROOT / "tests" / "fixtures" / "gguf"
"""Files of llama.cpp's converter or quantiser, beside what llama.cpp computes with them."""
WRITTEN = ("qwen3", "gemma2", "phi3", "granite", "smollm3", "olmo2")
"""Further types of which tests write files that llama.cpp computes with (tests/model/gguf/test_architectures.py)."""
FORMULAS = ("latent_attention", "gated_delta", "mamba", "mamba2", "short_conv", "differential_attention", "lightning",
            "rg_lru")
"""Mixers whose tests write a paper's formulas out in float64."""
PUBLISHED = ("llama", "gemma3", "qwen2")
"""Types of the models of `shoal.catalog`."""
PARTS = {"mistral3": ("mistral", "ministral3"), "inkling": ("inkling_text", "inkling2_text")}
"""Types whose text part is another type's."""
_ORDER = ("kernels", "modules", "refused")


def joined(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each type: model_type, runs ("kernels", "modules" or "refused"), why, oracles."""
    swept: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        swept.setdefault(row["model_type"], []).append(row)
    files = types_of_files()
    return [joined_row(row["model_type"], swept, files) for row in json.loads(COUNTED.read_text("utf-8"))["types"]]


def joined_row(kind: str, swept: Mapping[str, list[dict[str, Any]]], files: set[str]) -> dict[str, Any]:
    """One of them. Of a type and its text part the one that gets further speaks for both."""
    parts = PARTS.get(kind, (kind, f"{kind}_text"))
    rows = [row for part in parts for row in swept.get(part, [])]
    if not rows and kind in OWN_CONFIGS:
        return {"model_type": kind, "runs": "kernels", "why": "", "oracles": ["formulas"]}
    best = min((row for row in rows if not row["configuration"]), key=lambda row: _ORDER.index(runs(row)))
    how = runs(best)
    oracles = ["transformers"] if how != "refused" else []
    oracles += [name for name, types in (("llama.cpp", files), ("formulas", by_formulas()), ("published", PUBLISHED))
                if how != "refused" and types_meet(parts, kind, types)]
    less = [row for row in rows if row["configuration"] and _ORDER.index(runs(row)) > _ORDER.index(how)]
    notes = [reason(best)] if how == "refused" else [f"{row['configuration']}: {runs(row)}" for row in less]
    return {"model_type": kind, "runs": how, "why": "; ".join(notes), "oracles": oracles}


def reason(row: Mapping[str, Any]) -> str:
    """Why a type is refused, without what Shoal would rather have and what Python said."""
    found = re.sub(r": Shoal .*", "", str(row["reason"]))
    return re.sub(r"( run layer by layer: a layer raises ).*", r"\1an error", found)


def runs(row: Mapping[str, Any]) -> str:
    """What runs a swept configuration."""
    if row["packed"] == "right":
        return "kernels"
    return "modules" if row["outcome"] == "right" else "refused"


def types_meet(parts: Iterable[str], kind: str, types: Iterable[str]) -> bool:
    """Whether a type, or its text part, is among others."""
    return bool({*parts, kind} & {*types})


def types_of_files() -> set[str]:
    """The model types of llama.cpp's files."""
    return {*WRITTEN, *(str(config_of(GgufFile(path)).model_type) for path in sorted(FILES.glob("*.gguf")))}


def by_formulas() -> set[str]:
    """Types some layer of which has a mixer of `FORMULAS`."""
    return {name for name, kind in MODELS.items()
            if any(mixer in FORMULAS for layer in kind.layers.values() for mixer in layer.mixers)}


def file_text(rows: list[dict[str, Any]]) -> str:
    """The file of the package."""
    body = ",\n".join(json.dumps(row) for row in rows)
    return f"[\n{body}\n]\n"
