"""From a request for text to its response: parses it, queues it, and writes the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from shoal.decode.text.pieces import TokenBytes
from shoal.engine.constraints.monitor import Monitor, python_members
from shoal.engine.request import prompt_ids
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.model.layers.pictures import Pictures
from shoal.serve import policy
from shoal.serve.answer import Answer, Compiling
from shoal.serve.errors import LOG, ApiError, failed, no_model, refused
from shoal.serve.metrics import Metrics, extra_counts, report
from shoal.serve.middleware import KEY, note, unless_left
from shoal.serve.protocol import messages, responses
from shoal.serve.protocol.bodies import (
    Asked,
    Body,
    ChatBody,
    CompletionBody,
    Extras,
    parse,
    read,
    validated,
    with_model,
)
from shoal.serve.protocol.fields import MESSAGES, RESPONSES, Unread, named, sorted_out
from shoal.serve.protocol.infill import Gap, InfillBody, InfillWire
from shoal.serve.protocol.logprobs import Echo, TokenNames, echo_of
from shoal.serve.protocol.messages import MessageBody, MessageWire
from shoal.serve.protocol.responses import ResponseBody, ResponseWire
from shoal.serve.protocol.thoughts import Reading, ThoughtLimit, thoughts_of
from shoal.serve.protocol.tokens import conversation, prompts_of, read_chat
from shoal.serve.protocol.tools import Tools
from shoal.serve.protocol.wire import ChatWire, CompletionWire, Json, Wire, with_steps
from shoal.serve.settings import Settings

_COMPLETION_TOKENS = 16
_UNSHOWN = ("metrics", "steps", "canvas", "return_tokens_as_token_ids")
"""Fields for which answers in other forms than OpenAI's older ones have no place."""
_MOST_TOLD = 1000
_PLAIN = Reading()


