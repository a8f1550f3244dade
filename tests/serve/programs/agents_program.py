"""From the documentation of OpenAI's Agents SDK: typed output with tools, a nested tool, and handing over."""

import asyncio
import json

from agents import Agent, ModelSettings, RunContextWrapper, Runner, function_tool, handoff, set_default_openai_api
from agents import set_tracing_disabled as without_tracing
from pydantic import BaseModel
from typing_extensions import TypedDict

without_tracing(True)
settings = ModelSettings(temperature=0, max_tokens=200)
asked: list[object] = []


class Participant(BaseModel):
    name: str


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[Participant]


class Report(BaseModel):
    city: str
    degrees: int


class Location(TypedDict):
    lat: float
    long: float


class Reason(BaseModel):
    text: str


class EscalationData(BaseModel):
    reason: Reason


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "11 degrees"


@function_tool
async def fetch_weather(location: Location) -> str:
    """Fetch the weather for a given location.

    Args:
        location: The location to fetch the weather for.
    """
    asked.append(location)
    return "sunny"


async def on_handoff(ctx: RunContextWrapper[None], input_data: EscalationData) -> None:
    asked.append(input_data.reason.text)


def agent(name: str, instructions: str, **options: object) -> Agent:
    given = {"name": name, "instructions": instructions, "model": "local", "model_settings": settings}
    return Agent(**{**given, **options})


async def main() -> None:
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        asked.clear()
        extractor = agent("Calendar extractor", "Extract calendar events from text", output_type=CalendarEvent)
        event = await Runner.run(extractor, "Alice and Bob go to a science fair on Friday.")
        rules = "Answer with the city and its degrees. If you do not know the degrees, call the tool."
        weather = agent("Weather", rules, tools=[get_weather], output_type=Report)
        report = await Runner.run(weather, "How warm is it in Oslo?", max_turns=4)
        nested = agent("Weather", "Help with the weather.", tools=[fetch_weather],
                       tool_use_behavior="stop_on_first_tool")
        sunny = await Runner.run(nested, "Weather at latitude 59.9, longitude 10.7?")
        escalation = agent("Escalation agent", "Say sorry.")
        forced = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")
        triage = agent("Triage agent", "Hand every complaint over to the escalation agent.", model_settings=forced,
                       handoffs=[handoff(agent=escalation, on_handoff=on_handoff, input_type=EscalationData)])
        handed = await Runner.run(triage, "My order never came! I want to complain.", max_turns=4)
        streamed = Runner.run_streamed(agent("Assistant", "You are a helpful assistant"), "Say hello")
        pieces = [event.data.delta async for event in streamed.stream_events()
                  if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
        print(json.dumps({
            "event": event.final_output.model_dump(), "report": report.final_output.model_dump(),
            "sunny": sunny.final_output, "asked": asked, "last": handed.last_agent.name,
            "streamed": "".join(pieces) == streamed.final_output != "",
        }))


asyncio.run(main())
