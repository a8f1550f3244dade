"""Encoders of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.gguf.projectors import PreprocessorConfig
from shoal.model.layers.pictures import Picture
from shoal.model.packed.source import Source
from shoal.model.runner import ModelRunner
from shoal.model.senses import EncoderParts, Sense, Turn, loader

VISION = ("gemma3", "gemma4", "idefics3", "internvl", "lfm2_vl", "llama4", "llava", "llava_next", "mistral3",
          "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
"""Model types whose pictures Shoal reads."""
_PARTS = EncoderParts(
    "pictures", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    r"(?:^|\.)(?:vision_tower|vision_model|visual|multi_modal_projector|connector|embed_vision|image_newline)\b",
    "audio_config")


class Vision(Sense):
    """A model's encoder of pictures, and the pictures that it has read last.

    Args:
        load: makes the whole model without layers of its decoder, when the first picture comes.
        runner: of the decoder.
        place: folder or Hub id of the files, which say how pictures are prepared, or what a GGUF file says of that.
        token: the id that stands for each state of a picture.
        merge: how many rows, and columns, of patches a row of tokens is made of.
        mutual: whether tokens of a picture see one another.
        stand_in, prefix: see `Pictures`.
    """

    def __init__(
        self, load: Callable[[], Any], runner: ModelRunner, place: str | PreprocessorConfig, token: int, mutual: bool,
        merge: int, stand_in: int | None, prefix: bool
    ) -> None:
        super().__init__(load, runner, token)
        self.place, self.mutual, self.merge = place, mutual, merge
        self.stand_in, self.prefix = stand_in, prefix

    @override
    def _read(self, inputs: Mapping[str, Tensor], name: str, turn: Turn) -> Picture:
        if self.prefix and not hasattr(self.module.get_input_embeddings(), "embed_scale"):
            raise Unsupported("pictures for PaliGemma by this transformers", "it scales their states with the texts'",
                              "Update transformers")
        with turn():
            found = self.module.get_image_features(**inputs)
        deeper = tuple(map(_joined, getattr(found, "deepstack_features", None) or ()))
        states = found.pooler_output
        if states is None:  # Llama 4 projects what its encoder gives elsewhere
            states = self.module.multi_modal_projector(found.last_hidden_state)
        return Picture(_joined(states), name, self.grid(inputs), deeper)

    def grid(self, inputs: Mapping[str, Tensor]) -> tuple[int, int] | None:
        """Rows and columns of a picture's tokens, where these are turned by them."""
        if "image_grid_thw" not in inputs:
            return None
        _, rows, columns = inputs["image_grid_thw"][0].tolist()
        return rows // self.merge, columns // self.merge


def _joined(found: Tensor | Sequence[Tensor]) -> Tensor:
    """States [tokens, hidden] of one tensor, or of several."""
    each = [found] if isinstance(found, Tensor) else found
    return torch.cat([one.flatten(0, -2) for one in each])


def vision_of(
    config: Any, source: Source, runner: ModelRunner, place: str | PreprocessorConfig, check: Callable[[str, int], None]
) -> Vision | None:
    """The encoder of pictures of a model by its weights, in the runner's dtype; None where Shoal reads text alone.

    Args:
        check: called with what is read and its bytes before they are read; what it raises is raised.
    """
    load = loader(_PARTS, config, source, runner, check) if config.model_type in VISION else None
    if load is None:
        return None
    token = config.image_token_id if hasattr(config, "image_token_id") else config.image_token_index
    merge, text = getattr(config.vision_config, "spatial_merge_size", 1), config.get_text_config()
    mutual = config.model_type == "gemma3" or getattr(text, "use_bidirectional_attention", None) == "vision"
    stand_in = text.pad_token_id if getattr(text, "hidden_size_per_layer_input", None) else None
    return Vision(load, runner, place, int(token), mutual, merge, stand_in, config.model_type == "paligemma")
