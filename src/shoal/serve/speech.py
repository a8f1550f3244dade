"""The routes for speech, as of OpenAI's API: a form with a file, and what is said in it as text, JSON or events.

https://platform.openai.com/docs/api-reference/audio
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from threading import Event
from typing import Any, BinaryIO, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from typing_extensions import Self

from shoal.audio import RATE, Audio
from shoal.engine.engine import Engine
from shoal.errors import pip_install
from shoal.serve import policy
from shoal.serve.errors import ApiError, failed, no_model, refused
from shoal.serve.middleware import note, unless_left
from shoal.serve.protocol.bodies import validated
from shoal.serve.protocol.fields import Ignored, Refused, Unread, named, sorted_out
from shoal.serve.settings import Settings
from shoal.speech import subtitles
from shoal.speech.transcribe import FALLBACK, Segment, Transcriber, Transcript, Wish

MODEL = "shoal.model"
"""Where a request's scope has the name of the model that it was handed to."""
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
_FORMS = {"text": "text/plain; charset=utf-8", "srt": "application/x-subrip", "vtt": "text/vtt; charset=utf-8"}


class SpeechBody(BaseModel):
    """A form of `/v1/audio/transcriptions` and `/v1/audio/translations`, without its file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = Field(default=0.0, ge=0.0, le=1.0)
    timestamp_granularities: list[Literal["segment", "word"]] = Field(default_factory=list)
    stream: bool = False
    method: str | list[Any] | None = None
    method_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _shows_times(self) -> Self:
        if "word" in self.timestamp_granularities and (self.response_format != "verbose_json" or self.stream):
            raise ValueError("timestamp_granularities asks for words; they are in response_format \"verbose_json\" "
                             "alone, without stream")
        return self


_UNREAD: Mapping[str, Unread] = {
    "include": Refused("log-probabilities of transcripts are not returned", ([],)),
    "chunking_strategy": Ignored("windows are cut where sentences end", ("auto",)),
    "known_speaker_names": Refused("speakers are not told apart", ([],)),
    "known_speaker_references": Refused("speakers are not told apart", ([],)),
}


@dataclass(frozen=True)
class _Wanted:
    """A request: its fields, its file, and the names of what has no effect."""

    body: SpeechBody
    file: UploadFile
    ignored: list[str]


async def form_of(request: Request) -> FormData:
    """The form of a request; ApiError 400 for a body that is none."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "the body must be a form (multipart/form-data) with the audio as its field file")
    try:
        return await request.form(max_files=1, max_fields=64)
    except MultiPartException as error:
        raise ApiError(400, f"the form cannot be read: {error.message}") from None
    except AssertionError:
        raise ApiError(501, "forms cannot be read here, since python-multipart is not installed; the operator can "
                            f"install it with: {pip_install('shoal[speech]')}") from None


