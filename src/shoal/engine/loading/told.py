"""What a model's generation config forces on its texts and forbids in them, done as transformers' generate does it.

How a token is drawn (temperature, top_k, top_p, penalties) is left to the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = (
    "sequence_bias", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
)
"""In the order in which transformers applies them."""


def told_by(generation_config: Any) -> Mapping[str, Any]:
    """Those of the fields that ask for something."""
    found = {name: getattr(generation_config, name, None) for name in FIELDS}
    tokens = ("forced_bos_token_id", "forced_eos_token_id")  # 0 is one
    return {name: value for name, value in found.items() if value or (name in tokens and value is not None)}


def processors(told: Mapping[str, Any], prompt: Sequence[int], most: int, device: Any) -> tuple[Any, ...]:
    """Logits processors for one row.

    Args:
        told: see `told_by`.
        prompt: the row's token ids.
        most: how many tokens are asked for; a forced end comes as the last of them.
        device: of the logits.
    """
    if not told:
        return ()
    import torch
    from transformers.generation import logits_process as hf

    ids, length, device = torch.tensor([list(prompt)], device=device), len(prompt), str(device)
    first = length + (length == 1 and "forced_bos_token_id" in told)
    make = {
        "sequence_bias": hf.SequenceBiasLogitsProcessor,
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda size: hf.EncoderNoRepeatNGramLogitsProcessor(size, ids),
        "bad_words_ids": hf.NoBadWordsLogitsProcessor,
        "forced_bos_token_id": hf.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda token: hf.ForcedEOSTokenLogitsProcessor(length + most, token, device),
        "suppress_tokens": lambda tokens: hf.SuppressTokensLogitsProcessor(tokens, device),
        "begin_suppress_tokens": lambda tokens: hf.SuppressTokensAtBeginLogitsProcessor(tokens, first, device),
    }
    return tuple(make[name](value) for name, value in told.items())
