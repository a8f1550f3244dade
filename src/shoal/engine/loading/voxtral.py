"""Voxtral's tokenizer, whose files (`tekken.json`) name neither its ends nor a chat template."""

from __future__ import annotations

from typing import Any

from shoal.errors import Unsupported

TEKKEN = "tekken.json"
_TEMPLATE = (
    "{{ bos_token }}{% set seen = namespace(audio=false) %}"
    "{% for message in messages %}{% if message['content'] is not string %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}{% set seen.audio = true %}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% if seen.audio %}{{ raise_exception('a system message beside audio') }}{% endif %}[SYSTEM_PROMPT]"
    "{% elif message['role'] == 'user' %}[INST]"
    "{% elif message['role'] != 'assistant' %}{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}[BEGIN_AUDIO][AUDIO]{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'system' %}[/SYSTEM_PROMPT]{% elif message['role'] == 'user' %}[/INST]"
    "{% else %}{{ eos_token }}{% endif %}{% endfor %}")
"""As mistral-common's version 7 lays out conversations, which knows no system message beside a sound."""


def voxtral_tokenizer(place: str, revision: str | None) -> Any:
    """The tokenizer of a folder or Hub id, by transformers alone.

    Raises:
        OSError: there is none.
        Unsupported: transformers reads its vocabulary alone.
    """
    from transformers import PreTrainedTokenizerFast, __version__

    found = PreTrainedTokenizerFast.from_pretrained(place, revision=revision or "main")
    if found.backend_tokenizer.pre_tokenizer is None:
        raise Unsupported(f"{TEKKEN} with transformers {__version__}", "that reads nothing of it but the vocabulary",
                          "Update transformers")
    for name, token in (("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>")):
        if getattr(found, name) is None and token in found.get_vocab():
            setattr(found, name, token)
    found.chat_template = found.chat_template or _TEMPLATE
    return found