class RequestHandler:
    """Answers requests for text."""

    def __init__(self, scheduler: Scheduler, settings: Settings, metrics: Metrics) -> None:
        self._scheduler, self._settings, self._metrics = scheduler, settings, metrics
        self._tokenizer = scheduler.engine.tokenizer
        self._vocabulary = None if self._tokenizer is None else TokenBytes(self._tokenizer)
        self._compiling = Compiling(scheduler.engine, settings.timeout)
        self._named: set[str] = set()

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body, ignored = self._parsed(await request.body(), ChatBody)
        names = TokenNames(self._vocabulary, body.return_tokens_as_token_ids)
        return await self.converse(request, body, ignored, lambda _, reading: ChatWire(body, names, reading))

    async def respond(self, request: Request) -> Response:
        """Answer a conversation, in the newer form, and store the response unless that is not wanted."""
        given, owner, stored = read(await request.body()), request.scope[KEY], self._settings.responses
        before = stored.before(owner, given.get("previous_response_id"))
        chat, body, ignored = self.translated(
            given, ResponseBody, RESPONSES, partial(responses.as_chat, before=before))
        if given.get("store") and not stored.most:
            if self._settings.strict:
                raise refused("store", "store is true, and this server stores no responses; leave it out")
            ignored.append("store")
        storing = stored.most and given.get("store") is not False

        def store(response: Json) -> None:
            stored.store(owner, response, [*before, *responses.items_of(given)])

        def wire(answer: Answer, reading: Reading) -> Wire:
            how = answer.entries[0].seq.sampling
            told = {**chat, "temperature": how.temperature, "top_p": how.top_p}
            return ResponseWire(told, reading, given, store if storing else None)

        return await self.converse(request, body, ignored, wire)

    async def message(self, request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        _, body, ignored = self.translated(read(await request.body()), MessageBody, MESSAGES, messages.as_chat)

        def wire(answer: Answer, reading: Reading) -> Wire:
            return MessageWire(body.model, reading, answer.entries[0].seq)

        return await self.converse(request, body, ignored, wire)

    async def count(self, request: Request) -> Response:
        """The number of tokens of such a conversation."""
        _, body, ignored = self.translated(read(await request.body()), MessageBody, MESSAGES, messages.as_chat)
        self._check(body, 1)
        ids, *_, more = await self._prompt(body, look=False)
        return self._noted(JSONResponse({"input_tokens": len(ids)}), [*ignored, *more])

    def _parsed(self, raw: bytes, kind: type[Asked]) -> tuple[Asked, list[str]]:
        """A request's checked values, and the names of what has no effect."""
        return parse(with_model(read(raw), self._settings.model_name), kind, self._settings.strict)

    @overload
    def translated(
        self, given: Json, form: type[BaseModel], unread: Mapping[str, Unread], translate: Callable[[Json], Json],
    ) -> tuple[Json, ChatBody, list[str]]: ...

    @overload
    def translated(
        self, given: Json, form: type[BaseModel], unread: Mapping[str, Unread], translate: Callable[[Json], Json],
        kind: type[Asked],
    ) -> tuple[Json, Asked, list[str]]: ...

    def translated(
        self, given: Json, form: type[BaseModel], unread: Mapping[str, Unread], translate: Callable[[Json], Json],
        kind: type[Body] = ChatBody,
    ) -> tuple[Json, Body, list[str]]:
        """A request in another form as a chat, as it was translated and as it was checked, and what has no effect."""
        known = {*Extras.model_fields, *form.model_fields}
        kept, ignored = sorted_out(with_model(given, self._settings.model_name), known, unread, self._settings.strict)
        ignored += [name for name in _UNSHOWN if kept.pop(name, None)]
        chat = translate(kept)
        body = validated(chat, kind)
        body.check()
        if body.n > 1:
            raise refused("n_cmpl", f"n_cmpl is {body.n}; this route gives one answer")
        return chat, body, ignored

    async def _prompt(
        self, body: ChatBody, look: bool = True
    ) -> tuple[list[int], Pictures | None, Tools | None, list[str]]:
        """The token ids of a conversation, what it shows, tools that may be called, and names of what has no effect."""
        tools, more = body.tools_for(getattr(self._tokenizer, "chat_template", None), self._settings.strict)
        told, ignored = conversation(body.messages, self._tokenizer, self._settings.strict)
        options = body.variables(tools, told)
        ids, pictures = await read_chat(self._scheduler.engine, told, options, self._settings, look=look)
        return ids, pictures, tools, [*ignored, *more]

    async def converse(
        self, request: Request, body: ChatBody, ignored: Sequence[str], wire: Callable[[Answer, Reading], Wire]
    ) -> Response:
        """Answer a conversation in a form."""
        limit = body.limit(self._settings.default_max_tokens, self._settings.max_tokens)
        ids, pictures, tools, more = await self._prompt(body)
        self._check(body, 1)
        reading = Reading(tools, thoughts_of(self._tokenizer, ids, body.thoughts_shown))
        answer = await self._start(request, body, [ids], limit, reading, body.thoughts_limit, pictures)
        return self._noted(await self._answer(request, body, answer, wire(answer, reading)), [*ignored, *more])

    def _noted(self, answer: Response, ignored: Sequence[str]) -> Response:
        """The response, with the names of fields without effect in a header; each name is logged once."""
        answer.headers.update(named(ignored))
        for name in set(ignored) - self._named:
            if len(self._named) < _MOST_TOLD:
                self._named.add(name)
                LOG.info(json.dumps({"event": "ignored", "field": name}))
        return answer

    async def complete(self, request: Request) -> Response:
        """Continue prompts."""
        body, ignored = self._parsed(await request.body(), CompletionBody)
        prompts = self._prompts(body)
        limit = body.limit(_COMPLETION_TOKENS, self._settings.max_tokens)
        self._check(body, len(prompts))
        echoes = await asyncio.to_thread(self._echoes, prompts, body)
        wire = CompletionWire(body, TokenNames(self._vocabulary, body.return_tokens_as_token_ids), echoes)
        if limit == 0:
            return self._noted(await self._unanswered(request, body, prompts, wire), ignored)
        answer = await self._start(request, body, prompts, limit)
        return self._noted(await self._answer(request, body, answer, wire), ignored)

    async def fill(self, request: Request) -> Response:
        """Fill the gap between two texts, in llama.cpp's form."""
        body, ignored = self._parsed(await request.body(), InfillBody)
        return await self.go_on(request, body, ignored, lambda answer: InfillWire(body.model, answer.entries[0].seq))

    async def go_on(
        self, request: Request, body: CompletionBody, ignored: Sequence[str], wire: Callable[[Answer], Wire]
    ) -> Response:
        """Continue one prompt in a form, up to the length of a chat's answer."""
        prompts = self._prompts(body)
        self._check(body, len(prompts))
        limit = body.limit(self._settings.default_max_tokens, self._settings.max_tokens)
        if limit < 1:
            raise refused("max_tokens", "a limit of 0 tokens leaves no answer; -1 is no limit")
        answer = await self._start(request, body, prompts, limit)
        return self._noted(await self._answer(request, body, answer, wire(answer)), ignored)

    def _prompts(self, body: CompletionBody) -> list[Any]:
        """The prompts of a completion; those for a gap end at tokens that would begin another file, too."""
        prompts = prompts_of(body.prompt)
        if not isinstance(body, InfillBody) and not body.suffix:
            return prompts
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise refused("prompt", "with a suffix, prompt must be text")
        gap = Gap(self._tokenizer)
        body.stop_token_ids = [*body.stop_token_ids, *gap.ends]
        if isinstance(body, InfillBody):
            return [gap.prompt(body.input_prefix + body.prompt, body.input_suffix, body.input_extra)]
        return [gap.prompt(prompt, body.suffix) for prompt in prompts]

    def _echoes(self, prompts: Sequence[Any], body: CompletionBody) -> list[Echo]:
        """The echoed prompt of each choice."""
        if not body.echo:
            return [Echo()] * (len(prompts) * body.n)
        if self._scheduler.engine.encoder is not None:
            raise refused("echo", "echo is true, and the prompt is read by the model's encoder, whose tokens have no "
                                  "log-probabilities; leave it out")
        try:
            engine = self._scheduler.engine
            adapter = engine.fitted_adapter(self._settings.adapter_of(body.model))
            found = [echo_of(engine, prompt, body.alternatives, self._vocabulary, adapter) for prompt in prompts]
        except ValueError as error:
            raise refused("prompt", str(error)) from None
        return [echo for echo in found for _ in range(body.n)]

    async def _unanswered(
        self, request: Request, body: CompletionBody, prompts: Sequence[Any], wire: CompletionWire
    ) -> Response:
        """The response to `max_tokens` 0: the prompts' own tokens."""
        if body.metrics or body.steps:
            raise refused("max_tokens", "max_tokens is 0, so there are no tokens for metrics or steps")
        policy.choose(body.method, body.method_args, self._settings)
        runner = self._scheduler.engine.runner
        try:
            read = sum(len(prompt_ids(one, self._tokenizer, runner.vocab_size, None)) for one in prompts)
        except ValueError as error:
            raise refused("prompt", str(error)) from None
        usage = {"prompt_tokens": read, "completion_tokens": 0, "total_tokens": read}
        note(request.scope, choices=len(prompts) * body.n, user=body.user, **usage)
        choices = [wire.unanswered(index) for index in range(len(prompts) * body.n)]
        if body.stream:
            return _streaming([wire.chunks(choices), wire.closing([], usage, {})], wire)
        return JSONResponse(wire.answer(choices, usage))

    async def _start(
        self, request: Request, body: Body, prompts: Sequence[Any], limit: int, reading: Reading = _PLAIN,
        thoughts_limit: int | None = None, pictures: Pictures | None = None,
    ) -> Answer:
        """Queue a request."""
        method = policy.choose(body.method, body.method_args, self._settings)
        note(request.scope, decoding=method.name, user=body.user, choices=len(prompts) * body.answers)
        if self._settings.log_prompts:
            note(request.scope, prompts=list(prompts))
        wanted = 0 if body.alternatives is None and body.answers > body.n else body.alternatives
        options = {**body.options(self._scheduler.engine.sampling), "method": method, "max_new_tokens": limit,
                   "logprobs": wanted, "adapter": self._settings.adapter_of(body.model), "source": pictures}
        tools, thoughts = reading.tools, reading.thoughts
        bound = options["constraint"] if tools is None or tools.constraint is None else tools.constraint
        if self._settings.members_folder and isinstance(bound, Monitor):  # requests name none but that of members
            bound = python_members(self._settings.members_folder)
        if thoughts is not None and thoughts_limit is not None:
            options["logits_processor"] = [ThoughtLimit(thoughts, self._tokenizer, len(prompts[0]), thoughts_limit)]
        options["constraint"] = bound if thoughts is None else thoughts.before(bound)
        await self._compiling(options["constraint"])
        answer = Answer(self._scheduler, body.answers, self._settings.timeout, self._settings.max_n, body.canvas,
                        thoughts)
        await answer.start(prompts, options)
        seq = answer.entries[0].seq
        note(request.scope, seed=seq.seed, sampling=seq.sampling.shown())
        return answer

    def _check(self, body: Body, prompts: int) -> None:
        if body.model not in self._settings.names:
            raise no_model(body.model, *self._settings.names)
        if prompts * body.answers > self._settings.max_n:
            asked = f"{prompts} prompts with n={body.answers} answers each"
            raise refused("n", f"{asked}; this server allows {self._settings.max_n} in all")

    async def _answer(self, request: Request, body: Body, answer: Answer, wire: Wire) -> Response:
        if body.stream:
            return _streaming(self._events(request, body, answer, wire), wire)
        try:
            await unless_left(request, _drain(answer))
        finally:
            self._account(request, answer)
        best = answer.best(body.n)
        shown = [answer.results[place] for place in best]
        if body.alternatives is None:
            shown = [replace(result, logprobs=None) for result in shown]
        whole = wire.whole(shown, answer.usage)
        if body.steps:
            pairs = zip(whole["choices"], [answer.entries[place] for place in best], strict=True)
            whole["choices"] = [with_steps(choice, entry.seq.steps) for choice, entry in pairs]
        return JSONResponse({**whole, **_metrics(body, answer)})

    async def _events(self, request: Request, body: Body, answer: Answer, wire: Wire) -> AsyncIterator[str]:
        try:
            if told := wire.opening(len(answer.entries)):
                yield told
            each = body.include_usage and body.stream_options.get("continuous_usage_stats")  # as in vLLM
            async for came in answer.items():
                if told := wire.events(came, answer.usage if each else None):
                    yield told  # one piece, since each has to pass all middleware
            yield wire.closing(answer.results, answer.usage, _metrics(body, answer))
        except Exception as error:
            yield wire.error(error if isinstance(error, ApiError) else failed("a stream", error))
        finally:
            answer.cancel()
            self._account(request, answer)

    def _account(self, request: Request, answer: Answer) -> None:
        results = answer.results
        for entry, result in zip(answer.entries, results, strict=True):
            self._metrics.finished(entry, result)
        usage = answer.usage
        layers = sum(result.stats.layer_tokens for result in results)
        note(request.scope, prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"],
             finish=[result.finish_reason for result in results],
             mean_layers=round(layers / max(1, usage["completion_tokens"]), 2), **extra_counts(results),
             queue_seconds=round(max(entry.queue_seconds for entry in answer.entries), 4))
        if self._settings.log_prompts:
            note(request.scope, texts=[result.text for result in results])


def _streaming(events: AsyncIterator[str] | Sequence[str], wire: Wire) -> StreamingResponse:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type=wire.media, headers=headers)


def _metrics(body: Body, answer: Answer) -> dict[str, Any]:
    return {"metrics": report(answer.entries, answer.results)} if body.metrics else {}


async def _drain(answer: Answer) -> None:
    async for _ in answer.items():
        pass
