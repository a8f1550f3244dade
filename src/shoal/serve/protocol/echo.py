"""How likely a prompt's own tokens are, for completions that echo it with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.decode import sampling
from shoal.decode.text.token_bytes import TokenBytes
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.request import prompt_ids
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk
from shoal.serve.protocol.token_names import prompt_offsets
from shoal.types import TokenLogprob

_PIECE = 64
"""Tokens that are read at a time: whoever decodes waits as long."""


@dataclass(frozen=True)
class Echo:
    """What stands before the text of an answer.

    Attributes:
        text: the prompt, where it is to be echoed.
        scored: the log-probabilities of its tokens; nothing where they are not wanted.
        offsets: where each of them begins in the text.
    """

    text: str = ""
    scored: Sequence[TokenLogprob] = ()
    offsets: Sequence[int] = ()


def echo_of(engine: Engine, prompt: str | list[int], top: int | None, words: TokenBytes | None) -> Echo:
    """The echo of a prompt.

    Args:
        engine: the model.
        prompt: text or token ids.
        top: alternatives for each of its tokens; None for no log-probabilities.
        words: the bytes of tokens.

    Raises:
        ValueError: it is empty, beyond the context, or ids without a text.
    """
    stack, most = engine.stack, engine.stack.max_positions
    ids = prompt_ids(prompt, engine.tokenizer, stack.vocab_size, None if most is None else most + 1)
    if words is None:
        raise ValueError("the prompt cannot be echoed: the model has no tokenizer, so tokens have no text")
    decode = words.tokenizer.decode
    text = prompt if isinstance(prompt, str) else str(decode(prompt, clean_up_tokenization_spaces=False))
    if top is None:
        return Echo(text)
    offsets = [min(offset, len(text)) for offset in prompt_offsets(prompt, ids, words)]
    return Echo(text, prompt_logprobs(engine, ids, top), offsets)


@torch.no_grad()
def prompt_logprobs(engine: Engine, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of each token of a prompt, by all layers and without a request's sampling; the first, which follows none, has 0.

    The prompt is read a second time for it, in turns with what the scheduler does.

    Args:
        engine: the model.
        ids: of the prompt; at least one.
        top: alternatives for each.
    """
    stack, found = engine.stack, [TokenLogprob(ids[0], 0.0)]
    cache, plan = KVCache(stack.windows, 1), DepthPlan.full(stack.num_layers)
    size = min(_PIECE, stack.prefill_chunk)
    for first in range(0, len(ids) - 1, size):
        tokens = ids[first : first + size]
        chunk = SequenceChunk(0, tokens, [0] * len(tokens), plan, wanted=len(tokens))
        with engine.turn():
            logits = stack.forward([chunk], cache)
            cache.commit(0, range(len(tokens)))
        following = ids[first + 1 : first + 1 + len(tokens)]
        found += [sampling.logprob(scores, token, top) for scores, token in zip(logits, following, strict=False)]
    return found
