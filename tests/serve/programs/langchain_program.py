"""From the documentation of langchain-openai: calls, streams, tools, and structured output by each of its ways."""

import json
from functools import reduce
from operator import add

from family import Family, multiply, text
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

llm = ChatOpenAI(model="local", temperature=0, max_tokens=200, max_retries=0)
translated = llm.invoke([
    ("system", "You are a helpful assistant that translates English to French. Translate the user sentence."),
    ("human", "I love programming."),
])


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: str = Field(..., description="The city and state, e.g. San Francisco, CA")


families = [llm.with_structured_output(Family, method=method).invoke(text).model_dump()
            for method in ("json_schema", "function_calling")]
both = llm.bind_tools([GetWeather], response_format=Family, strict=True)
messages = [HumanMessage("What is 1234 times 5678?")]
messages.append(llm.bind_tools([multiply]).invoke(messages))
messages += [multiply.invoke(call) for call in messages[-1].tool_calls]
newer = ChatOpenAI(model="local", temperature=0, use_responses_api=True)
print(json.dumps({
    "translated": translated.content, "streamed": "".join(chunk.content for chunk in llm.stream("Say hello")),
    "said": llm.invoke("Say hello").content, "families": families,
    "weather": [bound.invoke("what is the weather like in San Francisco").tool_calls[0]["args"]["location"]
                for bound in (llm.bind_tools([GetWeather]), llm.bind_tools([GetWeather], tool_choice="any"), both)],
    "product": messages[-1].content,
    "answered": llm.bind_tools([multiply], tool_choice="none").invoke(messages).content,
    "streamed_call": reduce(add, llm.bind_tools([multiply]).stream("What is 3 times 4?")).tool_calls[0]["args"],
    "newer_call": newer.bind_tools([multiply]).invoke("What is 3 times 4?").tool_calls[0]["args"],
    "completed": OpenAI(model="local", temperature=0, max_tokens=4).invoke("1, 2, 3,"),
}))
