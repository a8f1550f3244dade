"""Trains a masked-diffusion drafter from a model's own outer layers; `deer` drafts with it.

The first and last layers of the model, now with bidirectional attention, read the last tokens of a text and a block of
masks behind it. The prediction at each mask is pulled towards the model's own prediction there, given the answer so
far; averaged over answers, that is the place's distribution given the text alone. Embedding and LM head are the model's
and stay, except for the embedding of the mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.decode.recipe import MOST_GUESSES
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.config import MASKED
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.part import Base, CutHead, Guessed, TextBatch, TrainedModule, next_draws, right_places

_FADE = 0.8
"""Weight of a place's loss relative to the previous place's."""


@dataclass(frozen=True)
class DrafterShape:
    """Shape of a drafter.

    Attributes:
        layers: layers that it starts from: the model's first ones, and as many or one fewer of its last.
        block: number of masks that it fills.
        window: last tokens of a text that it reads; the first of them is at position 0.
    """

    layers: int = 2
    block: int = 8
    window: int = 64

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}; it must be at least 1, and at most what the model has")
        if not 1 <= self.block <= MOST_GUESSES:
            raise ValueError(f"block is {self.block}; it must be 1 to {MOST_GUESSES} masks")
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 token")

    def check(self, engine: Engine) -> None:
        """Refuse a model that no such drafter can be made from.

        Raises:
            ValueError: it has fewer layers, or a shorter context.
            Unsupported: its blocks cannot run as a masked model's.
        """
        runner = engine.runner
        if self.layers > runner.num_layers:
            raise ValueError(f"layers is {self.layers}; it must be 1 to {runner.num_layers}, which is all that the "
                             "model has")
        if runner.max_positions is not None and self.window + self.block > runner.max_positions:
            raise ValueError(f"window is {self.window} and block {self.block}; together they must be at most the "
                             f"model's context, {runner.max_positions}")
        if engine.masked is not None or any(runner.windows):
            raise Unsupported("a drafter for this model", "its layers see later words, or not all earlier ones",
                              "Train one for a model that writes from left to right with full attention")


@dataclass(frozen=True)
class _Canvas:
    """Windows of texts with their masks, side by side.

    Attributes:
        tokens: int64 [N, W], what is read; arbitrary where there are masks, and behind them.
        masks: bool [N, W], `block` of them in each row.
        inside: bool [N, W], whether a place belongs to a window.
        rows, places: int64 [N, 1] and [N, block], where each mask is in the texts.
        asked: bool [N, block], whether the text is that long.
    """

    tokens: Tensor
    masks: Tensor
    inside: Tensor
    rows: Tensor
    places: Tensor
    asked: Tensor


class DrafterModule(TrainedModule):
    """Trains the drafter.

    Args:
        base: embedding and LM head of the model.
        model: transformers' model, which is not changed.
        shape: shape of the drafter.
        mask: the mask token.
        seed: of the ends of windows.

    Raises:
        Unsupported: the model's type has no masked model.
    """

    kind: ClassVar[str] = "drafter"
    steps: Tensor

    def __init__(self, base: Base, model: Any, shape: DrafterShape, mask: int, seed: int = 0) -> None:
        super().__init__()
        self._base, self._shape, self._seed, self.mask_id = base, shape, seed, mask
        student = outer_layers(model, shape, mask)
        self._student = (student,)  # in a tuple, so that its parameters are not trained
        self.layers, self.norm = student.model.layers, student.model.norm
        table = student.get_input_embeddings().weight
        self.mask = nn.Parameter(table.detach().mean(0))
        self.head = CutHead(base, [token for token in range(len(table)) if token != mask])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # Depth i is the i-th mask. The step decides where windows end; without gradients, they end at every `block`-th
        # token of an answer, from its first one on.
        offset = 0
        if torch.is_grad_enabled():
            offset = int(torch.randint(self._shape.block, (), generator=next_draws(self._seed, self.steps)))
        canvas = self.canvas(batch, offset)
        outputs, total, found = self.outputs(canvas), torch.zeros(()), []
        for place in range(self._shape.block):
            asked = canvas.asked[:, place]
            right = torch.zeros_like(asked)
            if asked.any():
                where = canvas.rows[asked, 0], canvas.places[asked, place]
                own = batch.states[where[0], where[1] - 1]
                loss, tokens = self.head.distilled(outputs[asked, place], own)
                total = total + _FADE**place * loss
                right[asked] = tokens == batch.tokens[where]
            found.append(Guessed(right, asked))
        return total, found

    def canvas(self, batch: TextBatch, offset: int) -> _Canvas:
        """Windows that end at the first token of each answer or `offset` later, and then every `block` tokens."""
        shape, starts = self._shape, list[tuple[int, int]]()
        for row, (prompt, length) in enumerate(zip(batch.prompts.tolist(), batch.lengths.tolist(), strict=True)):
            first = prompt + 1 + offset % max(1, length - prompt - 1)
            starts += [(row, start) for start in range(first, length, shape.block)]
        rows, ends = torch.tensor(starts).view(-1, 2, 1).unbind(1)
        begun = (ends - shape.window).clamp(min=0)
        known = ends - begun
        column = torch.arange(int(known.max()) + shape.block)
        read, inside = column < known, column < known + shape.block
        tokens = batch.tokens[rows, (begun + column).clamp(max=batch.tokens.shape[1] - 1)]
        places = ends + torch.arange(shape.block)
        return _Canvas(tokens.masked_fill(~read, 0), inside & ~read, inside, rows, places,
                       places < batch.lengths[rows])

    def outputs(self, canvas: _Canvas) -> Tensor:
        """The LM head's inputs at each mask, [N, block, D]."""
        x = torch.where(canvas.masks[..., None], self.mask, self._base.embed(canvas.tokens))
        seen = canvas.inside[:, None, None].expand(-1, 1, x.shape[1], -1)
        hidden: Tensor = self._student[0].model(inputs_embeds=x, attention_mask=seen, use_cache=False).last_hidden_state
        return hidden[canvas.masks].view(len(x), self._shape.block, -1)

    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Share of masks at which the argmax token is the text's, by mask, whatever came before: `places`."""
        return {"places": right_places(self, held_out)}

    @override
    def shape(self) -> dict[str, int]:
        return {**asdict(self._shape), "mask": self.mask_id}

    def checkpoint(self) -> Any:
        """The drafter as transformers' model, in bfloat16."""
        made = copy.deepcopy(self._student[0])
        with torch.no_grad():
            made.get_input_embeddings().weight[self.mask_id] = self.mask
        return made.to(torch.bfloat16)


