"""The config of SambaY models, which transformers lacks: Phi-4-mini-flash (`phi4flash`), as it was published.

From the paper (arXiv 2507.06607, section 2 and figure 1): a self-decoder of Mamba-1 and sliding windows by turns, one
layer of full attention, whose keys and values are the only ones of the whole text, and a cross-decoder in which gated
memory units, which read the memory of the last Mamba, alternate with attention to those keys and values. No positions
are encoded. All attention is differential. From the published configuration and its index of tensors: which layers
these are by number, LayerNorms with biases, biases of attention, the form of the MLP, and all names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from shoal.errors import Unsupported


class Phi4FlashConfig(PreTrainedConfig):  # type: ignore[misc]  # it comes without types
    """Sizes of a SambaY model of L layers; the fields are those of the published `config.json`.

    Layers 0, 2, ..., L/2 are Mamba, 1, 3, ..., L/2 - 1 attention with a sliding window, L/2 + 1 is full attention. Of
    those after it the even ones are gated memory units, the odd ones attention to the keys and values of L/2 + 1.

    Args:
        sliding_window: positions that a query sees in a layer with a window, its own included; or a list with that of
            each layer and None for the others, as the published code writes it down.
        mb_per_layer: every so many layers one is Mamba or a gated memory unit: 2.
        rope_theta: has no effect, since nothing is rotated; the published code writes it down all the same.
        **others: those of every config.

    Raises:
        ValueError: the layers or heads do not come out even.
    """

    model_type = "phi4flash"

    def __init__(
        self, vocab_size: int = 200064, hidden_size: int = 2560, intermediate_size: int = 10240,
        num_hidden_layers: int = 32, num_attention_heads: int = 40, num_key_value_heads: int | None = 20,
        hidden_act: str = "silu", max_position_embeddings: int = 262144, layer_norm_eps: float = 1e-5,
        sliding_window: int | Sequence[int | None] = 512, mb_per_layer: int = 2, mamba_d_state: int = 16,
        mamba_d_conv: int = 4, mamba_expand: int = 2, mamba_dt_rank: int | str = "auto", mamba_conv_bias: bool = True,
        mamba_proj_bias: bool = False, rope_theta: float = 10000.0, tie_word_embeddings: bool = True, **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.hidden_act, self.max_position_embeddings = hidden_act, max_position_embeddings
        self.layer_norm_eps, self.mb_per_layer, self.rope_theta = layer_norm_eps, mb_per_layer, rope_theta
        self.mamba_d_state, self.mamba_d_conv, self.mamba_expand = mamba_d_state, mamba_d_conv, mamba_expand
        self.mamba_dt_rank = math.ceil(hidden_size / 16) if mamba_dt_rank == "auto" else mamba_dt_rank
        self.mamba_conv_bias, self.mamba_proj_bias = mamba_conv_bias, mamba_proj_bias
        self._check()
        self.sliding_window = self._window(sliding_window)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    def _check(self) -> None:
        layers, heads, kv_heads = self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads
        if self.mb_per_layer != 2:
            raise ValueError(f"mb_per_layer is {self.mb_per_layer}; it must be 2, Mamba and attention by turns. "
                             "Correct config.json")
        if layers < 4 or layers % 4:
            raise ValueError(f"num_hidden_layers is {layers}; it must be a multiple of 4, so that a self-decoder and a "
                             "cross-decoder are of one length. Correct config.json")
        if heads % 2 or kv_heads % 2 or heads % kv_heads or self.hidden_size % heads:
            raise ValueError(f"num_attention_heads is {heads} and num_key_value_heads {kv_heads} at hidden_size "
                             f"{self.hidden_size}; heads come in pairs, so both must be even, num_key_value_heads must "
                             "divide num_attention_heads, and that hidden_size. Correct config.json")

    def _window(self, window: int | Sequence[int | None]) -> int:
        """The one window of a list with those of all layers."""
        if isinstance(window, int):
            return window
        sizes = {size for size in window if size is not None}
        fits = [size is not None for size in window] == [kind == "sliding_attention" for kind in self.own_layer_types]
        if len(sizes) != 1 or not fits:
            raise ValueError(f"sliding_window is {list(window)}; it must be one number, or a list with that number for "
                             f"layers 1, 3, ..., {self.num_hidden_layers // 2 - 1} and null for the others. Correct "
                             "config.json")
        return sizes.pop()

    @property
    def own_layer_types(self) -> list[str]:
        """The type of each layer: transformers' names, and "gated_memory" and "cross_attention"."""
        half = self.num_hidden_layers // 2
        pairs = [("linear_attention", "sliding_attention")] * (half // 2) + [("linear_attention", "full_attention")]
        pairs += [("gated_memory", "cross_attention")] * (half // 2 - 1)
        return [kind for pair in pairs for kind in pair]


OWN_CONFIGS: Mapping[str, type[PreTrainedConfig]] = MappingProxyType({"phi4flash": Phi4FlashConfig})
"""Configs of the model types that transformers lacks, and of which there are no modules: they run packed."""


def check_modules(config: Any, what: str, remedy: str = 'Use backend="packed"') -> None:
    """Refuse, by Unsupported, what needs modules where there are none."""
    if config.model_type in OWN_CONFIGS:
        why = "transformers has no modules of it, and Shoal runs it packed, without the code that came with it"
        raise Unsupported(f"{what} of model type {config.model_type!r}", why, remedy)
