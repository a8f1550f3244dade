"""The tokenizer of single characters with a chat template that has a place for tools, in either notation."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from chat_tokenizer import MARKS_FIRST, chat_tokenizer
from families import tiny
from serving import MODEL
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for

ASK = [{"role": "user", "content": "What is the weather?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "tells it", "parameters": {
        "type": "object", "properties": {"day": {"enum": ["today", "soon"]}, "warm": {"type": "boolean"}},
        "required": ["day", "warm"], "additionalProperties": False}},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}

_TOOLS = (
    "{% if tools %}{{ '<|system|>tools: ' }}{% for t in tools %}{{ t.function.name + ' ' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
)
_MESSAGES = (
    "{% for m in messages %}{{ '<|' + (m.role if m.role != 'tool' else 'user') + '|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ OPEN + c.function.name + (c.function.arguments | tojson) + CLOSE }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if mood %}{{ mood }}{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tool_tokenizer(tagged: bool = True) -> PreTrainedTokenizerFast:
    """With `<tool_call>` around calls, or without."""
    words = chat_tokenizer(MARKS_FIRST)
    marks = ("'<tool_call>'", "'</tool_call>'") if tagged else ("''", "''")
    words.chat_template = _TOOLS + _MESSAGES.replace("OPEN", marks[0]).replace("CLOSE", marks[1])
    return words


def speaking(tagged: bool = True) -> Engine:
    """Two random layers with these words, whose answers end."""
    words = tool_tokenizer(tagged)
    engine = engine_for(tiny("llama", layers=2), words, name=MODEL)
    engine.eos_token_ids = frozenset({words.eos_token_id})
    return engine


TAGS = ("<think>", "</think>")
BEGUN = ("{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
         "{% else %}{{ '<think>\n' }}{% endif %}")


def thinking(begun: str = BEGUN, tags: tuple[str, str] = TAGS) -> Engine:
    """Two random layers whose template begins thoughts, or only reads them in earlier answers."""
    tokenizer = tool_tokenizer()
    place = "{{ '<|assistant|>' }}"
    told = "{% if false %}" + "".join(tags) + "{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(place, place + begun) + told
    engine = engine_for(tiny("llama", layers=2), tokenizer, name=MODEL)
    engine.eos_token_ids, engine.sampling = frozenset({tokenizer.eos_token_id}), {"temperature": 0.0}
    return engine
