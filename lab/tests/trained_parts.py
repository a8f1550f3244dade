"""Trained components with random weights for the tiny models: any component must leave the output unchanged."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_part import ECHOED, IDS, OTHERS, target
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal_lab.components.picture_gate import PictureScores
from shoal_lab.pictures.gate import write_gate
from shoal_lab.train.context_gate import ContextGateModule
from shoal_lab.train.eagle import EagleModule, default_shape
from shoal_lab.train.export import export
from shoal_lab.train.layer_routers import LayerRouterModule
from shoal_lab.train.medusa import MedusaModule
from shoal_lab.train.part import Base, ShippedModule
from shoal_lab.train.ppd import PromptModule
from shoal_lab.train.read_me import ReadMEModule, group_neurons

RANKS = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]


def eagle(engine: Engine, ids: tuple[int, ...] = IDS, noise: float = 0.3) -> EagleModule:
    """A layer that is far from its start."""
    module = EagleModule(Base(engine.runner), default_shape(hidden_of(engine)), ids, rollout=3)
    _shake(module, noise)
    return module


def medusa(engine: Engine, ids: tuple[int, ...] = ECHOED, noise: float = 0.3) -> MedusaModule:
    module = MedusaModule(Base(engine.runner), hidden_of(engine), ids, heads=3)
    _shake(module, noise)
    return module


def context(engine: Engine, ids: tuple[int, ...] = IDS, noise: float = 0.3) -> ContextGateModule:
    module = ContextGateModule(Base(engine.runner), copy.deepcopy(engine.model), 1, 0.5, ids)
    _shake(module, noise)
    return module


def routers(engine: Engine, ids: tuple[int, ...] = IDS, noise: float = 0.3) -> LayerRouterModule:
    module = LayerRouterModule(Base(engine.runner), copy.deepcopy(engine.model), 0.9, ids, {})
    _shake(module, noise)
    return module


def experts(engine: Engine, groups: int = 3, shared: int = 1, noise: float = 0.3) -> ReadMEModule:
    generator = torch.Generator().manual_seed(2)
    texts = [(torch.randint(0, 97, (30,), generator=generator), 4) for _ in range(3)]
    neurons = group_neurons(engine.model, texts, groups, shared)
    module = ReadMEModule(Base(engine.runner), copy.deepcopy(engine.model), neurons, shared, 2)
    _shake(module, noise)
    return module


def ppd(engine: Engine, copies: int = 1, noise: float = 0.3) -> PromptModule:
    module = PromptModule(Base(engine.runner), copy.deepcopy(engine.model), depths=3, copies=copies)
    _shake(module, noise)
    return module


MAKERS: dict[str, Any] = {
    "eagle": eagle, "medusa": medusa, "ppd": ppd, "dynamic_context": context, "first": routers, "read_me": experts,
    "copies": functools.partial(ppd, copies=2),
}


def hidden_of(engine: Engine) -> int:
    return engine.runner.head_rows([0]).shape[1]


def written(module: ShippedModule, engine: Engine, folder: Path, **facts: Any) -> str:
    export(folder, engine, module, "float32", ranks=RANKS, kept=0.5, **facts)
    return str(folder)


def write_pictures(folder: Path, engine: Engine, prints: list[str], layer: int = 1) -> None:
    """A random gate for pictures."""
    torch.manual_seed(5)
    scores = PictureScores(hidden_of(engine), 16)
    _shake(scores, 0.2)
    write_gate(folder, scores, layer, prints, engine.runner.num_layers)


@functools.cache
def pictures_part(engine: Engine) -> str:
    """The folder of a random gate for pictures, for an engine's model."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-part-"))
    write_pictures(folder, engine, [engine.fingerprint])
    return str(folder)


@functools.cache
def part_for(kind: str, family: str) -> str:
    """The folder of a random component for the tiny model of a family; an equal one is reused."""
    engine = target(family)
    fresh = Path(tempfile.mkdtemp(prefix="shoal-part-"))
    prints = sorted({engine.fingerprint, *(_print(other, dtype) for other, dtype in OTHERS)})
    if kind == "dynamic_pictures":
        write_pictures(fresh, engine, prints)
    else:
        written(MAKERS[kind](engine), engine, fresh, fingerprints=prints)
    kept = Path(tempfile.gettempdir()) / f"shoal-tests-{kind}-{family}"  # the same in every process: tests show it
    kept.mkdir(exist_ok=True)
    for file in fresh.iterdir():
        if not (kept / file.name).is_file() or (kept / file.name).read_bytes() != file.read_bytes():
            file.replace(kept / file.name)
    shutil.rmtree(fresh)
    return str(kept)


def _print(family: str, dtype: torch.dtype) -> str:
    return engine_for(tiny(family, dtype=dtype)).fingerprint


@torch.no_grad()
def _shake(module: nn.Module, noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter += noise * torch.randn(parameter.shape, generator=generator)


def states_of(engine: Engine, tokens: list[int]) -> Tensor:
    """LM head inputs at every token, from transformers' own forward."""
    with torch.no_grad():
        return engine.model.model(torch.tensor([tokens])).last_hidden_state[0]
