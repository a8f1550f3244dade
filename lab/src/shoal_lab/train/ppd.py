"""Trains the prompt tokens of `shoal_lab.drafts.ppd` inside the frozen model.

The model reads the answers once without gradients. Random places in them are followed by the prompt tokens, each set
with its own mask: a prompt token sees the text up to its place and the earlier prompt tokens of its set, and nothing
else sees prompt tokens. So the text is read as usual, and gradients flow through the prompt tokens alone. A set may
have several copies, which do not see each other; the mean of their outputs has the mean of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.model.config import layers_of, windows_of
from shoal.model.probe import find_layers
from shoal_lab.components.hf_cache import cache_name
from shoal_lab.drafts.ppd import MOST_PROMPTS, PROMPTS
from shoal_lab.train.part import Base, CutHead, Guessed, ShippedModule, TextBatch

_FADE = 0.8
"""Weight of a prompt token's loss relative to the previous one's, as published."""
_RANKS = 8
"""Ranks of a prompt token's guesses whose hits are counted."""
_MOST_FED = 60
"""Most nodes of a step beside the last token, with every prompt token behind each."""
_EVERY = 4
"""In a step, one place of an answer in this many gets prompt tokens."""


@dataclass(frozen=True)
class _Sets:
    """Places of prompt tokens.

    Attributes:
        places: int64 [B, K], the token before each set.
        kept: bool [B, K], which of the sets count; the others are padding.
    """

    places: Tensor
    kept: Tensor