class SpeechRoutes:
    """The routes. A request at a time is heard, in turns with the scheduler."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings, self._turn = engine, settings, asyncio.Lock()

    async def transcribe(self, request: Request) -> Response:
        """Write down what is said."""
        return await self._answer(request, "transcribe")

    async def translate(self, request: Request) -> Response:
        """Write down in English what is said."""
        return await self._answer(request, "translate")

    async def _answer(self, request: Request, task: str) -> Response:
        form = await form_of(request)
        try:
            asked = self._asked(request, form)
            heard = self._begun(asked, task)
        except ApiError:
            await form.close()
            raise
        if asked.body.stream:
            return StreamingResponse(self._events(request, heard), media_type="text/event-stream",
                                     headers=named(asked.ignored))
        segments = list[Segment]()
        await unless_left(request, self._hear(request, heard, segments.append))
        return self._written(asked.body, segments, heard, named(asked.ignored))

    def _begun(self, asked: _Wanted, task: str) -> _Sound:
        """The file and how it is to be heard; ApiError 400 for what the model does not do."""
        body, hot = asked.body, asked.body.temperature
        wish = Wish(None if task == "translate" else body.language, task, prompt=body.prompt,
                    temperatures=(hot,) if hot else FALLBACK, word_times="word" in body.timestamp_granularities,
                    method=policy.choose(body.method, body.method_args, self._settings))
        try:
            self._transcriber.check(wish)
        except ValueError as error:
            raise refused("language" if body.language else "model", str(error)) from None
        try:
            self._engine.recipe(wish.method, 1)
        except ValueError as error:
            raise refused("method", str(error)) from None
        return _Sound(self._transcriber, asked.file.file, asked.file.filename or "the file", wish, self._settings)

    def _asked(self, request: Request, form: FormData) -> _Wanted:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise refused("file", "the form has no file; its field file must be the audio")
        given = dict[str, Any]()
        for key in {key for key in form if key != "file"}:
            name = key.removesuffix("[]")
            values = form.getlist(key)
            given[name] = values if name in _LISTS else values[-1]
        kept, ignored = sorted_out(_read(given), {*SpeechBody.model_fields}, _UNREAD, self._settings.strict)
        body = validated(kept, SpeechBody)
        if MODEL not in request.scope and body.model and body.model not in self._settings.names:
            raise no_model(body.model, *self._settings.names)
        return _Wanted(body, file, ignored)

    @cached_property
    def _transcriber(self) -> Transcriber:
        try:
            return Transcriber(self._engine)
        except ValueError as error:
            raise refused("model", str(error)) from None

    async def _hear(self, request: Request, heard: _Sound, put: Callable[[Segment], object]) -> None:
        """Hear a file in its turn, in a thread which hands over the segments, and stops if nobody waits for them.

        Raises:
            ApiError: 400 where the file is no audio, 504 beyond the server's time.
        """
        try:
            async with self._turn:
                await asyncio.to_thread(heard.hand_over, put)
        finally:
            heard.leave()
            note(request.scope, audio_seconds=round(heard.seconds, 3))

    def _written(
        self, body: SpeechBody, segments: list[Segment], heard: _Sound, headers: Mapping[str, str]
    ) -> Response:
        form, language = body.response_format, heard.language
        if form in subtitles.CUES:
            return Response(subtitles.CUES[form](segments), media_type=_FORMS[form], headers={**headers})
        if form == "text":
            return PlainTextResponse(subtitles.text(segments) + "\n", headers={**headers})
        if form == "verbose_json":
            parts = body.timestamp_granularities or ("segment",)
            found = subtitles.report(segments, language, heard.seconds, heard.wish.task, parts)
            return JSONResponse({**found, "usage": heard.usage}, headers={**headers})
        return JSONResponse({"text": subtitles.text(segments), "usage": heard.usage}, headers={**headers})

    async def _events(self, request: Request, heard: _Sound) -> AsyncIterator[str]:
        """The segments as events, each as soon as it is heard."""
        said, come, loop = list[Segment](), asyncio.Queue[Segment | None](), asyncio.get_running_loop()
        work = asyncio.ensure_future(
            self._hear(request, heard, lambda one: loop.call_soon_threadsafe(come.put_nowait, one)))
        work.add_done_callback(lambda _: come.put_nowait(None))
        try:
            while (one := await come.get()) is not None:
                said.append(one)
                yield _event({"type": "transcript.text.delta", "delta": one.text if said[1:] else one.text.lstrip()})
            await work
            yield _event({"type": "transcript.text.done", "text": subtitles.text(said), "usage": heard.usage})
        except ApiError as error:
            yield error.event(request.url.path).decode()
        except Exception as error:
            yield failed("a transcript", error).event(request.url.path).decode()
        finally:
            work.cancel()


class _Sound:
    """A file that is heard for a request, and closed afterwards."""

    def __init__(
        self, transcriber: Transcriber, file: BinaryIO, name: str, wish: Wish, settings: Settings
    ) -> None:
        self._transcriber, self._file, self._name, self.wish = transcriber, file, name, wish
        self._settings, self._left, self._begun = settings, Event(), False
        self._until = None if settings.timeout is None else time.monotonic() + settings.timeout
        self._course: Transcript | None = None

    @property
    def seconds(self) -> float:
        """How much was heard so far."""
        return 0.0 if self._course is None else self._course.heard / RATE

    @property
    def language(self) -> str:
        """The language that is spoken, by its code."""
        return (None if self._course is None else self._course.language) or "en"

    @property
    def usage(self) -> dict[str, Any]:
        """What OpenAI's API counts."""
        return {"type": "duration", "seconds": round(self.seconds)}

    def leave(self) -> None:
        """Nobody waits for it any more: what hears it ends at the next piece."""
        self._left.set()
        if not self._begun:
            self._file.close()

    def hand_over(self, put: Callable[[Segment], object]) -> None:
        """Hear the file, and call `put` with each segment as soon as its window is heard."""
        self._begun = True
        try:
            with Audio(self._file, f"{self._name!r:.100}", self._settings.max_audio_seconds) as audio:
                self._course = self._transcriber.begin(self._watched(audio), self.wish)
                for one in self._course.segments():
                    put(one)
        except ValueError as error:
            raise refused("file", str(error)) from None
        finally:
            self._file.close()

    def _watched(self, audio: Audio) -> Iterator[Any]:
        """The samples, as long as somebody waits for them and the server allows it."""
        for piece in audio.pieces():
            if self._left.is_set():
                raise ApiError(499, "the client has left")
            if self._until is not None and time.monotonic() > self._until:
                raise ApiError(504, "the request took longer than the server allows", code="timeout")
            yield piece


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    """A form's texts as the values that they stand for; ApiError 400 for one that stands for none."""
    found = dict(given)
    if "temperature" in found:
        try:
            found["temperature"] = float(found["temperature"])
        except (TypeError, ValueError):
            raise refused("temperature", f"temperature is {found['temperature']!r:.100}; it must be a number") from None
    if "stream" in found:
        if found["stream"] not in ("true", "false", "True", "False", "1", "0"):
            raise refused("stream", f"stream is {found['stream']!r:.100}; it must be true or false")
        found["stream"] = found["stream"] in ("true", "True", "1")
    for name in ("method", "method_args"):
        value = found.get(name)
        if value and (name == "method_args" or value.startswith("[")):  # a method alone is its name
            try:
                found[name] = json.loads(value)
            except ValueError:
                raise refused(name, f"{name} is {value!r:.100}; in a form it must be JSON") from None
    return {name: value for name, value in found.items() if value != ""}


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
