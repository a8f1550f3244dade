"""Encoders of pictures, which read films frame by frame."""

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
        config: of the model.

    Attributes:
        mutual: whether tokens of a picture see one another.
        stand_in, prefix: see `Pictures`.
    """

    def __init__(
        self, load: Callable[[], Any], runner: ModelRunner, place: str | PreprocessorConfig, config: Any
    ) -> None:
        token = config.image_token_id if hasattr(config, "image_token_id") else config.image_token_index
        super().__init__(load, runner, int(token))
        self.place, self.model_type = place, str(config.model_type)
        self.config, self.sight = config, config.vision_config
        text, self.merge = config.get_text_config(), getattr(self.sight, "spatial_merge_size", 1)
        self.mutual = self.model_type == "gemma3" or getattr(text, "use_bidirectional_attention", None) == "vision"
        self.stand_in = text.pad_token_id if getattr(text, "hidden_size_per_layer_input", None) else None
        self.prefix = self.model_type == "paligemma"
        self.together = int(getattr(self.sight, "temporal_patch_size", 1))

    @override
    def _read(self, inputs: Mapping[str, Tensor], name: str, turn: Turn) -> Picture:
        if self.prefix and not hasattr(self.module.get_input_embeddings(), "embed_scale"):
            raise Unsupported("pictures for PaliGemma by this transformers", "it scales their states with the texts'",
                              "Update transformers")
        if "frames" in inputs:
            return self._film(inputs, name, turn)
        with turn():
            states, deeper = self._states(inputs)
        return Picture(states, name, self.grid(inputs), deeper)

    def _states(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        found = self.module.get_image_features(**self._fitted(inputs))
        states = found.pooler_output
        if states is None:  # Llama 4 projects what its encoder gives elsewhere
            states = self.module.multi_modal_projector(found.last_hidden_state)
        return _joined(states), tuple(map(_joined, getattr(found, "deepstack_features", None) or ()))

    def _film(self, inputs: Mapping[str, Tensor], name: str, turn: Turn) -> Picture:
        """Of what `shoal.engine.films` prepares, a step in time after the other: none of them sees another."""
        found, made = list[tuple[Tensor, tuple[Tensor, ...]]](), dict[str, Tensor]()
        for frames in inputs["frames"].split(self.together):
            made = self._prepared(frames, inputs["colours"])
            with turn():
                found.append(self._states(made))
        deeper = tuple(map(torch.cat, zip(*(deep for _, deep in found), strict=True)))
        return Picture(torch.cat([states for states, _ in found]), name, self.grid(made), deeper, int(inputs["token"]),
                       tuple(inputs["times"].tolist()), bool(inputs["apart"]))

    def _prepared(self, frames: Tensor, colours: Tensor) -> dict[str, Tensor]:
        """What the encoder reads of frames that are seen as one, uint8 [frames, 3, H, W].

        Args:
            colours: mean and deviation of each colour [2, 3], of values in 0..255.
        """
        mean, deviation = colours[:, None, :, None, None].float()
        values = (frames.float() - mean) / deviation
        if hasattr(self.sight, "spatial_merge_size"):
            return _patches(values, self.sight.patch_size, self.merge)
        return {"pixel_values": values} if self.model_type == "internvl" else {"pixel_values": values[None]}

    def grid(self, inputs: Mapping[str, Tensor]) -> tuple[int, int] | None:
        """Rows and columns of a picture's tokens, where these are turned by them."""
        if "image_grid_thw" not in inputs:
            return None
        _, rows, columns = inputs["image_grid_thw"][0].tolist()
        return rows // self.merge, columns // self.merge


def _patches(values: Tensor, side: int, merge: int) -> dict[str, Tensor]:
    """What Qwen's encoders read of frames that are seen as one, as transformers' video processors make it.

    Args:
        values: [frames, 3, H, W].
        side: pixels of a patch's side.
        merge: patches of the side of a square whose patches stand side by side.
    """
    rows, columns = (size // side for size in values.shape[2:])
    each = values.view(len(values), 3, rows // merge, merge, side, columns // merge, merge, side)
    patches = each.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}


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
    return None if load is None else Vision(load, runner, place, config)
