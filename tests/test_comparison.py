"""The table of what Shoal has beside others: no cell without its test or its source, no lack that is not told."""

from __future__ import annotations

import re
import sys

from documents import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (ROOT / "docs" / "comparison.md").read_text("utf-8")
PEERS = ("Ollama", "llama.cpp", "vLLM", "LM Studio", "mlx-lm")
_TEST = re.compile(r"\[[^]]+\]\(\.\./(tests/[^)]+)\)")
_SOURCE = re.compile(r"\[([^]]+)\]\[([\w-]+)\]")
_ADDRESS = re.compile(r"^\[([\w-]+)\]: (https://github\.com/\S+)$", re.M)
OF = {"o": "ollama/ollama", "l": "ggml-org/llama.cpp", "v": "vllm-project/vllm", "s": "lmstudio-ai/docs",
      "m": "ml-explore/mlx-lm"}
"""Whose documents a label's first letter stands for, in the order of the columns."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without the heads of its columns."""
    lines = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].split("\n[")[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


FEATURES = [row for heading in ("What clients speak", "How a model runs", "What is around it")
            for row in rows(heading)]


def test_a_row_says_where_each_cell_is_from() -> None:
    for name, ours, *theirs in FEATURES:
        assert len(theirs) == len(PEERS), name
        found = _TEST.fullmatch(ours)
        assert found is not None and ours.startswith("[yes"), f"{name}: Shoal's cell names no test"
        assert re.search(r"^def test_", (ROOT / found[1]).read_text("utf-8"), re.M), found[1]
        for cell, letter in zip(theirs, OF, strict=True):
            source = _SOURCE.fullmatch(cell)
            assert cell == "none found" or source and source[2].startswith(f"{letter}-"), (name, cell)


def test_the_columns_are_in_their_order() -> None:
    heads = re.findall(r"^\| \| Shoal \|(.*)\|$", PAGE, re.M)
    named = [[cell.strip() for cell in head.split("|")] for head in heads]
    assert [one for one in named if len(one) > 1] == [["Ollama", "llama.cpp", "vLLM", "LM Studio", "mlx-lm"]] * 3
    assert list(OF) == ["o", "l", "v", "s", "m"]


def test_what_two_others_have_is_had_or_told() -> None:
    for name, ours, who in rows("What Shoal lacks"):
        assert len(_SOURCE.findall(who)) >= 2 and ours, f"{name}: fewer than two others have it"


def test_every_source_is_one_state_of_a_public_document_and_is_used() -> None:
    addresses = dict(_ADDRESS.findall(PAGE))
    assert {label for _, label in _SOURCE.findall(PAGE)} == set(addresses)
    for label, address in addresses.items():
        assert re.match(rf"https://github\.com/{OF[label[0]]}/blob/[0-9a-f]{{40}}/\S+$", address), label


def test_clients_are_those_of_the_tests_at_the_versions_that_are_pinned() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    names = {"pydantic-ai": "pydantic-ai-slim", "lm-evaluation-harness": "lm-eval"}
    for name, _, tried, test in rows("Clients"):
        found = _TEST.fullmatch(test)
        assert found is not None and (ROOT / found[1]).is_file(), name
        assert pins.get(names.get(name, name), tried) == tried, name
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["clients"]
    wanted = {re.split(r"[\[><=]", one)[0] for one in extra}
    assert wanted <= {names.get(row[0], row[0]) for row in rows("Clients")}
