"""Programs of others use the server unchanged: an agent framework, a chat in the terminal, an evaluation.

Each of them asks a tiny random model, whose answers only a grammar makes sensible, and then, where its file is there,
a published one. They are installed by the extra `clients`; `make test-all` has it. Aider wants other versions of the
same libraries, so it is looked for as a command.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict

import shoal
from real_models import real_model
from serving import MODEL, Running, serving
from tool_tokenizer import speaking

GREEDY: Any = {"temperature": 0, "max_tokens": 200}
FACES = ("OpenAIChatModel", "OpenAIResponsesModel", "AnthropicModel")


class Report(BaseModel):
    """The required form of an answer."""

    model_config = ConfigDict(extra="forbid")

    day: Literal["today", "soon"]
    warm: bool


def needs_client(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test where a program is not installed."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed; pip install 'shoal[clients]'")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking(), method="full") as running:
        yield running


@pytest.fixture(scope="module")
def published() -> Iterator[Running]:
    """A small model that can call tools."""
    with serving(shoal.load(real_model("qwen05")), method="full") as running:
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[Running]:
    """The same model under a name that programs know."""
    with serving(shoal.load(real_model("qwen05")), method="full", model_name="local") as running:
        yield running


def expected(server: Running, text: str, **options: Any) -> str:
    messages = [{"role": "user", "content": text}]
    return server.engine.generate(messages, max_new_tokens=GREEDY["max_tokens"], **options).text


def with_agent(server: Running, use: Any, face: str = "OpenAIChatModel", **options: Any) -> Any:
    """The result of `use(agent)`; closes its connections."""
    from pydantic_ai import Agent

    async def run() -> Any:
        async with agents_model(server, face) as model:
            return await use(Agent(model, model_settings=GREEDY, **options))

    return asyncio.run(run())


@asynccontextmanager
async def agents_model(server: Running, face: str) -> AsyncIterator[Any]:
    """pydantic-ai's model of a name, over OpenAI's or Anthropic's client."""
    from pydantic_ai.models import anthropic as anthropics
    from pydantic_ai.models import openai as openais
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if face == "AnthropicModel":
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as theirs:
            yield anthropics.AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=theirs))
    else:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield getattr(openais, face)(MODEL, provider=OpenAIProvider(openai_client=client))


@needs_client("pydantic_ai")
@pytest.mark.parametrize("face", FACES)
def test_an_agent_chats_and_streams(server: Running, face: str) -> None:
    async def both(agent: Any) -> list[str]:
        async with agent.run_stream("Hello") as run:
            streamed = "".join([piece async for piece in run.stream_text(delta=True)])
        return [(await agent.run("Hello")).output, streamed]

    text = expected(server, "Hello")
    assert len(text) > 1
    assert with_agent(server, both, face) == [text, text]


@needs_client("pydantic_ai")
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_an_agent_gets_what_it_must_have(server: Running, kind: str) -> None:
    import pydantic_ai

    wanted = getattr(pydantic_ai, kind)(Report)
    assert isinstance(with_agent(server, lambda agent: agent.run("Hello"), output_type=wanted).output, Report)


@pytest.mark.slow
@needs_client("pydantic_ai")
def test_an_agent_calls_its_tool_and_goes_on_with_what_that_says(published: Running) -> None:
    asked: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "11 degrees"

    class Place(BaseModel):
        name: str
        degrees: int

    told = {"instructions": "Ask the tool for the weather.", "tools": [weather], "output_type": Place}
    found = with_agent(published, lambda agent: agent.run("How warm is it in Oslo?"), **told).output
    assert asked[0] == "Oslo" and (found.name, found.degrees) == ("Oslo", 11)


class Reading(BaseModel):
    city: str
    degrees: int


class Weather(BaseModel):
    """Nested, so that its schema has references."""

    report: Reading


@pytest.mark.slow
@needs_client("pydantic_ai")
@pytest.mark.parametrize("face", FACES[:2])
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_an_agent_gets_nested_output_with_its_tool(published: Running, kind: str, face: str) -> None:
    import pydantic_ai

    asked: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "11 degrees"

    told = {"instructions": "Answer with the city and its degrees. If you do not know the degrees, call the tool.",
            "tools": [weather], "output_type": getattr(pydantic_ai, kind)(Weather)}
    found = with_agent(published, lambda agent: agent.run("How warm is it in Oslo?"), face, **told).output
    assert asked == ["Oslo"] and found == Weather(report=Reading(city="Oslo", degrees=11))


def program(server: Running, name: str) -> list[Any]:
    """The output of a program from a tool's documentation, which gets the server's address by its environment alone."""
    path = Path(__file__).parent / "programs" / f"{name}_program.py"
    told = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false", "ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none"}
    said = _started([str(path)], told).stdout
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


FAIR = {"name": "Science Fair", "date": "Friday", "participants": [{"name": "Alice"}, {"name": "Bob"}]}


@pytest.mark.slow
@needs_client("agents")
def test_a_program_of_agents(local: Running) -> None:
    for found in program(local, "agents"):
        assert found["event"] == FAIR and found["report"] == {"city": "Oslo", "degrees": 11}
        city, location, reason = found["asked"]
        assert (city, location, found["sunny"]) == ("Oslo", {"lat": 59.9, "long": 10.7}, "sunny")
        assert reason and found["last"] == "Escalation agent" and found["streamed"]


