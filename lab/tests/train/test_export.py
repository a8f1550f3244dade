"""A trained component as written: integers close to the weights, and readable by its own method only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drive import prompt
from shoal.speculative import draft_head_file
from shoal_lab.methods.medusa import Medusa
from shoal_lab.train.export import Weights, export
from trained_parts import eagle, part_for, target


@pytest.mark.parametrize(("weights", "largest"), [("int8", 127), ("int6", 31)])
def test_whole_numbers_are_close(weights: Weights, largest: int, tmp_path: Path) -> None:
    engine, module = target("llama"), eagle(target("llama"))
    export(tmp_path, engine, module, weights)
    part = draft_head_file.read(str(tmp_path), "eagle", engine.info())
    assert part.tensors["fuse.weight"].dtype == torch.int8
    wanted = module["fuse.weight"].detach()
    assert part.tensors["fuse.weight"].abs().max() == largest
    assert (part.take("fuse.weight", 32, 64) - wanted).abs().max() <= wanted.abs().amax() / largest


def test_a_part_of_another_kind_is_refused() -> None:
    folder = part_for("eagle", "llama")
    with pytest.raises(ValueError, match=f"'{folder}' is of kind 'eagle'; medusa needs one of kind 'medusa'"):
        target("llama").generate(prompt(5, 1), method=Medusa(folder), max_new_tokens=4)


@pytest.mark.parametrize("options", [{"length": 0}, {"nodes": 0}, {"nodes": 99}], ids=repr)
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Medusa("part", **options)
