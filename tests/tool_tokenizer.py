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
