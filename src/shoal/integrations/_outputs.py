"""From decoded rows to what `generate` returns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from shoal.decode.row import Row
from shoal.integrations._rows import Record


def sequences(input_ids: Tensor, rows: Sequence[Row], pad: int) -> Tensor:
    """Ids [B, T + longest answer]: the prompts as given, their answers, `pad` after each that ended early."""
    width = max(row.emitted for row in rows)
    answers = [row.tokens[row.prompt_length :] for row in rows]
    tail = [[*answer, *[pad] * (width - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(tail, dtype=input_ids.dtype, device=input_ids.device)], 1)


def output(ids: Tensor, rows: Sequence[Row], records: Sequence[Record], config: Any) -> Any:
    """The record that `generate` returns with `return_dict_in_generate`, scores and logits as asked for."""
    from transformers.generation import GenerateDecoderOnlyOutput

    kept = [(record, row.emitted) for record, row in zip(records, rows, strict=False)]  # a cut block recorded more
    scores = _steps([record.scores[:size] for record, size in kept]) if config.output_scores else None
    logits = _steps([record.logits[:size] for record, size in kept]) if config.output_logits else None
    return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=logits)


def _steps(rows: Sequence[list[Tensor]]) -> tuple[Tensor, ...]:
    """One tensor [B, V] per step; zeros where a row has ended."""
    ended = torch.zeros_like(rows[0][0])
    return tuple(torch.stack(step) for step in zip_longest(*rows, fillvalue=ended))
