"""A trained component with a missing tensor, or one tensor too many, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drive import prompt
from eagle_part import target
from shoal.speculative.draft_head_file import CARD, TENSORS, TOKENS
from trained_parts import MAKERS, part_for


@pytest.mark.parametrize("kind", MAKERS)
def test_a_trained_part(tmp_path: Path, kind: str) -> None:
    place = Path(part_for(kind, "llama"))
    (tmp_path / CARD).write_bytes((place / CARD).read_bytes())
    held = load_file(place / TENSORS)
    name = min(name for name in held if name != TOKENS)
    fewer = {key: one for key, one in held.items() if key != name}
    for changed, said in ((fewer, f"the tensor '{name}' .* is not there"),
                          ({**held, "more": torch.ones(2)}, "holds 'more', which")):
        save_file(changed, tmp_path / TENSORS)
        with pytest.raises(ValueError, match=said):
            target("llama").generate(prompt(9, 2), method={"method": kind, "method_args": {"part": str(tmp_path)}},
                                     max_new_tokens=4)
