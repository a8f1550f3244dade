"""From prompts and chats to token ids, and the routes `/tokenize`, `/detokenize` and `/props` of vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from shoal.decode.text.pieces import TokenBytes
from shoal.engine import chats
from shoal.engine.loaded import LoadedModel
from shoal.engine.messages import BadMessage, plain
from shoal.engine.request import prompt_ids
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.model.layers.pictures import Pictures
from shoal.serve.errors import ApiError, no_model, refused
from shoal.serve.facts import ModelFacts
from shoal.serve.media import with_fetched
from shoal.serve.protocol.bodies import ChatBody, Checked, read, validated
from shoal.serve.protocol.fields import named
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
        """Whether to add tokens such as a beginning of sequence; None if the request does not say."""
        return self.add_special_tokens if self.add_special is None else self.add_special


class DetokenizeBody(BaseModel):
    """`/detokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: list[int] = Field(max_length=1 << 20)


class TokenRoutes:
    """The routes."""

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        self._scheduler, self._settings = scheduler, settings
        self._engine, self._tokenizer = scheduler.engine, scheduler.engine.tokenizer

    @cached_property
    def _facts(self) -> ModelFacts:
        return ModelFacts.of_engine(self._engine)  # which lists all tokens

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        body, ignored = self._read(await request.body(), TokenizeBody)
        found, more = await self._tokenized(body)
        return JSONResponse(found, headers=named([*ignored, *more]))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body, ignored = self._read(await request.body(), DetokenizeBody)
        return JSONResponse(await asyncio.to_thread(self._detokenized, body), headers=named(ignored))

    def _read(self, raw: bytes, kind: type[Checked]) -> tuple[Checked, list[str]]:
        """A request's values, and the names of fields without effect.

        Raises:
            ApiError: 400 for a wrong value, and in a strict server for a field without effect; 404 for another model.
        """
        given = read(raw)
        ignored = [name for name, value in given.items() if value is not None and name not in kind.model_fields]
        if ignored and self._settings.strict:
            raise ApiError(400, f"{ignored[0]} is not supported", param=ignored[0], code="unsupported_parameter")
        asked = getattr(body := validated(given, kind), "model", None)
        if asked is not None and asked not in self._settings.names:
            raise no_model(asked, *self._settings.names)
        return body, ignored

    async def _tokenized(self, body: TokenizeBody) -> tuple[dict[str, Any], list[str]]:
        """Token ids of a prompt, as in the other routes, and the names of message fields without effect."""
        texts = [text for text in (body.prompt, body.content) if text is not None]
        if len(texts) + (body.messages is not None) != 1:
            raise refused("prompt", "give one of prompt, content and messages")
        if None not in (body.add_special, body.add_special_tokens) and body.add_special != body.add_special_tokens:
            raise refused("add_special", "add_special and add_special_tokens differ; give one")
        ids, ignored = await self._chat(body) if not texts else (await apart(self._text, texts[0], body), [])
        return await apart(self._shown, ids, body), ignored

    def _shown(self, ids: list[int], body: TokenizeBody) -> dict[str, Any]:
        """The answer, in the form that was asked for."""
        names = {"token_strs": self._tokenizer.convert_ids_to_tokens(ids)} if body.return_token_strs else {}
        tokens = [{"id": token, "piece": self._piece(token)} for token in ids] if body.with_pieces else ids
        found = {"tokens": tokens, "count": len(ids), "max_model_len": self._engine.runner.max_positions}
        return {**found, **names}

    def _piece(self, token: int) -> str | list[int]:
        """A token's text; its bytes if they are part of a character."""
        found = self._bytes(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return list(found)

    async def _chat(self, body: TokenizeBody) -> tuple[list[int], list[str]]:
        if not body.parse_special:
            raise refused("parse_special", "the chat template writes special tokens, which must be parsed as such")
        options = body.model_dump(include=set(body.model_fields_set) & set(ChatBody.model_fields))
        chat = validated({**options, "model": self._settings.model_name}, ChatBody)
        chat.check()
        told, ignored = conversation(chat.messages, self._tokenizer, self._settings.strict)
        tools, more = chat.tools_for(self._tokenizer.chat_template, self._settings.strict)
        options = {**chat.variables(tools, told), "add_special_tokens": bool(body.specials)}
        ids, _ = await read_chat(self._engine, told, options, self._settings, look=False)
        return ids, [*ignored, *more]

    def _text(self, text: str, body: TokenizeBody) -> list[int]:
        if not text and not body.specials:
            return []
        try:
            if body.specials is None and body.parse_special:
                return prompt_ids(text, self._tokenizer, self._engine.runner.vocab_size, None)
            if self._tokenizer is None:
                raise refused("prompt", "the model has no tokenizer")
            how = {"add_special_tokens": body.specials is not False, "split_special_tokens": not body.parse_special}
            return list(self._tokenizer(text, **how)["input_ids"])
        except ValueError as error:
            raise refused("prompt", str(error)) from None

    def _detokenized(self, body: DetokenizeBody) -> dict[str, Any]:
        wrong = next((token for token in body.tokens if not 0 <= token < self._engine.runner.vocab_size), None)
        if wrong is not None or self._tokenizer is None:
            raise refused("tokens", "the model has no tokenizer" if wrong is None else f"token {wrong} has no text")
        text = str(self._tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))
        return {"prompt": text, "content": text}

    def props(self) -> dict[str, Any]:
        """The model, the server's defaults, and what is known about the model's layers."""
        card = self._engine.card
        return {
            **self._facts.props(self._settings.model_name),
            "total_slots": self._scheduler.max_seqs,
            "card": {"layer_scores": {kind: list(found) for kind, found in card.layer_scores.items()},
                     "order": card.order, "bears": card.bears, "skips": card.skips, "origin": card.origin},
        }


Made = TypeVar("Made")
_threads = ThreadPoolExecutor(4, "shoal-rendering")


async def apart(work: Callable[..., Made], *given: Any) -> Made:
    """Render a conversation in a thread, so that a slow template delays only others like it."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *given)


def conversation(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, strict: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages for the model's template, and the names of their fields without effect.

    Raises:
        ApiError: 400 for a wrong message, a model without a template, and in a strict server a field without effect.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    try:
        told, ignored = plain(messages, str(tokenizer.chat_template))
    except BadMessage as error:
        raise refused(error.place, str(error)) from None
    if ignored and strict:
        raise ApiError(400, f"{ignored[0]} is not supported: it has no effect", param="messages",
                       code="unsupported_parameter")
    return told, ignored


async def read_chat(
    engine: LoadedModel, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], settings: Settings, *,
    look: bool = True,
) -> tuple[list[int], Pictures | None]:
    """Token ids and pictures or sounds of such messages, by the template's options; ApiError 400 if one is refused."""
    try:
        if engine.vision is not None:
            most = max(settings.max_body, settings.max_pictures)
            messages = await with_fetched(messages, settings.allowed_media_domains, most)
        seconds = settings.max_audio_seconds
        return await apart(partial(chats.read_chat, engine, messages, look=look, seconds=seconds, **options))
    except ValueError as error:
        raise refused("messages", str(error)) from None


def prompts_of(prompt: str | Sequence[Any]) -> list[Any]:
    """The prompts of a completion request, which may be one or a list."""
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise refused("prompt", "prompt is an empty list; give at least one prompt")
    return list(prompt)
