"""Routes about words and the model: `/tokenize`, `/detokenize` and `/props`, in the forms of vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal import __version__
from shoal.decode.text.token_bytes import TokenBytes
from shoal.engine.loading.defaults import filled
from shoal.engine.request import prompt_ids
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.serve.http.errors import ApiError, no_model, refused
from shoal.serve.protocol.bodies import ChatBody, Checked, validated
from shoal.serve.protocol.prompts import chat_ids, conversation
from shoal.serve.settings import Settings


class TokenizeBody(BaseModel):
    """`/tokenize`: a text, as vLLM (`prompt`) or llama.cpp (`content`) name it, or a chat's messages."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=128)
    reasoning_effort: str | None = None

    @property
    def specials(self) -> bool | None:
        """Whether tokens such as a beginning of sequence are added; None where the request leaves that open."""
        return self.add_special_tokens if self.add_special is None else self.add_special


class DetokenizeBody(BaseModel):
    """`/detokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
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

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def read(self, given: Mapping[str, Any], kind: type[Checked]) -> tuple[Checked, list[str]]:
        """A request's values, and the names of those that have no effect.

        Raises:
            ApiError: 400 for a wrong value, and in a strict server for one without effect; 404 for another model.
        """
        ignored = [name for name, value in given.items() if value is not None and name not in kind.model_fields]
        if ignored and self._settings.strict:
            raise ApiError(400, f"{ignored[0]} is not supported", param=ignored[0], code="unsupported_parameter")
        asked = getattr(body := validated(given, kind), "model", None)
        if asked not in (None, self._settings.model_name):
            raise no_model(asked, self._settings.model_name)
        return body, ignored

    def tokenize(self, body: TokenizeBody) -> tuple[dict[str, Any], list[str]]:
        """Token ids of a prompt, as the other routes would read it, and the names of what has no effect in messages."""
        texts = [text for text in (body.prompt, body.content) if text is not None]
        if len(texts) + (body.messages is not None) != 1:
            raise refused("prompt", "give one of prompt, content and messages")
        if None not in (body.add_special, body.add_special_tokens) and body.add_special != body.add_special_tokens:
            raise refused("add_special", "add_special and add_special_tokens say different things; give one")
        ids, ignored = self._chat(body) if not texts else (self._text(texts[0], body), [])
        names = {"token_strs": self._tokenizer.convert_ids_to_tokens(ids)} if body.return_token_strs else {}
        told = [{"id": token, "piece": self._piece(token)} for token in ids] if body.with_pieces else ids
        found = {"tokens": told, "count": len(ids), "max_model_len": self._engine.stack.max_positions}
        return {**found, **names}, ignored

    def _piece(self, token: int) -> str | list[int]:
        """What a token stands for: text, or bytes where those are parts of characters."""
        found = self._bytes(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return list(found)

    def _chat(self, body: TokenizeBody) -> tuple[list[int], list[str]]:
        if not body.parse_special:
            raise refused("parse_special", "messages go through the chat template, whose special tokens are some")
        options = body.model_dump(include=set(body.model_fields_set) & set(ChatBody.model_fields))
        chat = validated({**options, "model": self._settings.model_name}, ChatBody)
        chat.check()
        told, ignored = conversation(chat.messages, self._tokenizer, self._settings.strict)
        options = {**chat.variables(chat.tools_for(self._tokenizer.chat_template)), **chat.opening(told)}
        return chat_ids(told, self._tokenizer, {**options, "add_special_tokens": bool(body.specials)}), ignored

    def _text(self, text: str, body: TokenizeBody) -> list[int]:
        if not text and not body.specials:
            return []
        try:
            if body.specials is None and body.parse_special:
                return prompt_ids(text, self._tokenizer, self._engine.stack.vocab_size, None)
            if self._tokenizer is None:
                raise refused("prompt", "the model has no tokenizer")
            how = {"add_special_tokens": body.specials is not False, "split_special_tokens": not body.parse_special}
            return list(self._tokenizer(text, **how)["input_ids"])
        except ValueError as error:
            raise refused("prompt", str(error)) from None

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
            "default_generation_settings": {"n_ctx": engine.stack.max_positions, "params": filled({}, engine.sampling)},
            "num_layers": engine.stack.num_layers,
            "vocab_size": engine.stack.vocab_size,
            "eos_token_ids": sorted(engine.eos_token_ids),
            "changes": engine.changes,
            "card": {"layer_scores": {kind: list(found) for kind, found in card.layer_scores.items()},
                     "order": card.order, "bears": card.bears, "skips": card.skips, "origin": card.origin},
        }
