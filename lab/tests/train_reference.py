"""The slow reference of the `eagle` drafter: its predictions after a text, by the training module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.decode.tree import TokenTree
from shoal_lab.train.eagle import EagleModule
from shoal_lab.train.part import TextBatch
from trained_parts import states_of, target


@torch.no_grad()
def most_probable(
    module: EagleModule, family: str, tokens: list[int], guesses: Sequence[int], bias: Mapping[int, float], count: int
) -> list[int]:
    """The most probable tokens after a text whose last token has no state yet, and after some guesses."""
    states, depth = states_of(target(family), tokens[:-1]), len(guesses)
    whole = torch.cat([states, torch.zeros(depth + 1, states.shape[1])]).float()
    batch = TextBatch(torch.tensor([[*tokens, *guesses]]), whole[None], torch.tensor([1]), torch.tensor([len(whole)]))
    logits: Tensor = module.outputs(batch)[depth][0, -1] @ module.head.rows.T
    for token, value in bias.items():
        logits[module.head.ids == token] += value
    best: list[int] = module.head.ids[logits.topk(count).indices].tolist()
    return best


def agrees(
    module: EagleModule, family: str, tokens: list[int], tree: TokenTree, bias: Mapping[int, float], width: int
) -> bool:
    """Whether the children of every node are the first of its `width` most probable tokens."""
    for node in range(len(tree)):
        children = [tree.tokens[child] for child in tree.children(node)]
        guesses = [tree.tokens[place] for place in tree.path(node)[1:]]
        if children and children != most_probable(module, family, tokens, guesses, bias, width)[: len(children)]:
            return False
    return True
