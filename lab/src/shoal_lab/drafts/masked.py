"""A masked-diffusion model that drafts a whole block in one forward (arXiv 2512.15176, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.depth.plan import DepthPlan
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal.speculative.choose import Place, choose
from shoal.speculative.growth import Growth
from shoal.speculative.model import check_context

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.types import MaskedModel


@dataclass(frozen=True)
class MaskedProposer(Proposer):
    """Draws a chain of guesses from a masked-diffusion model with the same tokens.

    Attributes:
        runner: the model.
        masked: properties of its masks.
        length: number of masks to fill at a time.
        name: the model's name, for messages.
        window: tokens at the end of a text that it reads, the first of them at position 0; None for all.
    """

    runner: ModelRunner
    masked: MaskedModel
    length: int
    name: str
    window: int | None = None

    @property
    @override
    def second_runner(self) -> ModelRunner:
        return self.runner

    def begin(self, runner: Any, cache: Any) -> MaskedDrafter:
        """A drafter for sequences of the target `runner`."""
        return MaskedDrafter(self, runner.vocab_size)


class _Block(Growth):
    """The growing chain of a sequence.

    Attributes:
        seq: the sequence.
        text: the tokens that are read.
        masks: number of masks behind its tokens.
        all_logits: logits [masks, V] of their places, once they are known.
        goes_on: whether another guess is wanted.
    """

    def __init__(self, seq: SequenceState, limit: int, length: int, window: int | None) -> None:
        super().__init__(seq.tokens[-1])
        self.seq, self.masks = seq, min(length, seq.stop.room)
        self.text = seq.tokens if window is None else seq.tokens[-window:]
        self._most = min(limit, self.masks)
        self.all_logits: Tensor | None = None
        self.goes_on = self._most > 0

    def logits(self) -> Tensor:
        """Logits [V] of the next place."""
        assert self.all_logits is not None
        return self.all_logits[len(self.tokens) - 1]

    def extend(self, tokens: Sequence[int], probs: Tensor | None) -> None:
        """Append the guess, if there is one; nothing follows an end of sequence."""
        for token in tokens:
            self.add(token, len(self.tokens) - 1, probs)
        ended = not tokens or tokens[0] in self.seq.stop.ends
        self.goes_on = not ended and len(self.tokens) <= self._most


class MaskedDrafter(Drafter):
    """Drafts with the masked-diffusion model. It keeps no KV, because a new token changes the states of all others.

    Args:
        proposer: options of the model.
        vocabulary: size of the target's vocabulary.
    """

    def __init__(self, proposer: MaskedProposer, vocabulary: int) -> None:
        self._how, self._runner, self._vocabulary = proposer, proposer.runner, vocabulary
        self._plan = DepthPlan.full(proposer.runner.num_layers)

    @torch.no_grad()
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A chain per sequence.

        Raises:
            Unsupported: a sequence may grow beyond the draft model's context.
        """
        how, longest = self._how, max(len(seq.tokens) + seq.stop.room for seq in seqs)
        check_context(self._runner, how.name, longest if how.window is None else min(longest, how.window + how.length))
        blocks = [_Block(seq, limit, how.length, how.window) for seq, limit in zip(seqs, limits, strict=True)]
        self._read([block for block in blocks if block.goes_on])
        while alive := [block for block in blocks if block.goes_on]:
            _extend(alive, torch.stack([block.logits() for block in alive]))
        return [block.tree() for block in blocks]

    def _read(self, blocks: list[_Block]) -> None:
        """Run texts and masks, as many together as fit into a forward, and at least one."""
        while blocks:
            sizes = [len(block.text) + block.masks for block in blocks]
            count = max(1, sum(sum(sizes[: last + 1]) <= self._runner.prefill_chunk for last in range(len(sizes))))
            self._forward(blocks[:count])
            blocks = blocks[count:]

    def _forward(self, blocks: Sequence[_Block]) -> None:
        """Logits of some blocks. A block whose text the model cannot read, lacking a padded id, ends."""
        for block in blocks:
            block.goes_on = max(block.text) < self._runner.vocab_size
        blocks = [block for block in blocks if block.goes_on]
        if not blocks:
            return
        mask, shift = self._how.masked.mask_token_id, self._how.masked.shift
        chunks = []
        for seq_id, block in enumerate(blocks):
            tokens = [*block.text, *[mask] * block.masks]
            chunks.append(SequenceChunk(seq_id, tokens, [0] * len(tokens), self._plan, wanted=block.masks + shift,
                                        mutual=True))
            block.seq.ledger.draft_forwards += 1
        logits = self._runner.forward(chunks, self._runner.new_cache(len(blocks)))
        logits = torch.nn.functional.pad(logits, (0, self._vocabulary - logits.shape[-1]), value=-torch.inf)
        if mask < self._vocabulary:
            logits[:, mask] = -torch.inf
        for block, lines in zip(blocks, logits.split([chunk.wanted for chunk in chunks]), strict=True):
            block.all_logits = lines[: block.masks]


def _extend(blocks: Sequence[_Block], logits: Tensor) -> None:
    """Add the next guess of each block, from the logits [V] of its place given the text alone."""
    places = [Place(block.seq, block.paths[-1], 0) for block in blocks]
    for block, guess in zip(blocks, choose(places, logits, 1), strict=True):
        block.extend(guess.tokens, guess.probs)
