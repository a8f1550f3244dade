"""The part of an engine that planning memory, finding cards, drafting, streaming and chats use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shoal.decode.recipe import Recipe
from shoal.decode.running_sequence import RunningSequence
from shoal.engine.request import Request
from shoal.model.encoders.encoder import Encoder
from shoal.model.hearing import Hearing
from shoal.model.kv.cache import KVCache
from shoal.model.runner import ModelRunner
from shoal.model.vision import Vision
from shoal.types import ModelInfo


class LoadedModel(Protocol):
    """A model that is ready to run; see `Engine`, which implements it."""

    runner: ModelRunner
    tokenizer: Any
    model: Any
    model_name: str
    encoder: Encoder | None
    vision: Vision | None
    hearing: Hearing | None
    blind: str
    family: str

    @property
    def fingerprint(self) -> str:
        """Tells this model from others."""

    def info(self, max_new_tokens: int = 256) -> ModelInfo:
        """What methods may know about the model."""

    def recipe(self, method: Any, max_new_tokens: int) -> Recipe:
        """What a method makes of the model."""

    def seqs(self, ids: Sequence[list[int]], request: Request, recipe: Recipe | None = None) -> list[RunningSequence]:
        """A sequence per prompt, ready for the loop."""

    def cache_for(self, seqs: Sequence[RunningSequence], max_new_tokens: int) -> KVCache:
        """An empty cache with room for these sequences."""

    def turn(self) -> AbstractContextManager[bool]:
        """The lock that a forward holds."""
