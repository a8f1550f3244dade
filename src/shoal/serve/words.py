"""Routes about words and the model: `/tokenize`, `/detokenize` and `/props`, in the forms of vLLM and llama.cpp."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal import __version__
from shoal.engine.request import prompt_ids
from shoal.engine.scheduler import Scheduler
from shoal.serve.errors import refused
from shoal.serve.prompts import chat_ids
from shoal.serve.settings import Settings


class TokenizeBody(BaseModel):
    """`/tokenize`: a text, as vLLM (`prompt`) or llama.cpp (`content`) name it, or a chat's messages."""

    model_config = ConfigDict(strict=True, extra="ignore")

    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(BaseModel):
    """`/detokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    tokens: list[int] = Field(max_length=1 << 20)


class Words:
    """Behind the routes.

    Args:
        scheduler: who decodes.
        settings: the operator's.
    """

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        self._scheduler, self._settings = scheduler, settings
        self._engine, self._tokenizer = scheduler.engine, scheduler.engine.tokenizer

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a prompt, as the other routes would read it."""
        given = [value for value in (body.prompt, body.content, body.messages) if value is not None]
        if len(given) != 1:
            raise refused("prompt", "give one of prompt, content and messages")
        if body.messages is not None:
            ids = chat_ids(body.messages, self._tokenizer, {})
        else:
            try:
                ids = prompt_ids(given[0], self._tokenizer, self._engine.stack.vocab_size, None) if given[0] else []
            except ValueError as error:
                raise refused("prompt", str(error)) from None
        return {"tokens": ids, "count": len(ids), "max_model_len": self._engine.stack.max_positions}

    def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids."""
        wrong = next((token for token in body.tokens if not 0 <= token < self._engine.stack.vocab_size), None)
        if wrong is not None or self._tokenizer is None:
            raise refused("tokens", "the model has no tokenizer" if wrong is None else f"token {wrong} has no text")
        text = str(self._tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))
        return {"prompt": text, "content": text}

    def props(self) -> dict[str, Any]:
        """The model, what requests are given by default, and what is known about its layers."""
        engine, card = self._engine, self._engine.card
        return {
            "model_alias": self._settings.model_name,
            "build_info": f"shoal {__version__}",
            "total_slots": self._scheduler.max_rows,
            "chat_template": getattr(self._tokenizer, "chat_template", None),
            "modalities": {"vision": False, "audio": False},
            "default_generation_settings": {"n_ctx": engine.stack.max_positions, "params": dict(engine.sampling)},
            "num_layers": engine.stack.num_layers,
            "vocab_size": engine.stack.vocab_size,
            "eos_token_ids": sorted(engine.eos_token_ids),
            "changes": engine.changes,
            "card": {"layer_scores": {kind: list(found) for kind, found in card.layer_scores.items()},
                     "order": card.order, "bears": card.bears, "skips": card.skips, "origin": card.origin},
        }
