"""A trained part that is not for this model, this method or this code is refused by name; 8 bits are read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chat_tokenizer import chat_tokenizer
from drive import prompt
from eagle_part import eagle_part, in_whole_numbers, target
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods.eagle import Eagle
from shoal.speculative import draft_head_file
from shoal.speculative.draft_head_file import CARD, TENSORS, vocabulary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(eagle_part("llama"), tmp_path / "part"))


def run(folder: Path | str | None, engine: Engine | None = None, **options: Any) -> None:
    method = Eagle(None if folder is None else str(folder), **options)
    (engine or target("llama")).generate(prompt(5, 1), method=method, max_new_tokens=8)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    card = json.loads((folder / CARD).read_text("utf-8"))
    change(card)
    (folder / CARD).write_text(json.dumps(card), "utf-8")


def retensor(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


def test_the_part_as_it_was_written_runs(folder: Path) -> None:
    run(folder)


def test_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(Unsupported, match=f"trained part '{folder}': it was trained for a model with the fingerprint"):
        run(folder, target("gpt2"))


def test_another_tokenizer_is_refused(folder: Path) -> None:
    engine = Engine(target("llama").runner, chat_tokenizer(), model=target("llama").model)
    rewrite(folder, lambda card: card.update(vocabulary=vocabulary(engine.tokenizer)))
    run(folder, engine)
    rewrite(folder, lambda card: card.update(vocabulary="another"))
    with pytest.raises(Unsupported, match=f"trained part '{folder}': its model's tokenizer had another vocabulary"):
        run(folder, engine)


def test_tokens_and_sizes_that_the_model_has_not_are_refused(folder: Path) -> None:
    def beyond(tensors: dict[str, Any]) -> None:
        tensors["tokens"][-1] = 4000

    retensor(folder, beyond)
    with pytest.raises(Unsupported, match=f"'{folder}': it is for states of 32 numbers and tokens up to 4000"):
        run(folder)


def test_a_part_of_another_kind_is_refused(folder: Path) -> None:
    rewrite(folder, lambda card: card.update(part="medusa"))
    with pytest.raises(ValueError, match=f"'{folder}' is of kind 'medusa'; eagle needs one of kind 'eagle'"):
        run(folder)


@pytest.mark.parametrize("name", [CARD, TENSORS])
def test_truncated_and_missing_files_are_named(folder: Path, name: str) -> None:
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match=str(folder / name)):
        run(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=str(folder / name)):
        run(folder)


def test_a_card_or_tensors_that_do_not_fit_are_named(folder: Path) -> None:
    rewrite(folder, lambda card: card["shape"].update(heads="two"))
    with pytest.raises(ValueError, match=f"card of the trained part '{folder}' says that heads is 'two'"):
        run(folder)
    rewrite(folder, lambda card: card["shape"].update(heads=4))
    retensor(folder, lambda tensors: tensors.pop("fuse.weight"))
    with pytest.raises(ValueError, match=f"'fuse.weight' of the trained part '{folder}' is not there"):
        run(folder)
    retensor(folder, lambda tensors: tensors.update({"fuse.weight": torch.zeros(3, 4)}))
    with pytest.raises(ValueError, match=r"'fuse.weight' .* is \[3, 4\]; its card asks for \[32, 64\]"):
        run(folder)
    rewrite(folder, lambda card: card.update(format=99))
    with pytest.raises(ValueError, match="is no card of a trained part in format 1"):
        run(folder)


@pytest.mark.parametrize("name", ["fuse.weight", "fuse.weight.scale", "norm.weight"])
def test_what_is_no_number_is_refused(name: str, folder: Path) -> None:
    if name != "fuse.weight":
        retensor(folder, lambda tensors: in_whole_numbers(tensors, 127))
    retensor(folder, lambda tensors: tensors[name].view(-1)[3:4].fill_(torch.nan))
    with pytest.raises(ValueError, match=f"of the trained part '{folder}' holds what is no number"):
        run(folder)


def test_no_part_is_refused() -> None:
    words = "eagle has no trained part, and none is known for this model; give part"
    with pytest.raises(ValueError, match=words):
        run(None)


def test_options_out_of_range_are_refused() -> None:
    for options in ({"length": 0}, {"stop": 1.5}, {"nodes": 0}, {"width": 30, "length": 3}, {"width": 0},
                  {"width": 2, "rule": "rejection"}):
        with pytest.raises(ValueError, match="must be|under rule 'rejection'"):
            Eagle("part", **options)


@pytest.mark.parametrize("largest", [127, 31])
def test_whole_numbers_are_close(largest: int, folder: Path) -> None:
    engine, wanted = target("llama"), load_file(folder / TENSORS)["fuse.weight"]
    retensor(folder, lambda tensors: in_whole_numbers(tensors, largest))
    part = draft_head_file.read(str(folder), "eagle", engine.info())
    assert part.tensors["fuse.weight"].dtype == torch.int8
    assert (part.take("fuse.weight", 32, 64) - wanted).abs().max() <= wanted.abs().amax() / largest


def test_a_part_that_was_trained_on_is_read_anew(folder: Path) -> None:
    """The file changes under a running engine."""
    engine = target("llama")
    first = Eagle(str(folder)).recipe(engine.info()).proposer
    assert Eagle(str(folder)).recipe(engine.info()).proposer is first  # sequences of several requests share the layer
    retensor(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(32)}))
    assert Eagle(str(folder)).recipe(engine.info()).proposer is not first
