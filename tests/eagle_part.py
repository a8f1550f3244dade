"""EAGLE's trained layer with random weights, beside a tiny model: any such part must leave the output as it is."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from backends import reference
from families import tiny
from shoal.engine.loading.load import engine_for
from shoal.speculative.eagle_head import FUSE, NORMS
from shoal.speculative.layer_head import LayerShape
from shoal.speculative.part_file import CARD, FORMAT, TENSORS, TOKENS

IDS = tuple(range(3, 90))
OTHERS = (("llama", torch.float64), ("hybrid", torch.float64), ("hybrid", torch.float32), ("qwen3", torch.float64))
"""Models that the part is declared for as well: what the matrix of all methods runs on."""


def write_eagle(folder: Path, family: str, ids: tuple[int, ...] = IDS) -> Path:
    """Write a part for the tiny model of a family into a folder that is there."""
    engine = engine_for(reference(family))
    hidden = engine.stack.head_rows([0]).shape[1]
    shape = LayerShape(hidden, 2 * hidden, 4, hidden // 4)
    generator = torch.Generator().manual_seed(1)
    sizes = shape.sizes() | {FUSE: (hidden, 2 * hidden)} | dict.fromkeys(NORMS, (hidden,))
    tensors = {name: float(len(size) == 1) + 0.3 * torch.randn(size, generator=generator)
               for name, size in sizes.items()}
    prints = {engine.fingerprint, *(engine_for(tiny(other, dtype=dtype)).fingerprint for other, dtype in OTHERS)}
    save_file({**tensors, TOKENS: torch.tensor(ids, dtype=torch.int32)}, folder / TENSORS)
    card = {"format": FORMAT, "part": "eagle", "fingerprints": sorted(prints), "layers": engine.stack.num_layers,
            "vocabulary": None, "shape": {"hidden": hidden, "ffn": 2 * hidden, "heads": 4, "head_dim": hidden // 4}}
    (folder / CARD).write_text(json.dumps(card), "utf-8")
    return folder


@functools.cache
def eagle_part(family: str) -> str:
    """The folder of such a part, the same in every process, since tests show it."""
    fresh = write_eagle(Path(tempfile.mkdtemp(prefix="shoal-part-")), family)
    kept = Path(tempfile.gettempdir()) / f"shoal-tests-core-eagle-{family}"
    kept.mkdir(exist_ok=True)
    for file in fresh.iterdir():
        if not (kept / file.name).is_file() or (kept / file.name).read_bytes() != file.read_bytes():
            file.replace(kept / file.name)
    shutil.rmtree(fresh)
    return str(kept)
