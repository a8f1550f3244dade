"""Renders chat templates, which are code that came with a model, in a process with limits.

Transformers keeps templates from files and from Python's internals, but bounds neither their time nor their memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from shoal.sandbox.helper import Helpers, NoAnswer, OverLimit

SECONDS, MEMORY = 3, 256 << 20
"""CPU time, and bytes beyond those of Python and transformers."""
LONGEST, TIMES = 1 << 20, 8
"""A template may write `LONGEST` characters, and `TIMES` more for each character of its input."""
_REFUSED = "the model's chat template refuses these messages: "
_SAID = 300
"""Most characters shown of a template's own error."""
_helpers = Helpers("shoal.sandbox.template", SECONDS, MEMORY)


class TakesTooMuch(ValueError):
    """A template exceeded a limit, and would again."""


def begin() -> None:
    """Start the process, so that it is ready once the model is loaded."""
    _helpers.begin()


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """The text of a conversation, rendered by the tokenizer's chat template.

    Args:
        **options: `add_generation_prompt`, `continue_final_message`, `tools` and `documents` as in transformers'
            `apply_chat_template`, and the template's own variables.

    Raises:
        TakesTooMuch: the template takes too much time or memory, or writes too much.
        ValueError: the template refuses the messages.
    """
    from transformers import PreTrainedTokenizerBase

    library = PreTrainedTokenizerBase.apply_chat_template
    try:
        if getattr(type(tokenizer), "apply_chat_template", None) is not library:  # the tokenizer's own code is trusted
            return str(tokenizer.apply_chat_template(messages, **options, tokenize=False))
        template = tokenizer.get_chat_template(None, options.get("tools"))
        spoken = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return str(_helpers.ask([template, spoken, {**tokenizer.special_tokens_map, **options}]))
    except OverLimit as error:
        raise TakesTooMuch(_REFUSED + str(error)) from None
    except Exception as error:  # templates raise anything, mostly about the order of roles
        raise ValueError(_REFUSED + _reason(error)) from None


def answer(question: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> str:
    """In the process: the text for a template, messages, and the template's variables."""
    template, messages, given = question
    most = LONGEST + TIMES * len(json.dumps([messages, given]))
    try:
        made = render_jinja_template(**{**given, "conversations": [messages], "chat_template": template})
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise NoAnswer(_reason(error)) from None
    text = str(made[0][0])
    if len(text) > most:
        raise OverLimit(f"it writes {len(text)} characters, and may write {most} here")
    return text


def _reason(error: BaseException) -> str:
    """A template's error in one printable line; the error's type if it has no message."""
    said = "".join(letter if letter.isprintable() else " " for letter in str(error)[: 1 << 10])
    said = " ".join(said.split())
    return (said if len(said) <= _SAID else f"{said[:_SAID]} ...") or f"{type(error).__name__}, without a reason"
