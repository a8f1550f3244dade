"""Runs in the process that renders chat templates. Transformers renders them; this bounds the length of the text."""

from __future__ import annotations

import json
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from shoal.sandbox.helper import NoAnswer, OverLimit
from shoal.sandbox.template import LONGEST, TIMES, reason


def answer(question: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> str:
    """The text of a conversation; the question is the template, the messages, and the template's variables."""
    template, messages, given = question
    most = LONGEST + TIMES * len(json.dumps([messages, given]))
    try:
        made = render_jinja_template(**{**given, "conversations": [messages], "chat_template": template})
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # templates raise anything, mostly about the order of roles
        raise NoAnswer(reason(error)) from None
    text = str(made[0][0])
    if len(text) > most:
        raise OverLimit(f"it writes {len(text)} characters, and may write {most} here")
    return text
