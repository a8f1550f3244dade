"""The work of a helper's process that renders chat templates: transformers does, and what came of it is measured."""

from __future__ import annotations

import json
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from shoal.sandbox.helper import NoAnswer, OverLimit
from shoal.sandbox.template import LONGEST, TIMES, reason


def answer(question: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> str:
    """The text of a conversation; a question is the template, the messages, and what else the template is given."""
    template, messages, given = question
    most = LONGEST + TIMES * len(json.dumps([messages, given]))
    try:
        made = render_jinja_template(**{**given, "conversations": [messages], "chat_template": template})
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # templates raise what they like, mostly about the order of roles
        raise NoAnswer(reason(error)) from None
    text = str(made[0][0])
    if len(text) > most:
        raise OverLimit(f"it writes {len(text)} characters, and may write {most} here")
    return text
