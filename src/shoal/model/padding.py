"""Which sequences of a forward share a call where an executor pads them to the longest. Imports no torch.

EXSPEC (arXiv 2510.22876) picks sequences of one length from a pool, so that a step needs no padding; the others wait.
Here nobody waits: layer by layer, sequences of like length share a call, and the others have one of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CALL = 16
"""What a further call costs in tokens, by reading the layer's weights again. An estimate, not measured."""
_SLOTS = 6
"""A token's attention to so many slots for each number of its state costs about as much as its matrices."""


def alike(counts: Sequence[int], slots: Sequence[int], hidden: int) -> list[list[int]]:
    """Groups of sequences, each ascending, such that calls and padded tokens together cost least.

    A call costs `CALL`, and each of its tokens 1 and what its attention to the longest sequence takes. Of sequences in
    the order of their tokens and slots every division is considered; where all have as many slots, no other is better.

    Args:
        counts: tokens of each sequence, at least 1.
        slots: keys that the last of them attends to.
        hidden: numbers of a token's state.
    """
    order = sorted(range(len(counts)), key=lambda one: (counts[one], slots[one]))
    best, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest, least = 0, (math.inf, 0)
        for begin in range(end - 1, -1, -1):
            longest = max(longest, slots[order[begin]])
            each = counts[order[end - 1]] * (1 + longest / (_SLOTS * hidden))
            least = min(least, (best[begin] + CALL + (end - begin) * each, begin))
        best.append(least[0])
        begins.append(least[1])
    found, end = list[list[int]](), len(order)
    while end:
        found.append(sorted(order[begins[end] : end]))
        end = begins[end]
    return found
