"""From the documentation of langchain-anthropic: calls, streams, tools, structured output."""

import json
from functools import reduce
from operator import add

from family import Family, multiply, text
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage

llm = ChatAnthropic(model="local", temperature=0, max_tokens=200, max_retries=0)
messages = [HumanMessage("What is 1234 times 5678?")]
messages.append(llm.bind_tools([multiply]).invoke(messages))
messages += [multiply.invoke(call) for call in messages[-1].tool_calls]
told = [("system", "You are a helpful assistant that translates English to French. Translate the user sentence."),
        ("human", "I love programming.")]
said = llm.invoke("Say hello")
print(json.dumps({
    "translated": llm.invoke(told).content, "said": said.content, "usage": dict(said.usage_metadata),
    "streamed": "".join(chunk.text for chunk in llm.stream("Say hello")),
    "families": [llm.with_structured_output(Family, method=method).invoke(text).model_dump()
                 for method in ("json_schema", "function_calling")],
    "product": messages[-1].content, "answered": llm.bind_tools([multiply]).invoke(messages).text,
    "forced": llm.bind_tools([multiply], tool_choice="multiply").invoke("3 and 4").tool_calls[0]["args"],
    "streamed_call": reduce(add, llm.bind_tools([multiply]).stream("What is 3 times 4?")).tool_calls[0]["args"],
}))