def outer_layers(model: Any, shape: DrafterShape, mask: int) -> Any:
    """A copy of a model's embedding, outer layers and LM head in float32, as the masked model of its type.

    Raises:
        Unsupported: the model's type has no masked model.
    """
    config = copy.deepcopy(model.config)
    if config.model_type not in MASKED:
        raise Unsupported(f"a drafter for model type {config.model_type!r}", "nothing loads it as a masked model",
                          f"Models of type {', '.join(MASKED)} can have one")
    first = (shape.layers + 1) // 2
    kept = [*range(first), *range(config.num_hidden_layers - shape.layers + first, config.num_hidden_layers)]
    config.num_hidden_layers = shape.layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]
    config.mask_token_id, config.draft_block, config.draft_window = mask, shape.block, shape.window
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        student = type(model)(config).float()
    held = model.state_dict()
    named = {name: name.replace(f".layers.{place}.", f".layers.{layer}.") for place, layer in enumerate(kept)
             for name in student.state_dict() if f".layers.{place}." in name}
    student.load_state_dict({name: held[named.get(name, name)] for name in student.state_dict()})
    return student.requires_grad_(True).train(False)


def mask_token(engine: Engine, answers: Corpus, given: str | None) -> int:
    """The mask token.

    Args:
        engine: the model.
        answers: texts in which the token must not occur.
        given: the token as text or id; None for the tokenizer's own mask token, or else the last special token that
            neither begins nor ends a text and that no text holds.

    Raises:
        ValueError: there is no such token, or texts hold it.
    """
    tokenizer, size = engine.tokenizer, engine.runner.vocab_size
    known: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    used = {*engine.eos_token_ids}
    for shard in range(len(answers.shards)):
        for part in (True, False):
            used.update(*(one.tokens.tolist() for one in answers.answers(shard, validation=part)))
    if given is not None:
        found = known.get(given, int(given) if given.isdecimal() else size)
        if not 0 <= found < size:
            raise ValueError(f"mask token {given!r} is none of the model's; give one as its tokenizer writes it, or a "
                             f"number of 0..{size - 1}")
        if found in used:
            raise ValueError(f"mask token {given!r} stands in the answers, or ends them; give one that no text holds")
        return found
    if tokenizer is not None and tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    ends, special = set[int | None](), list[int]()
    if tokenizer is not None:
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
        special = [token for token, held in tokenizer.added_tokens_decoder.items() if held.special]
    free = [token for token in special if token not in used and token not in ends and token < size]
    if not free:
        raise ValueError("the tokenizer has no special token that no text holds; say which token no text holds, by "
                         "--mask-token")
    return int(max(free))