class PromptModule(ShippedModule):
    """Vectors in place of the next tokens (Parallel Prompt Decoding, arXiv 2405.18628, section 3).

    Args:
        base: the model's embedding and LM head.
        model: transformers' model; its weights stay.
        depths: prompt tokens in a copy of a set.
        seed: of the first vectors, and of the places.
        copies: of a set.

    Raises:
        ValueError: there are more prompt tokens than a step may feed.
    """

    kind: ClassVar[str] = "ppd"
    steps: Tensor

    def __init__(self, base: Base, model: Any, depths: int = 3, seed: int = 0, copies: int = 1) -> None:
        super().__init__()
        if not 1 <= depths <= MOST_PROMPTS:
            raise ValueError(f"--depths is {depths}; it must be 1 to {MOST_PROMPTS} prompts")
        most = (_MOST_FED - depths) // (depths * (depths + 1))
        if not 1 <= copies <= most:
            raise ValueError(f"--copies is {copies}; with {depths} prompts it must be 1 to {most}: a step feeds them "
                             f"behind {depths + 1} nodes, and {_MOST_FED} nodes at most")
        self._depths, self._copies = depths, copies
        self._model = (model.requires_grad_(False).train(False),)  # in a tuple, so that its parameters are not trained
        self._seed = seed
        vocabulary = torch.arange(model.config.vocab_size)
        self.head = CutHead(base, vocabulary.tolist())
        self.prompts = nn.ParameterList(_begun(base.embed(vocabulary), copies * depths, seed))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # Places follow from the step; without gradients they are evenly spaced.
        sets = self._sets(batch, self._drawn(batch) if torch.is_grad_enabled() else None)
        outputs, total, found = self.outputs(batch.tokens, sets.places), torch.zeros(()), []
        for depth in range(self._depths):
            rows, columns = self._asked(batch, sets, depth)
            guessed = torch.zeros(2, *batch.tokens.shape, dtype=torch.bool)
            if len(rows):
                places = sets.places[rows, columns]
                own = batch.states[rows, places + depth + 1]
                loss, tokens = self.head.distilled(outputs[rows, columns, depth], own)
                total = total + _FADE**depth * loss
                guessed[:, rows, places] = torch.stack([tokens == batch.tokens[rows, places + depth + 2],
                                                        torch.ones_like(rows, dtype=torch.bool)])
            found.append(Guessed(*guessed))
        return total, found

    def _drawn(self, batch: TextBatch) -> Tensor:
        """Random numbers [B, T] by which places are chosen."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + int(self.steps))
        self.steps += 1
        return torch.rand(batch.tokens.shape, generator=generator)

    def _sets(self, batch: TextBatch, drawn: Tensor | None) -> _Sets:
        """The places with the largest numbers drawn, one in `_EVERY`, of those with enough answer behind them."""
        fits = batch.guessed_from(0, 2)
        if drawn is None:
            drawn = ((fits.cumsum(1) - 1) % _EVERY == 0).float()
        counts = -(-fits.sum(1) // _EVERY)
        most = max(1, int(counts.max()))
        places = torch.where(fits, drawn, -1.0).topk(most).indices
        return _Sets(places, torch.arange(most) < counts[:, None])

    def _asked(self, batch: TextBatch, sets: _Sets, depth: int) -> tuple[Tensor, Tensor]:
        """Texts and sets, int64 [n] each, whose prompt token at that depth stands for a token of the text."""
        rows, columns = (sets.kept & (sets.places + depth + 2 < batch.lengths[:, None])).nonzero(as_tuple=True)
        return rows, columns

    def outputs(self, tokens: Tensor, places: Tensor) -> Tensor:
        """The LM head's inputs at each prompt token.

        Args:
            tokens: int64 [B, T], texts.
            places: int64 [B, K], the token before each set.

        Returns:
            [B, K, depths, D], float32: means over the copies.
        """
        from transformers import DynamicCache

        core, (sets, count) = self._model[0].base_model, (places.shape[1], len(self.prompts))
        past = DynamicCache()  # without a config, so that windowed layers also keep what lies before the window
        given = {cache_name(core.forward): past, "use_cache": True}
        with torch.no_grad():
            core(input_ids=tokens, **given)
        ahead = places[:, :, None] + 1 + torch.arange(self._depths).repeat(self._copies)
        fed = torch.stack(list(self.prompts)).repeat(sets, 1).expand(len(tokens), -1, -1)

        def put(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
            if args:
                return (fed.to(args[0]), *args[1:]), options
            return args, {**options, "hidden_states": fed.to(options["hidden_states"])}

        first = find_layers(self._model[0], layers_of(core.config))[0]
        handle = first.register_forward_pre_hook(put, with_kwargs=True)
        try:
            hidden = core(
                input_ids=tokens.new_zeros(len(tokens), sets * count), position_ids=ahead.flatten(1),
                attention_mask=self._masks(tokens.shape[1], places), **given,
            ).last_hidden_state
        finally:
            handle.remove()
        found: Tensor = hidden.float().view(len(tokens), sets, self._copies, self._depths, -1).mean(2)
        return found

    def _masks(self, length: int, places: Tensor) -> Any:
        """Which of `length` tokens and of all prompt tokens each prompt token sees, in the model's format."""
        config, windows = self._model[0].config, windows_of(self._model[0].config)
        by_window = {window: self._mask(length, places, window) for window in windows}
        types = getattr(config, "layer_types", None)
        return by_window[windows[0]] if types is None else dict(zip(types, map(by_window.get, windows), strict=True))

    def _mask(self, length: int, places: Tensor, window: int | None) -> Tensor:
        """Mask of layers with that window, [B, 1, prompts, columns]: bool, or additive if attention takes that."""
        (texts, sets), count = places.shape, len(self.prompts)
        behind = torch.arange(length) - places[:, :, None]
        text = (behind <= 0).repeat_interleave(count, 1)
        own = torch.ones(self._depths, self._depths, dtype=torch.bool).tril()
        if window is not None:
            far = 1 + torch.arange(self._depths).repeat(self._copies)[:, None] - behind[:, :, None]
            text, own = text & (far < window).flatten(1, 2), own.triu(1 - window)
        alone = torch.block_diag(*[own] * (sets * self._copies))
        seen = torch.cat([text, alone.expand(texts, -1, -1)], -1)[:, None]
        if self._model[0].config._attn_implementation == "sdpa":
            return seen
        dtype = self._model[0].dtype
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    @torch.no_grad()
    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """How often each prompt token's guess of each rank was right, `ranks`, which determines what a step feeds."""
        right, asked = torch.zeros(self._depths, _RANKS), torch.zeros(self._depths, 1)
        for batch in held_out:
            sets = self._sets(batch, None)
            outputs = self.outputs(batch.tokens, sets.places)
            for depth in range(self._depths):
                rows, columns = self._asked(batch, sets, depth)
                best = self.head.best(outputs[rows, columns, depth], _RANKS)
                came = batch.tokens[rows, sets.places[rows, columns] + depth + 2]
                right[depth, : best.shape[1]] += (best == came[:, None]).sum(0)
                asked[depth] += len(rows)
        return {"ranks": [[round(share, 4) for share in shares] for shares in (right / asked.clamp(min=1)).tolist()]}

    @override
    def exported(self) -> dict[str, Tensor]:
        # Named as vectors, so that they are stored unquantised.
        return {PROMPTS.format(place): prompt.detach() for place, prompt in enumerate(self.prompts)}

    @override
    def shape(self) -> dict[str, int]:
        return {"prompts": self._depths, "hidden": len(self.prompts[0]), "copies": self._copies}


def _begun(table: Tensor, count: int, seed: int) -> list[nn.Parameter]:
    """The mean of all tokens' embeddings [V, D], with noise of their spread."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, table.shape[1], generator=generator) * table.std(0)
    return [nn.Parameter(one) for one in table.mean(0) + noise]
