"""A chat: turns through the tokenizer's template, with the KV of earlier turns kept.

What a lossy answer left shallow is run again at full depth with the next turn (the refill rule): the cache is cut at
the first position that skipped anything, so a turn always starts from what a fresh prefill would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import Unpack, override

from shoal.decode.prefixes import common
from shoal.decode.running_sequence import RunningSequence
from shoal.engine.chats import read_chat
from shoal.engine.loaded import LoadedModel
from shoal.engine.messages import Message
from shoal.engine.request import Options, Request, prompt_ids
from shoal.engine.scheduling.stream import Stream
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.layers.pictures import keys_of
from shoal.types import Result, Step


class Session:
    """A chat, made by `Engine.session`.

    Attributes:
        messages: the conversation so far, as chat templates take it.
        tools: functions that the template offers to the model, in OpenAI's form. What an answer calls is text here.
    """

    def __init__(self, engine: LoadedModel, *, system: str | None = None, **options: Unpack[Options]) -> None:
        if engine.family == "whisper":
            raise Unsupported(f"a chat with {engine.model_name or 'this model'}", "it hears speech",
                              "Use `shoal transcribe`, or shoal.speech.transcribe.Transcriber(engine)")
        if engine.encoder is not None:
            raise Unsupported(f"a chat with {engine.model_name or 'this model'}", "its encoder reads one source",
                              "Use engine.generate with the text, or `shoal generate`")
        if not getattr(engine.tokenizer, "chat_template", None):
            raise Unsupported(f"a chat with {engine.model_name or 'this model'}", "its tokenizer has no chat template",
                              "Use engine.generate with a prompt of your own, or set tokenizer.chat_template")
        self._engine, self._options = engine, dict(options)
        Request.from_options(self._options)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.tools: list[Message] = []
        self._cache = engine.runner.new_cache(1)
        self._cached: list[int] = []
        self._last: Turn | None = None

    def send(self, message: str, **options: Unpack[Options]) -> Result:
        """The answer to `message`; `options` override the session's for this turn."""
        turn = self.stream(message, **options)
        for _ in turn:
            pass
        return turn.result

    def stream(self, message: str | Sequence[Message], **options: Unpack[Options]) -> Turn:
        """The answer step by step to a text, or to messages, such as the results of tools.

        A turn that is left early keeps what it has said once it is closed, at the latest by the next turn. One that
        fails, or has said nothing, leaves no trace.
        """
        request = Request.from_options({**self._options, **options})
        if self._last is not None:
            self._last.close()
        said = [{"role": "user", "content": message}] if isinstance(message, str) else message
        messages, offered = [*self.messages, *said], dict[str, Any](tools=self.tools) if self.tools else {}
        tokenizer, runner = self._engine.tokenizer, self._engine.runner
        told, pictures = read_chat(self._engine, messages, **offered)
        ids = prompt_ids(told, tokenizer, runner.vocab_size, runner.max_positions)
        seqs = self._engine.seqs([ids], request if pictures is None else replace(request, source=pictures))
        # The cache keeps what the ids begin with, less what is shallow. The last token is always run.
        known = common(self._cached, keys_of(ids, seqs[0].source))
        del self._cached[self._cache.truncate(0, min(known, len(ids) - 1)) :]
        self._last = Turn(self, messages, self._engine, seqs, self._cache)
        return self._last

    def keep(self, messages: list[Message], answer: str, tokens: Sequence[int]) -> None:
        """Take over a turn: the conversation, and the tokens that the cache now holds."""
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._cached = list(keys_of(tokens, self._cache.encoded[0])[: self._cache.positions[0]])


class Turn(Stream):
    """One answer of a session, step by step."""

    def __init__(
        self, session: Session, messages: list[Message], engine: LoadedModel, seqs: list[RunningSequence],
        cache: KVCache,
    ) -> None:
        super().__init__(engine, seqs, cache, release=False)
        self._session, self._messages, self._over = session, messages, False

    def __next__(self) -> Step:
        try:
            return super().__next__()
        except StopIteration:
            self._keep()
            raise
        except BaseException:
            self._over = True
            raise

    @override
    def close(self) -> None:
        super().close()
        self._keep()

    def _keep(self) -> None:
        """Let the session take over what was said, once."""
        if not self._over and self.result.tokens:
            self._session.keep(self._messages, self.result.text, self.tokens)
        self._over = True
