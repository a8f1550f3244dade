"""The model that is measured: a shape with random weights, or a model from files. Cheap to send to another process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import shown_name
from shoal.engine.loading.device import default_dtype
from shoal.errors import Unsupported
from shoal.model.config import windows_of
from shoal.model.packed.kinds import LLAMA, MODELS
from shoal.model.packed.shape import shape_of
from shoal_lab.bench import gguf_facts, shapes

FILE = "file"
"""Format of a GGUF file's own weights."""

_COUNTED = tuple(kind for kind in LLAMA if all(layer.gated_mlp for layer in LLAMA[kind].layers.values()))
"""Model types whose layers hold the seven matrices that are counted here. Of a GGUF file those of its layers are."""

if TYPE_CHECKING:
    from shoal.model.packed.source import Source


@dataclass(frozen=True)
class MeasuredModel:
    """A shape or a model from files; exactly one of them is given.

    Attributes:
        shape: a name in `shapes.SHAPES`.
        model: folder, Hub id or `.gguf` file.
        revision: branch, tag or commit of `model`.
        trust_remote_code: whether the model's own Python code may run.
        seed: of a shape's weights.
        dequantised: folder with the weights of a `.gguf` file as safetensors, for formats other than its own.
    """

    shape: str | None = None
    model: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    seed: int = 0
    dequantised: str | None = None

    def __post_init__(self) -> None:
        if (self.shape is None) == (self.model is None):
            raise ValueError(f"shape is {self.shape!r} and model {self.model!r}; give exactly one of them")
        if self.shape is not None:
            shapes.config_of(self.shape)

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.shape or str(self.model)

    @cached_property
    def config(self) -> Any:
        """The transformers config."""
        return shapes.config_of(self.shape) if self.shape is not None else self._files().config()

    @property
    def text(self) -> Any:
        """The decoder's config."""
        return self.config.get_text_config()

    @property
    def is_file(self) -> bool:
        """Whether it is a GGUF file."""
        return str(self.model).endswith(".gguf")

    @cached_property
    def file(self) -> gguf_facts.Facts:
        """Facts of the GGUF file. Slow to read, so the parent process reads them once for all."""
        return gguf_facts.read(str(self.model))

    def _files(self) -> Any:
        from shoal.engine.loading.checkpoint import Checkpoint

        return Checkpoint(self.dequantised or str(self.model), self.revision, self.trust_remote_code)

    def tokenizer(self) -> Any:
        """The model's own tokenizer, or None."""
        return self._files().tokenizer()

    def source(self, dtype: torch.dtype, device: str = "cpu") -> Source:
        """The weights by name.

        Raises:
            Unsupported: the model's weights are not in safetensors files.
        """
        if self.shape is not None:
            return shapes.RandomWeights(self.config, dtype, device, self.seed)
        source = self._files().weights()
        if source is None:
            raise Unsupported(f"the weights of {self.name}", "they are not in safetensors files", "Convert the model")
        return cast("Source", source)

    def hf_model(self, dtype: torch.dtype, device: str = "cpu") -> Any:
        """The transformers model; transformers itself reads and dequantises a GGUF file."""
        if self.shape is not None:
            return shapes.model_of(self.config, shapes.RandomWeights(self.config, dtype, device, self.seed), dtype)
        if self.is_file and self.dequantised is None:
            from transformers import AutoModelForCausalLM

            file = Path(str(self.model))
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
            return model.to(device).eval()
        return self._files().model(dtype).to(device).eval()

    def engine(self, dtype: torch.dtype, device: str, backend: Any, quant: Any) -> Engine:
        """Shoal's engine; a shape's weights are packed directly unless `backend` is "hf".

        For a GGUF file, `quant` "file" loads the file itself, and any other one the dequantised folder if there is
        one. The default dtype is left to `load`, as a user leaves it.
        """
        place = self.model if quant == FILE else self.dequantised or self.model
        quant = None if quant == FILE else quant
        if quant is not None and backend == "hf":
            what = f"quant={quant!r} with backend 'hf'"
            raise Unsupported(what, "it runs the model's own weights", 'Use backend "packed"')
        if self.model is not None:
            from shoal.engine.loading.load import load

            usual = quant is None and place == self.model and dtype == default_dtype(torch.device(device))
            return load(place, dtype=None if usual else dtype, device=device, backend=backend, quant=quant,
                        revision=self.revision, trust_remote_code=self.trust_remote_code)
        if backend != "hf":
            from shoal.engine.loading.load import open_extra
            from shoal.model.packed.build import build

            runner = build(self.config, self.source(dtype, device), dtype, torch.device(device), quant)
            return Engine(runner, model_name=self.name, open_model=open_extra)
        from shoal.engine.loading.load import engine_for

        return engine_for(self.hf_model(dtype, device), name=self.name, backend="hf")

    def check(self) -> None:
        """Refuse a model whose bytes cannot be counted; Unsupported."""
        known = [*MODELS] if self.is_file else _COUNTED
        if self.text.model_type not in known:
            raise Unsupported(
                f"a benchmark of model type {self.text.model_type!r}",
                "the bytes that a step reads are counted for Llama-shaped models alone, and for GGUF files",
                f"Use one of {', '.join(known)}, or a shape",
            )
        if self.is_file:
            self.file  # noqa: B018 (read here, before the processes start, which inherit it)

    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer."""
        return windows_of(self.text)

    def full_plan(self) -> DepthPlan:
        """The plan that runs every layer."""
        return DepthPlan.full(self.text.num_hidden_layers)

    def layer_weights(self) -> int:
        """Weights in the matrices of one layer, their mean in a GGUF file."""
        if self.is_file:
            count: int = self.text.num_hidden_layers
            return self.file.layer_weights // count
        c, head_dim = self.text, self._head_dim()
        attention = 2 * c.hidden_size * head_dim * (c.num_attention_heads + c.num_key_value_heads)
        total: int = attention + 3 * c.hidden_size * c.intermediate_size
        return total

    def head_weights(self) -> int:
        """Weights of the LM head."""
        size: int = self.text.vocab_size * self.text.hidden_size
        return size

    def weights(self) -> int:
        """Weights in all matrices; a tied LM head counts once."""
        layers: int = self.text.num_hidden_layers
        return layers * self.layer_weights() + self.table_weights()

    def table_weights(self) -> int:
        """Weights of embedding and LM head; a tied one counts once."""
        return (1 if self.text.tie_word_embeddings else 2) * self.head_weights()

    def kv_entries(self) -> int:
        """Numbers that one layer stores per position; their mean over the layers."""
        if not self.is_file:
            return 2 * int(self.text.num_key_value_heads) * self._head_dim()
        shape = shape_of(self.text)
        stored = (shape.kv_sizes(layer) for layer in range(shape.num_layers))
        return sum(heads * (keys + values) for heads, keys, values in stored) // shape.num_layers

    def _head_dim(self) -> int:
        size: int = getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads
        return size

    def facts(self) -> Iterator[tuple[str, Any]]:
        """The fields of a report."""
        yield "name", self.shape or shown_name(str(self.model))
        model = "GGUF file" if self.is_file else "model"
        yield "kind", "shape with random weights" if self.shape is not None else model
        if self.is_file:
            yield "file", self.file.to_dict()
        yield "weights", self.weights()
        for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
                    "num_key_value_heads", "vocab_size", "tie_word_embeddings"):
            yield key, getattr(self.text, key, None)
