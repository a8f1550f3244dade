"""Drafters of DFlash that others have trained (arXiv 2602.06036): what their files say.

Layers of Qwen3's kind. Of the model they read what leaves some of its layers, joined by one matrix and normed, which
every layer's k and v are made of. The block that they fill is the last token and masks. In z-lab's layout, by which
SGLang and vLLM go, embeddings and head are the model's; in that of `speculators` they may be the drafter's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from typing_extensions import override

from shoal.model.packed.shape import Shape
from shoal.model.packed.source import TensorSource
from shoal.model.runner import ModelRunner
from shoal.speculative.drafter_files import DrafterFiles
from shoal.speculative.layers_checkpoint import LayersCheckpoint

MOST = 60
"""Most guesses of a block."""
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""What of a config says which layers attend to a window, as transformers reads it."""


@dataclass(frozen=True)
class DFlashCheckpoint(LayersCheckpoint):
    """A drafter of DFlash, read from its files.

    Raises:
        ValueError: a file is missing or cannot be read.
        Unsupported: it is of a form that Shoal does not run, or its tensors do not fit together.
    """

    def __post_init__(self) -> None:
        files = self.files
        if files.kind not in (None, "dflash"):
            raise files.refusal(f"it is of kind {files.kind!r}; of drafters in this form dflash is read")
        found = files.size("fc.weight")
        if len(found) != 2 or found[0] != self.hidden or found[1] % self.target_hidden:
            raise files.refusal(f"its tensor 'fc.weight' is {list(found)}; its config asks for {self.hidden} rows, and "
                                f"{self.target_hidden} columns for each layer that it reads")
        files.check_held([*self.wanted(), "norm.weight", "hidden_norm.weight"])
        if not self.whole:
            files.check_held(["lm_head.weight"])
        if not 1 <= self.guesses <= MOST:
            raise files.refusal(f"its block has {self.block} places; it must guess 1 to {MOST} tokens")

    def _told(self, name: str) -> Any:
        """What its config says, at the top or in `dflash_config`."""
        inner = self.files.config.get("dflash_config")
        told = self.files.config.get(name)
        return inner.get(name) if told is None and isinstance(inner, dict) else told

    def _whole_number(self, name: str, least: int, below: int | None = None) -> int:
        told = self._told(name)
        if not isinstance(told, int) or told < least or (below is not None and told >= below):
            most = "" if below is None else f" and below {below}"
            raise self.files.refusal(f"its config says that {name} is {told!r}; it must be a whole number of at least "
                                     f"{least}{most}")
        return told

    @cached_property
    def block(self) -> int:
        """Places of a block: the last token's and those of the masks."""
        return self._whole_number("block_size", 2)

    @property
    def from_last(self) -> bool:
        """Whether each place guesses the token after it, the last token's the next one; else masks guess their own."""
        return self.flag("sample_from_anchor")

    @property
    def guesses(self) -> int:
        """Tokens that a block guesses."""
        return self.block - (not self.from_last)

    @cached_property
    def mask(self) -> int:
        """The token that stands for one to be guessed."""
        return self._whole_number("mask_token_id", 0, self.vocabulary)

    @cached_property
    def states(self) -> int:
        """How many states `join` reads beside each other."""
        return self.files.size("fc.weight")[1] // self.target_hidden

    @override
    def check(self, target: ModelRunner) -> None:
        super().check(target)
        told = self.files.config.get("num_target_layers")
        if told not in (None, target.num_layers):
            raise self.files.refusal(f"it is for a model of {told} layers; this one has {target.num_layers}")

    @override
    def taps(self, num_layers: int) -> tuple[int, ...]:
        """The model's layers whose inputs are read.

        z-lab's configs give them by what leaves them, or leave the choice to a rule; those of `speculators` by what
        enters them.
        """
        entered = self.files.config.get("aux_hidden_state_layer_ids")
        left = self._told("target_layer_ids")
        if entered is None:
            entered = [layer + 1 for layer in left or spread(num_layers, self.files.number("num_hidden_layers"))]
        fit = all(isinstance(layer, int) and 0 <= layer < num_layers for layer in entered)
        if not fit or len(entered) != self.states or sorted({*entered}) != [*entered]:
            raise self.files.refusal(f"it reads what enters {self.states} layers, here {[*entered]}; they must be "
                                     f"ascending, of the model's layers 0 to {num_layers - 1}")
        return tuple(entered)

    @override
    def layered(self) -> dict[str, Any]:
        count, layer = self.files.number("num_hidden_layers"), self.files.layer
        types = layer.get("layer_types")
        if types and len(types) != count:
            raise self.files.refusal(f"its config has {count} layers, and types of {len(types)}")
        return {"num_hidden_layers": count, **{name: layer[name] for name in _WINDOWS if layer.get(name) is not None}}

    @override
    def shaped(self, shape: Shape) -> Shape:
        """With windows in which a place of the block sees none after it, unless the config of `speculators` says so."""
        ahead = self.files.kind is None or self.flag("sliding_window_non_causal")
        return replace(shape, windows_ahead=ahead)

    @override
    def source(self) -> TensorSource:
        files = self.files
        held = {f"model.{name}": files.take(name, *files.size(name)) for name in self.wanted()}
        held["model.norm.weight"] = files.take("norm.weight", self.hidden)
        return TensorSource({**held, "model.embed_tokens.weight": self.rows_of_head()})

    def join(self) -> tuple[Tensor, Tensor]:
        """The matrix [D, states x target's D] that joins states, and the weight [D] of the norm after it; float32."""
        whole = self.files.take("fc.weight", self.hidden, self.states * self.target_hidden)
        return whole.float(), self.files.take("hidden_norm.weight", self.hidden).float()


def spread(num_layers: int, count: int) -> list[int]:
    """The layers that a drafter of `count` layers reads the outputs of if its config names none: z-lab's rule."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + place * (num_layers - 4) / (count - 1)) for place in range(count)]


def read(folder: str) -> DFlashCheckpoint:
    """The drafter in a folder; raises what `DFlashCheckpoint` and `DrafterFiles` do."""
    return DFlashCheckpoint(DrafterFiles(folder))
