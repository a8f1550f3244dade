"""Plans of all kinds over six layers, and a slow reference for those that bring layers back."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from families import VOCAB
from oracle import decoder_layers
from shoal import compat
from shoal.depth.plan import NEVER, DepthPlan
from shoal_lab.eval.rising import RisingPlan

PLANS = {
    "full": DepthPlan.full(6),
    "d3": DepthPlan.whole_layers((NEVER, 9, 2, 4, 6, NEVER)),
    "at once": DepthPlan.whole_layers((NEVER, 1, 1, 1, NEVER, NEVER)),
    "sublayers": DepthPlan((NEVER, 3, 5, NEVER, 2, NEVER), (NEVER, 6, 1, 4, NEVER, 3)),
}
RISING = RisingPlan((6, 3, 3, 4, 3, 5, 6, 4, 6), (2, 3, 1), 6)


def ids(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


class Passing:
    """Decoding with transformers' cache, in which a skipped layer runs in full, and only its output is dropped.

    So its keys and values come from the passing hidden states.
    """

    def __init__(self, model: Any, plan: RisingPlan) -> None:
        self.model, self.plan, self.step = model, plan, 0

    def logits(self, prompt: list[int], count: int, forced: list[int] | None = None) -> Tensor:
        """[count, V]: logits that decide each token; the tokens before it are greedy, or those of `forced`."""
        past, new, rows = dict[str, Any](), list(prompt), []
        with ExitStack() as stack, torch.no_grad():
            for index, layer in enumerate(decoder_layers(self.model)):
                handle = layer.register_forward_hook(self._keep(index), with_kwargs=True)
                stack.callback(handle.remove)
            for self.step in range(count):
                out = self.model(torch.tensor([new]), use_cache=True, **past)
                past = {name: value for name, value in out.items() if compat.is_cache(value)}
                rows.append(out.logits[0, -1])
                new = [int(rows[-1].argmax()) if forced is None else forced[self.step]]
        return torch.stack(rows)

    def _keep(self, index: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            count = self.plan.counts[min(self.step, len(self.plan.counts) - 1)]
            gone = self.step > 0 and index in self.plan.removal[: self.plan.num_layers - count]
            return output if not gone else (before, *output[1:]) if isinstance(output, tuple) else before

        return hook