@pytest.mark.slow
@needs_client("langchain_openai")
def test_a_program_of_langchain(local: Running) -> None:
    (found,) = program(local, "langchain")
    assert "programm" in found["translated"] and found["said"] == found["streamed"]
    for family in found["families"]:
        assert family["child"] == {"name": "Cid", "age": 9} and {"name": "Ann", "age": 40} in family["parents"]
    assert all("San Francisco" in place for place in found["weather"])
    assert found["product"] == "7006652" in found["answered"]
    assert found["streamed_call"] == found["newer_call"] == {"a": 3, "b": 4} and "4" in found["completed"]


@pytest.mark.slow
@needs_client("langchain_anthropic")
def test_a_program_of_langchain_over_messages(local: Running) -> None:
    (found,) = program(local, "langchain_anthropic")
    assert "programm" in found["translated"] and found["said"] == found["streamed"]
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"] > 0
    for family in found["families"]:
        assert family["child"] == {"name": "Cid", "age": 9} and {"name": "Ann", "age": 40} in family["parents"]
    assert found["product"] == "7006652" and found["answered"]
    assert found["forced"] == found["streamed_call"] == {"a": 3, "b": 4}


@pytest.mark.slow
@needs_client("litellm")
def test_a_program_of_litellm(local: Running) -> None:
    (found,) = program(local, "litellm")
    assert found["said"] == found["streamed"] == found["newer"] and found["event"] == FAIR
    assert set(found["called"]) == {"get_current_weather"} == {found["required"]}
    assert "San Francisco" in found["location"] and "72" in found["answered"] and "Shakespeare" in found["begun"]


@pytest.fixture
def llm(tmp_path: Path) -> Any:
    """The command `llm` in its own folder, with the lines that `docs/serving.md` shows."""

    def run(server: Running, *words: str) -> str:
        (tmp_path / "extra-openai-models.yaml").write_text(
            f'- {{model_id: shoal, model_name: {MODEL}, api_base: "{server.url}/v1", supports_tools: true, '
            "supports_schema: true}\n"
        )
        home = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
        return _run("llm", "-m", "shoal", "-o", "temperature", "0", "-o", "max_tokens", "200", *words, **home)

    return run


@needs_client("llm")
def test_a_chat_in_the_terminal(server: Running, llm: Any) -> None:
    assert llm(server, "Hello").rstrip("\n") == expected(server, "Hello").rstrip("\n")
    assert llm(server, "--no-stream", "Hello").rstrip("\n") == expected(server, "Hello").rstrip("\n")
    assert Report.model_validate_json(llm(server, "--schema", json.dumps(Report.model_json_schema()), "Hello"))


@pytest.mark.slow
@needs_client("llm")
def test_a_chat_in_the_terminal_has_its_function_called_and_goes_on(published: Running, llm: Any) -> None:
    function = 'def multiply(x: int, y: int) -> int:\n    "Multiply two numbers."\n    return x * y'
    asked = ("--functions", function, "--td", "What is 1234 times 5678?")
    assert "multiply({'x': 1234, 'y': 5678})\n  7006652" in llm(published, *asked)
    llm(published, "My name is Ada.")
    assert "Ada" in llm(published, "-c", "What is my name?")


@pytest.mark.slow
def test_an_editor_of_code_edits(published: Running, tmp_path: Path) -> None:
    aider = shutil.which("aider")
    if aider is None:
        pytest.skip("aider is not installed; pipx install aider-chat")
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    command = [aider, "--model", f"openai/{MODEL}", "--no-git", "--yes-always", "--no-check-update",
               "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes", "--no-pretty",
               "--edit-format", "whole", "--map-tokens", "0",
               "--message", "add() must add. Change the minus sign to a plus sign.", "sums.py"]
    told = {"OPENAI_API_BASE": f"{published.url}/v1", "OPENAI_API_KEY": "none", "HOME": str(tmp_path),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **told}, capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0 and "Applied edit to sums.py" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "return a + b" in (tmp_path / "sums.py").read_text()


@pytest.mark.slow
@needs_client("lm_eval")
def test_an_evaluation_asks_the_server(published: Running, tmp_path: Path) -> None:
    sums = [{"question": f"What is {one}+{two}?", "answer": str(one + two)} for one, two in ((2, 3), (4, 4), (1, 6))]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sums))
    (tmp_path / "sums.yaml").write_text(f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "sums.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}} Answer with the number alone."
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")
    where = f"model={MODEL},base_url={published.url}/v1/chat/completions,num_concurrent=3"
    _run("lm_eval", "run", "--model", "local-chat-completions", "--model_args", where, "--include_path", str(tmp_path),
         "--tasks", "sums", "--apply_chat_template", "--output_path", str(tmp_path / "out"),
         HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path))
    (found,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(found.read_text())["results"]["sums"]["exact_match,none"] == 1.0


def _run(module: str, *words: str, **more: str) -> str:
    done = _started(["-m", module, *words], more)
    return done.stdout if "--td" not in words else done.stderr


def _started(words: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *words]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done
