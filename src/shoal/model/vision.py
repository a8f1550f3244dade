"""Encoders of pictures: what makes of a picture inputs of a decoder's first layer.

An encoder and what projects its states are the model's own modules of transformers, whose decoder is left out.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported, told_by_transformers
from shoal.model.gguf.projectors import PreprocessorConfig
from shoal.model.layers.pictures import Picture
from shoal.model.packed.source import Source
from shoal.model.runner import ModelRunner

VISION = ("gemma3", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next", "mistral3", "qwen2_5_vl", "qwen2_vl",
          "qwen3_vl", "smolvlm")
"""Model types whose pictures Shoal reads."""
_MUTUAL = ("gemma3",)
"""Those in which tokens of a picture see one another."""
_PARTS = re.compile(r"(?:^|\.)(?:vision_tower|vision_model|visual|multi_modal_projector|connector|image_newline)\b")
"""What names of an encoder's tensors, and of those that project its states, have and no others."""
_KEPT = 8
"""Pictures that were read last, which are not read again."""


class Vision:
    """A model's encoder of pictures, and the pictures that it has read last.

    Args:
        load: makes the whole model without layers of its decoder, when the first picture comes.
        runner: of the decoder.
        place: folder or Hub id of the files, which say how pictures are prepared, or what a GGUF file says of that.
        token: the id that stands for each state of a picture.
        merge: how many rows, and columns, of patches a row of tokens is made of.
        mutual: whether tokens of a picture see one another.
    """

    def __init__(
        self, load: Callable[[], Any], runner: ModelRunner, place: str | PreprocessorConfig, token: int, mutual: bool,
        merge: int
    ) -> None:
        self._load, self._runner, self.place = load, runner, place
        self.token, self.mutual, self.merge = token, mutual, merge
        self._known: OrderedDict[str, Picture] = OrderedDict()

    @cached_property
    def module(self) -> Any:
        """The model without its decoder; Unsupported if a tensor is missing or does not fit."""
        return self._load()

    @property
    def nbytes(self) -> int:
        """Bytes of its weights once a picture has come, and of the pictures that it keeps."""
        weights = sum(one.nbytes for one in self.module.parameters()) if "module" in vars(self) else 0
        return weights + sum(one.states.nbytes for one in self._known.values())

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> Picture:
        """Read a picture, or find it among the last ones.

        Args:
            inputs: what the model's processor of pictures makes of one, such as `pixel_values`.
        """
        parts = [f"{key} {one.dtype} {list(one.shape)}".encode() + one.contiguous().numpy().tobytes()
                 for key, one in sorted(inputs.items())]
        name = hashlib.sha256(b"".join(parts)).hexdigest()
        if name not in self._known:
            dtype, device = self._runner.dtype, self._runner.device
            given = {key: one.to(device, dtype if one.is_floating_point() else None) for key, one in inputs.items()}
            found = self.module.get_image_features(**given)
            deeper = tuple(map(_joined, getattr(found, "deepstack_features", None) or ()))
            self._known[name] = Picture(_joined(found.pooler_output), name, self.grid(inputs), deeper)
        self._known.move_to_end(name)
        picture = self._known[name]
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return picture


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
    config: Any, source: Source, runner: ModelRunner, place: str | PreprocessorConfig, check: Callable[[int], None]
) -> Vision | None:
    """The encoder of pictures of a model by its weights, in the runner's dtype; None where Shoal reads text alone.

    Args:
        check: called with the bytes of its weights before they are read; what it raises is raised.
    """
    names = [name for name in source.names() if _PARTS.search(name)] if config.model_type in VISION else []
    text = config.get_text_config()
    if not names or getattr(text, "embedding_multiplier", 1.0) != 1.0 or getattr(text, "use_sliding_window", False):
        return None
    token = config.image_token_id if hasattr(config, "image_token_id") else config.image_token_index

    def load() -> Any:
        return _module(config, source, names, runner, check)

    merge = getattr(config.vision_config, "spatial_merge_size", 1)
    return Vision(load, runner, place, int(token), config.model_type in _MUTUAL, merge)


def _module(
    config: Any, source: Source, names: Sequence[str], runner: ModelRunner, check: Callable[[int], None]
) -> Any:
    """The model with an encoder of these tensors and a decoder without layers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as CLASSES

    kind, small = CLASSES[type(config)], _without_layers(config)
    with torch.device("meta"):
        size = sum(one.numel() for one in kind(small).parameters())
    check(size * runner.dtype.itemsize)
    what = f"the encoder of pictures of model type {config.model_type!r}"
    with told_by_transformers(what):
        state = {name: source[name].to(runner.dtype) for name in names}
    if size > 2 * (held := sum(one.numel() for one in state.values())):
        raise Unsupported(f"an encoder of pictures of {size} numbers", f"the checkpoint has {held} of them",
                          "Fetch the model again")
    with told_by_transformers(what), _unreported():
        module, told = kind.from_pretrained(
            None, config=small, state_dict=state, dtype=runner.dtype, output_loading_info=True,
            ignore_mismatched_sizes=True)
    absent = sorted(name for name in told["missing_keys"] if _PARTS.search(name))
    if absent:
        raise Unsupported(f"a checkpoint without {absent[0]}", "its encoder of pictures needs all of its tensors",
                          "Fetch the model again")
    odd = sorted(str(one[0]) for one in told["mismatched_keys"] if _PARTS.search(str(one[0])))
    if odd:
        raise Unsupported(f"a checkpoint in which {odd[0]} is of another shape", "its config says which",
                          "Fetch the model again")
    return module.to(runner.device).eval()


@contextmanager
def _unreported() -> Iterator[None]:
    """Say nothing of the decoder's tensors, which are left out on purpose."""
    from transformers.utils import logging

    former, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(former)
        if bars:
            logging.enable_progress_bar()


def _without_layers(config: Any) -> Any:
    """The config of a model whose decoder has no layer and no vocabulary."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    return small
