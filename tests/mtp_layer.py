"""A layer for further tokens with random weights in a tiny model's files, and what it guesses by its modules.

Any such layer must leave the output as it is.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from backends import reference
from eagle_part import LayerReference
from families import VOCAB, tiny
from shoal.model.mtp import MtpLayer, mtp_of
from shoal.model.packed.source import TensorSource

Style = Literal["numbered", "apart"]
"""Names as in DeepSeek's and GLM's files, behind the model's own layers, or as in Qwen's, apart from them."""
_ENDS = {"numbered": ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"),
         "apart": ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")}


@functools.cache
def layer_of(family: str) -> PreTrainedModel:
    """A model whose last layer with attention is the layer for further tokens."""
    return tiny(family, seed=7)


def layer_tensors(family: str, style: Style) -> dict[str, Tensor]:
    """The layer's tensors as they stand in the files of a family's model."""
    tensors = layer_of(family).state_dict()
    count = layer_of(family).config.num_hidden_layers
    attends = [place for place in range(count) if f"model.layers.{place}.self_attn.o_proj.weight" in tensors]
    start = f"model.layers.{attends[-1]}."
    own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    before = f"model.layers.{count}." if style == "numbered" else "mtp."
    inner = before if style == "numbered" else f"{before}layers.0."
    hidden = layer_of(family).config.hidden_size
    generator = torch.Generator().manual_seed(3)
    join = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator, dtype=torch.float64)
    norms = (0.5 + torch.rand(3, hidden, generator=generator, dtype=torch.float64)).unbind()
    around = dict(zip(_ENDS[style], (join, *norms), strict=True))
    return {**{inner + name: tensor for name, tensor in own.items()},
            **{before + name: tensor.to(tensors["model.norm.weight"].dtype) for name, tensor in around.items()}}


def mtp_beside(family: str, style: Style = "numbered") -> MtpLayer:
    """The layer beside a family's model, from memory."""
    model = reference(family)
    found = mtp_of(model.config, TensorSource({**model.state_dict(), **layer_tensors(family, style)}))
    assert found is not None
    return found


def write_model(folder: Path, family: str, style: Style, dtype: torch.dtype = torch.float32) -> Path:
    """A family's model with such a layer as a checkpoint, which transformers reads without the layer."""
    tiny(family, dtype=dtype).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    extra = {name: tensor.to(dtype).contiguous() for name, tensor in layer_tensors(family, style).items()}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    return folder


class MtpReference(LayerReference):
    """The layer as the last one of a model of one layer."""

    def __init__(self, family: str, style: Style = "numbered") -> None:
        model, tensors = reference(family), layer_tensors(family, style)
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"]
        for name in ("mlp_layer_types", "first_k_dense_replace"):
            if hasattr(config, name):
                setattr(config, name, 0 if name.startswith("first") else ["sparse"])
        before = f"model.layers.{model.config.num_hidden_layers}." if style == "numbered" else "mtp."
        join, embedding_norm, state_norm, norm = (tensors[before + end] for end in _ENDS[style])
        inner = before if style == "numbered" else f"{before}layers.0."
        layer = AutoModelForCausalLM.from_config(config).double().eval().model
        held = {f"layers.0.{name.removeprefix(inner)}": tensor for name, tensor in tensors.items()
                if name.startswith(inner)}
        held["norm.weight"] = norm
        assert set(layer.state_dict()) - set(held) <= {"embed_tokens.weight"}
        layer.load_state_dict(held, strict=False)
        shift = 1.0 if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next") else 0.0
        both = join.split(join.shape[0], 1)
        super().__init__(model, layer, torch.cat(both[::-1], 1), [state_norm + shift, embedding_norm + shift],
                         config.rms_norm_eps, torch.arange(VOCAB))
