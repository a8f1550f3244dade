"""What the layer of `eagle` says after a text, by the module that is trained: the slow twin of the drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.train.eagle import EagleModule
from shoal.train.part import TextBatch
from trained_parts import states_of, target


@torch.no_grad()
def chain(module: EagleModule, family: str, tokens: list[int], length: int, bias: dict[int, float]) -> list[int]:
    """The guesses after a text whose last token has no state yet, the whole text read anew for each."""
    states, guesses = states_of(target(family), tokens[:-1]), list[int]()
    for depth in range(length):
        batch = _batch([*tokens, *guesses], torch.cat([states, torch.zeros(depth + 1, states.shape[1])]))
        outputs = module.outputs(batch)[depth][0]
        logits = outputs[-1] @ module.head.rows.T
        for token, value in bias.items():
            logits[module.head.ids == token] += value
        guesses.append(int(module.head.ids[logits.argmax()]))
    return guesses


def _batch(tokens: list[int], states: Tensor) -> TextBatch:
    return TextBatch(torch.tensor([tokens]), states.float()[None], torch.tensor([1]), torch.tensor([len(tokens)]))
