"""Models whose answers are written down and call tools, and the MCP server whose tools they call."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from families import tiny
from serving import MODEL
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.integrations.mcp_servers import ServerConfig
from tool_tokenizer import tool_tokenizer

SERVER = str(Path(__file__).parent / "mcp_server.py")
PATHS = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def tool_server(name: str, *options: str, **more: Any) -> ServerConfig:
    """That server, under a name."""
    return ServerConfig(name, sys.executable, (SERVER, *options), PATHS, **more)


def written(name: str, arguments: Any = None) -> str:
    """A call as the template's model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments or {}})}</tool_call>"


class Forced:
    """A logits processor that makes an answer say a text and end."""

    def __init__(self, ids: Sequence[int], start: int) -> None:
        self._ids, self._start = ids, start

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -1e9)
        only[:, self._ids[min(ids.shape[1] - self._start, len(self._ids) - 1)]] = 0
        return only


def scripted(texts: Sequence[str], tagged: bool = True, context: int = 1 << 14) -> Engine:
    """A model that answers with these texts, one after another."""
    engine = engine_for(tiny("llama", layers=2, max_position_embeddings=context), tool_tokenizer(tagged), name=MODEL)
    engine.eos_token_ids = frozenset({engine.tokenizer.eos_token_id})
    left, end = iter(texts), next(iter(engine.eos_token_ids))

    def script(tokens: Sequence[int], most: int, *_: Any, **__: Any) -> tuple[Forced, ...]:
        ids = engine.tokenizer(next(left), add_special_tokens=False)["input_ids"]
        return (Forced([*ids, end], len(tokens)),)

    engine._generation_processors = script  # type: ignore[assignment]
    return engine
