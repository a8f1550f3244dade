"""The cards that ship are calibrated on items that no evaluation reads."""

from __future__ import annotations

import importlib.util
import json
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

from shoal_lab.eval import suites

TOOL = Path(__file__).parents[2] / "tools" / "make_card.py"
OLDER = {"gemma-3-270m.json": 0, "qwen2.5-coder-0.5b-instruct.json": 2, "qwen2.5-coder-1.5b-instruct.json": 1,
         "smollm2-135m-instruct.json": 4}
"""Cards that were made before the tool split prompts, and how many of theirs lie in the evaluated part of `chat` or
`instructions`. To be made again; see lab/evaluation.md."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_card", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of which no two have the same words, so that each is in a part by itself."""
    folder = tmp_path_factory.mktemp("data")

    def lay(name: str, rows: list[dict[str, object]]) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    for number, name in enumerate(("vicuna/vicuna_bench.jsonl", "mt_bench/question.jsonl")):
        lay(name, [{"turns": [f"What is {'abcdefghij'[number]}{'x' * i}?"], "category": "c"} for i in range(1, 120)])
    lay("self_instruct/user_oriented_instructions.jsonl",
        [{"instruction": f"Say y{'z' * i}", "motivation_app": "m", "instances": [{"input": "it"}]}
         for i in range(1, 120)])
    return folder


def test_no_prompt_of_a_card_is_evaluated(tool: ModuleType, data: Path) -> None:
    seen = tool.questions(data, 10**6)
    evaluated = [item for name in ("chat", "instructions") for item in suites.get(name).items(data)]
    assert len(seen) > 20 and len(evaluated) > 100
    assert not {item.id for item in seen} & {item.id for item in evaluated}
    assert not {item.prompt for item in seen} & {item.prompt for item in evaluated}
    assert {item.id.split("/")[0] for item in seen} >= {"self_instruct"}


def test_a_card_that_ships_names_what_it_has_seen_or_is_known_to_have_seen_too_much() -> None:
    for path in files("shoal.cards").iterdir():
        if path.name.endswith(".json"):
            card = json.loads(path.read_text("utf-8"))
            assert ("items" in card["measured"]) != (path.name in OLDER), path.name
