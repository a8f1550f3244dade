"""Texts to calibrate on where nobody gives any: what the model itself says to a few prompts of different kinds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shoal.engine.cards.divergence import Text
from shoal.engine.engine import Engine
from shoal.engine.request import chat_ids, prompt_ids

ASKED = (
    "Why do leaves change their colour in autumn?",
    "Write a short letter to a friend about a walk by the sea.",
    "A train leaves at 14:10 and arrives at 16:45. How long does it take? Explain each step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name three ways to save water at home and say which one saves most.",
    "Summarise the story of Noah's ark in four sentences.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: The library opens at nine and closes at six.",
    "Give me a recipe for a simple vegetable soup.",
    "Explain to a child how a rainbow comes about.",
    "Which is larger, 3/4 or 5/7? Show your work.",
    "List five animals that live in the desert.",
    "Write a polite answer to a customer whose parcel is late.",
    "What does the HTTP status code 404 mean, and what should a server send with it?",
    "Describe the city where you would like to live.",
    "How does a bicycle stay upright?",
)
BEGUN = (
    "The old lighthouse had stood on the cliff for more than a hundred years, and",
    "In mathematics, a prime number is a natural number greater than 1 that",
    "The river rises in the mountains in the north of the country and flows",
    "def binary_search(values, target):\n",
    "She opened the door slowly and saw that the room was empty. On the table",
    "The company was founded in 1923 by two brothers who",
    "Photosynthesis is the process by which plants",
    "The first season of the series was broadcast in the autumn of",
)


def asked(engine: Engine, questions: Sequence[str] = ASKED, begun: Sequence[str] = BEGUN) -> list[list[int]]:
    """Token ids of prompts: questions where the tokenizer has a chat template, else beginnings of texts."""
    words, stack = engine.tokenizer, engine.stack
    if getattr(words, "chat_template", None):
        prompts: list[Any] = [chat_ids([{"role": "user", "content": question}], words) for question in questions]
    else:
        prompts = list(begun)
    return [prompt_ids(one, words, stack.vocab_size, stack.max_positions) for one in prompts]


def answered(
    engine: Engine, prompts: Sequence[list[int]], new_tokens: int, seconds: float | None = None, together: int = 8
) -> list[Text]:
    """What the model says to each prompt: greedy where it chats, else drawn with a fixed seed, as bare models go round.

    Args:
        engine: the model.
        prompts: token ids.
        new_tokens: the longest answer.
        seconds: break off then and return what there is, as far as it goes.
        together: prompts decoded at once.
    """
    texts: list[Text] = []
    chats = bool(getattr(engine.tokenizer, "chat_template", None))
    until = None if seconds is None else time.monotonic() + seconds
    for first in range(0, len(prompts), together):
        part = list(prompts[first : first + together])
        answers: list[list[int]] = [[] for _ in part]
        with engine.stream(
            part, max_new_tokens=new_tokens, temperature=0.0 if chats else 1.0, seed=first, method="full"
        ) as stream:
            for step in stream:
                answers[step.row].append(step.token)
                if until is not None and time.monotonic() > until:
                    break
        texts += [(one, answer) for one, answer in zip(part, answers, strict=True) if len(answer) > 1]
        if until is not None and time.monotonic() > until:
            break
    return texts
