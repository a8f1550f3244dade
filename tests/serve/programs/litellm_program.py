"""From the documentation of litellm: completions, streams, formats, functions, prefill, and the newer face."""

import json

import litellm
from litellm import completion
from pydantic import BaseModel


class Participant(BaseModel):
    name: str


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[Participant]


TOOLS = [{"type": "function", "function": {
    "name": "get_current_weather", "description": "Get the current weather in a given location",
    "parameters": {"type": "object", "properties": {
        "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["location"]}}}]


def ask(messages: list, **options: object) -> litellm.ModelResponse:
    return completion(model="openai/local", messages=messages, temperature=0, max_tokens=150, **options)


hello = [{"role": "user", "content": "Say hello"}]
fair = [{"role": "system", "content": "Extract the event information."},
        {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."}]
messages = [{"role": "user", "content": "What's the weather like in San Francisco?"}]
called = ask(messages, tools=TOOLS, tool_choice="auto").choices[0].message
messages.append(called)
for call in called.tool_calls:
    messages.append({"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": "72 degrees"})
begun = [{"role": "user", "content": "Who wrote Hamlet?"}, {"role": "assistant", "content": "It was written by"}]
print(json.dumps({
    "said": ask(hello).choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in ask(hello, stream=True)),
    "event": json.loads(ask(fair, response_format=CalendarEvent).choices[0].message.content),
    "called": [call.function.name for call in called.tool_calls],
    "location": json.loads(called.tool_calls[0].function.arguments)["location"],
    "answered": ask(messages, tools=TOOLS, tool_choice="none").choices[0].message.content,
    "required": ask(hello, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0].function.name,
    "begun": ask(begun).choices[0].message.content,
    "newer": litellm.responses(model="openai/local", input="Say hello", temperature=0).output[0].content[0].text,
}))
