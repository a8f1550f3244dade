"""A tokenizer for weights that have none: byte-level BPE trained on the texts at hand.

Pieces of words as a real model's tokenizer makes them, so that n-grams repeat as often as they would there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 16_384


def train(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    """A tokenizer of at most `size` entries; ids are below `size`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made
