"""A layer for further tokens with random weights in a tiny model's files, and what it guesses by its modules.

Any such layer must leave the output as it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from backends import reference
from eagle_part import GuessReference, LayerReference
from families import VOCAB, tiny
from shoal.engine.engine import Engine
from shoal.model.mtp import MtpLayer, mtp_of
from shoal.model.packed.source import TensorSource

Style = Literal["numbered", "apart", "mimo", "mimo_v2"]
"""Names as in DeepSeek's and GLM's files, behind the model's own layers, or as in Qwen's or MiMo's, apart from them."""
_ENDS = {"numbered": ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"),
         "apart": ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"),
         "mimo": ("input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight"),
         "mimo_v2": ("eh_proj.weight", "enorm.weight", "hnorm.weight", "final_layernorm.weight")}


def starts(style: Style, layers: int, number: int = 0) -> tuple[str, str]:
    """What names begin with around a further layer and in it, in the files of a model of so many layers."""
    if style == "apart":
        return "mtp.", f"mtp.layers.{number}."
    start = {"numbered": f"model.layers.{layers + number}.", "mimo": f"model.mtp_layers.{number}.",
             "mimo_v2": f"model.mtp.layers.{number}."}[style]
    return start, start


def layer_tensors(family: str, style: Style, count: int = 1) -> dict[str, Tensor]:
    """Tensors of layers as they stand in the files of a family's model: of other models the last that attends."""
    held = dict[str, Tensor]()
    for number in range(count):
        held |= as_further_layer(tiny(family, seed=7 + number), style, number)
    return held


def as_further_layer(model: PreTrainedModel, style: Style, number: int = 0) -> dict[str, Tensor]:
    """The last layer of a model that attends, and what is around a layer for further tokens, drawn."""
    tensors, count, hidden = model.state_dict(), model.config.num_hidden_layers, model.config.hidden_size
    attends = [place for place in range(count) if f"model.layers.{place}.self_attn.o_proj.weight" in tensors]
    start = f"model.layers.{attends[-1]}."
    before, inner = starts(style, count, number)
    generator = torch.Generator().manual_seed(3 if style == "apart" else 3 + number)  # there layers share it
    join = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator, dtype=torch.float64)
    norms = (0.5 + torch.rand(3, hidden, generator=generator, dtype=torch.float64)).unbind()
    around = dict(zip(_ENDS[style], (join, *norms), strict=True))
    own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    return {**{inner + name: tensor for name, tensor in own.items()},
            **{before + name: tensor.to(model.dtype) for name, tensor in around.items()}}


def mtp_beside(family: str, style: Style = "numbered", count: int = 1) -> MtpLayer:
    """The layers beside a family's model, from memory."""
    model = reference(family)
    found = mtp_of(model.config, TensorSource({**model.state_dict(), **layer_tensors(family, style, count)}))
    assert found is not None and len(found.further) == count - 1
    return found


def with_layer(engine: Engine, family: str, count: int = 1) -> Engine:
    """The engine of a family's model, which brings such layers from now on."""
    model = tiny(family)
    tensors = {**model.state_dict(), **layer_tensors(family, "numbered", count)}
    engine.mtp = lambda: mtp_of(model.config, TensorSource(tensors))
    return engine


def write_model(
    folder: Path, family: str, style: Style, dtype: torch.dtype = torch.float32, count: int = 1
) -> Path:
    """A family's model with such layers as a checkpoint, which transformers reads without them."""
    tiny(family, dtype=dtype).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    extra = {name: tensor.to(dtype).contiguous() for name, tensor in layer_tensors(family, style, count).items()}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    return folder


def write_in_8_bits(folder: Path, family: str, style: Style, wider: bool = False) -> dict[str, Tensor]:
    """Such a checkpoint whose projections are FP8 numbers; returns what these stand for, by their names.

    Args:
        wider: as the text part of a model that sees pictures, as Qwen3.5 is published.
    """
    (file,) = write_model(folder, family, style).glob("*.safetensors")
    held, expected = load_file(file), dict[str, Tensor]()
    for name in [one for one in held if one.endswith("_proj.weight") and "eh_proj" not in one]:
        scale = (held[name].abs().max() / 448).reshape(1, 1)
        held[name] = (held[name] / scale).to(torch.float8_e4m3fn)
        expected[name], held[f"{name}_scale_inv"] = held[name].float() * scale, scale
    config = json.loads((folder / "config.json").read_text())
    if wider:
        held = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in held.items()}
        config = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config,
                  "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    save_file(held, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return expected


class MtpReference(LayerReference):
    """A layer as the last one of a model of one layer."""

    def __init__(self, family: str, style: Style = "numbered", number: int = 0) -> None:
        model, tensors = reference(family), layer_tensors(family, style, number + 1)
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"]
        for name in ("mlp_layer_types", "first_k_dense_replace"):
            if hasattr(config, name):
                setattr(config, name, 0 if name.startswith("first") else ["sparse"])
        before, inner = starts(style, model.config.num_hidden_layers, number)
        join, embedding_norm, state_norm, norm = (tensors[before + end] for end in _ENDS[style])
        layer = AutoModelForCausalLM.from_config(config).double().eval().model
        held = {f"layers.0.{name.removeprefix(inner)}": tensor for name, tensor in tensors.items()
                if name.startswith(inner)}
        held["norm.weight"] = norm
        assert set(layer.state_dict()) - set(held) <= {"embed_tokens.weight"}
        layer.load_state_dict(held, strict=False)
        shift = 1.0 if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next") else 0.0
        both = join.split(join.shape[0], 1)
        state_first = torch.cat(both if style == "mimo" else both[::-1], 1)
        super().__init__(model, layer, state_first, [state_norm + shift, embedding_norm + shift],
                         config.rms_norm_eps, torch.arange(VOCAB))


class ChainReference(GuessReference):
    """Several layers, each run over a whole text with what the one before it says, and for each guess anew."""

    def __init__(self, family: str, style: Style, count: int) -> None:
        self._layers = [MtpReference(family, style, number) for number in range(count)]

    @torch.no_grad()
    @override
    def most_probable(
        self, tokens: list[int], guesses: Sequence[int], bias: Mapping[int, float], count: int
    ) -> list[int]:
        text = [*tokens, *guesses]
        states = self._layers[0].states_of(tokens[:-1])
        for number, layer in enumerate(self._layers):
            said = layer.says(states, text[number + 1 :])
            if number == len(guesses):
                break
            states, read = said, states
        for _ in range(len(self._layers) - 1, len(guesses)):
            read = torch.cat([read, said[-1:]])
            said = layer.says(read, text[number + 1 :])
        return self._layers[0].likeliest(said[-1], bias, count)
