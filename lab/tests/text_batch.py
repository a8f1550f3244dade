"""Three texts with the states of a tiny model, for modules trained on answers, and LM head inputs under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backends import reference
from oracle import prefix_counts, prefix_oracle
from shoal_lab.train.part import TextBatch


def batch(family: str = "llama") -> TextBatch:
    """Prompts of 3, 5 and 17 tokens; one text is shorter than the others."""
    tokens = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        states = reference(family).base_model(tokens).last_hidden_state
    return TextBatch(tokens, states.float(), torch.tensor([3, 5, 17]), torch.tensor([20, 16, 20]))


def read_by_the_oracle(family: str, texts: TextBatch, row: int, drops: Sequence[int]) -> Tensor:
    """LM head inputs after a text, [length, D], if each layer processes a prefix of the positions."""
    prompt, length = int(texts.prompts[row]), int(texts.lengths[row])
    model, found = reference(family), list[Any]()
    handle = model.get_output_embeddings().register_forward_pre_hook(partial(_note, found))
    prefix_oracle(model, texts.tokens[row : row + 1, :length], prefix_counts(drops, prompt, length))
    handle.remove()
    states: Tensor = found[0][0]
    return states


def _note(found: list[Any], module: Any, args: Any) -> None:
    found.append(args[0])
