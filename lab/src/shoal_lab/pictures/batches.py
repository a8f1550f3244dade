"""Pictures with all their questions, as one sequence each for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from shoal_lab.pictures.shapes import TOKENS, Scene

if TYPE_CHECKING:
    from PIL.Image import Image

CUE = " Answer:"
"""What stands between a question and its answer."""
PICTURE = slice(1, 1 + TOKENS)
"""Where the picture stands: behind a token of text, as models rest much of their attention on the first token."""


@dataclass(frozen=True)
class PictureBatch:
    """Sequences of a picture's tokens and, behind them, each of its questions, which see the picture and themselves.

    Attributes:
        pixels: uint8 [B, 3, SIDE, SIDE].
        tokens: int64 [B, T], ids of the questions; before them the first token, and `PICTURE`.
        positions: int64 [B, T], those that a token has where its question is the only one.
        seen: bool [B, 1, T, T].
        asked: bool [B, T], where an answer follows.
        answers: int64 [questions], the answers' tokens, in the order of `asked`.
    """

    pixels: Tensor
    tokens: Tensor
    positions: Tensor
    seen: Tensor
    asked: Tensor
    answers: Tensor


def pixels_of(pictures: Sequence[Image]) -> Tensor:
    """The pictures as uint8 [pictures, 3, SIDE, SIDE]."""
    import numpy as np

    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])


def normalised(pixels: Tensor) -> Tensor:
    """What the encoder reads of pixels in 0..255: values from -1 to 1."""
    return pixels.float() / 127.5 - 1


def batch_of(scenes: Sequence[Scene], tokenizer: Any) -> PictureBatch:
    """The sequences of some pictures, padded to the longest."""
    asked = [[tokenizer(f"\n{one.text}{CUE}")["input_ids"] for one in scene.questions] for scene in scenes]
    size = PICTURE.stop + max(sum(map(len, one)) for one in asked)
    tokens, ends = torch.zeros(len(scenes), size, dtype=torch.int64), torch.zeros(len(scenes), size, dtype=torch.bool)
    positions = torch.arange(size).repeat(len(scenes), 1)
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    block = torch.full((len(scenes), size), -1)  # what all see; a pad is a question that nobody asks
    tokens[:, 0] = tokenizer.bos_token_id
    block[:, PICTURE.stop :] = len(max(asked, key=len))
    for row, questions in enumerate(asked):
        at = PICTURE.stop
        for number, ids in enumerate(questions):
            span = slice(at, at + len(ids))
            tokens[row, span], block[row, span] = torch.tensor(ids), number
            positions[row, span] = torch.arange(PICTURE.stop, PICTURE.stop + len(ids))
            at += len(ids)
            ends[row, at - 1] = True
    seen = causal & ((block[:, None] == block[:, :, None]) | (block[:, None] < 0))
    answers = [tokenizer(f" {one.answer}")["input_ids"][0] for scene in scenes for one in scene.questions]
    pixels = pixels_of([scene.drawn()[0] for scene in scenes])
    return PictureBatch(pixels, tokens, positions, seen[:, None], ends, torch.tensor(answers))


def answer_logits(model: Any, batch: PictureBatch, pictures: Tensor) -> Tensor:
    """Logits [questions, V] where answers follow, of a frozen model that reads pictures [B, TOKENS, D] like these."""
    embedded = model.get_input_embeddings()(batch.tokens)
    embedded = torch.cat([embedded[:, :1], pictures.to(embedded), embedded[:, PICTURE.stop :]], 1)
    mask = torch.zeros(batch.seen.shape, dtype=embedded.dtype).masked_fill(~batch.seen, torch.finfo(embedded.dtype).min)
    states = model.model(inputs_embeds=embedded, attention_mask=mask, position_ids=batch.positions,
                         use_cache=False).last_hidden_state[batch.asked]
    return linear(states, model.get_output_embeddings().weight).float()
