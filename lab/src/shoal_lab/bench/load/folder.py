"""A model as a folder that every server can load: shapes are written down, and ends of sequence can be taken out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.engine.loading.device import as_dtype
from shoal_lab.bench.load.prompts import WORDS
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.shapes import RandomWeights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
VOCABULARY = 16_384
"""Entries of a trained tokenizer."""
_CONFIGS = ("config.json", "generation_config.json")


def write_shape(model: MeasuredModel, dtype: str, folder: Path, texts: Iterable[str] = ()) -> None:
    """Write a shape's random weights, with a tokenizer in which every id has a text of its own.

    Args:
        model: the shape.
        dtype: of the weights.
        folder: an existing folder.
        texts: what the tokenizer learns its pieces from, besides the made-up words.
    """
    from safetensors.torch import save_file

    source = RandomWeights(model.config, as_dtype(dtype), seed=model.seed)
    save_file({name: source[name] for name in source.names()}, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": dtype}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": None})
    tokenizer(model.text.vocab_size, texts).save_pretrained(folder)


def tokenizer(size: int, texts: Iterable[str]) -> Any:
    """A byte-level tokenizer of exactly `size` entries with a plain chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    trained = train_tokenizer([*texts, " ".join(WORDS)], min(size, VOCABULARY))
    made = json.loads(trained.to_str())
    vocabulary = made["model"]["vocab"]
    for index in range(len(vocabulary), size):
        vocabulary[f"\u0120w{index}"] = index  # a word of its own after a space, in the alphabet of byte-level pieces
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(made)), chat_template=_TEMPLATE)


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    """Train byte-level BPE on texts; at most `size` entries, with ids below `size`.

    Its pieces are like those of a real model, so that n-grams repeat as often.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def endless(model: Path, folder: Path) -> None:
    """The same model, by links, without ends of sequence: every answer is as long as it may be."""
    for file in model.iterdir():
        if file.name not in _CONFIGS:
            (folder / file.name).symlink_to(file.resolve())
            continue
        values = json.loads(file.read_text(encoding="utf-8"))
        _write(folder / file.name, {**values, "eos_token_id": None})


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
