"""Chat templates are code that came with a model: they are compiled and run in a process with limits.

Transformers keeps them from files and from Python's own objects, and lets them take any time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.sandbox.helper import Helpers, OverLimit

SECONDS, MEMORY = 3, 256 << 20
"""Of computing time, and bytes beyond those of Python and transformers."""
LONGEST, TIMES = 1 << 20, 8
"""Characters that a template may write of its own, and so many for each that it was given."""
_REFUSED = "the model's chat template refuses these messages: "
_SAID = 300
"""Characters of a template's own error that are told."""
_helpers = Helpers("shoal.sandbox.template_process", SECONDS, MEMORY)


class TakesTooMuch(ValueError):
    """A template takes more than there is for it: another try would do so too."""


def begin() -> None:
    """Have the process ready for the first conversation; it starts while a model is loaded."""
    _helpers.begin()


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """The text of a conversation by a tokenizer's chat template.

    Args:
        tokenizer: has a chat template.
        messages: the conversation.
        **options: `add_generation_prompt`, `continue_final_message`, `tools` and `documents` as transformers'
            `apply_chat_template` has them, and the template's own variables.

    Raises:
        ValueError: the template refuses that; TakesTooMuch where it takes more time or memory than there is for it, or
            writes too much.
    """
    from transformers import PreTrainedTokenizerBase

    library = PreTrainedTokenizerBase.apply_chat_template
    try:
        if getattr(type(tokenizer), "apply_chat_template", None) is not library:  # code of the tokenizer, not the model
            return str(tokenizer.apply_chat_template(messages, **options, tokenize=False))
        template = tokenizer.get_chat_template(None, options.get("tools"))
        spoken = [{key: value for key, value in message.items() if value is not None} for message in messages]
        text: str = _helpers.ask([template, spoken, {**tokenizer.special_tokens_map, **options}])
    except OverLimit as error:
        raise TakesTooMuch(_REFUSED + str(error)) from None
    except Exception as error:  # templates raise what they like, mostly about the order of roles
        raise ValueError(_REFUSED + reason(error)) from None
    return text


def reason(error: BaseException) -> str:
    """What an error of a template says, in one line that can be shown; its kind where it says nothing."""
    said = "".join(letter if letter.isprintable() else " " for letter in str(error)[: 1 << 10])
    said = " ".join(said.split())
    return (said if len(said) <= _SAID else f"{said[:_SAID]} ...") or f"{type(error).__name__}, without a reason"

