"""Random assistants of Gemma 4 for tiny models, and what they guess by transformers' modules."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from backends import reference
from eagle_part import GuessReference
from families import HIDDEN, tiny

HAS = importlib.util.find_spec("transformers.models.gemma4_assistant") is not None
NEEDS = pytest.mark.skipif(not HAS, reason="early transformers 5")
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def assistant(
    family: str, clusters: bool = False, hidden: int = 16, backbone: int = HIDDEN, **sizes: int
) -> PreTrainedModel:
    """An assistant for a family's model, in float64; `sizes` are those of the model's config that are others.

    transformers 5.23 refuses layers that all read another model's keys (`kv_sharing_modes`), so it is told here.
    """
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    text = tiny(family).config.to_dict() | {
        "model_type": "gemma4_text", "hidden_size": hidden, "num_hidden_layers": 3, "layer_types": [*KINDS],
        "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False, "enable_moe_block": False, "global_head_dim": 16, "attention_k_eq_v": False,
        **sizes}
    text.pop("per_layer_config", None)
    own = Gemma4TextConfig.kv_sharing_modes
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(
            lambda config: ["reuse"] * 3 if config.num_kv_shared_layers == 3 == config.num_hidden_layers
            else own.fget(config)))
        torch.manual_seed(4)
        groups = {"use_ordered_embeddings": True, "num_centroids": 97, "centroid_intermediate_top_k": 40}
        config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=backbone, **(groups if clusters else {}))
        made = Gemma4AssistantForCausalLM(config).double().eval()
        with torch.no_grad():
            for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
                if "norm" in name or "scalar" in name:
                    tensor.copy_(0.5 + torch.rand(tensor.shape))
                elif tensor.dim() == 2 and "embed" not in name:
                    tensor.mul_(8)
            if clusters:
                made.masked_embedding.token_ordering.copy_(torch.randperm(97))
    return made


def write_assistant(folder: Path, family: str, **options: Any) -> Path:
    """A folder with such an assistant."""
    assistant(family, **options).save_pretrained(folder)
    return folder


class AssistantReference(GuessReference):
    """The assistant's guesses by its modules, from a forward of the model over a whole text."""

    def __init__(self, family: str, **options: Any) -> None:
        self._model, self._assistant = copy.deepcopy(reference(family)), assistant(family, **options)
        config = self._model.config
        own = range(config.num_hidden_layers - (config.num_kv_shared_layers or 0))
        for kind in set(KINDS):
            last = max(layer for layer in own if config.layer_types[layer] == kind)
            self._model.model.layers[last].self_attn.store_full_length_kv = True

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Tensor:
        """Logits [V] after a text whose last token has no state yet, and guesses."""
        out = self._model(torch.tensor([[*tokens[:-1]]]), output_hidden_states=True, return_shared_kv_states=True)
        said, place = out.hidden_states[-1][:, -1:], torch.tensor([[len(tokens) - 1]])
        for token in (tokens[-1], *guesses):
            embedded = self._model.get_input_embeddings()(torch.tensor([[token]]))
            found = self._assistant(inputs_embeds=torch.cat([embedded, said], -1), position_ids=place,
                                    shared_kv_states=dict(out.shared_kv_states))
            said = found.last_hidden_state
        return found.logits[0, -1]

    @override
    def most_probable(
        self, tokens: list[int], guesses: Sequence[int], bias: Mapping[int, float], count: int
    ) -> list[int]:
        logits = self.logits(tokens, guesses)
        for token, value in bias.items():
            logits[token] += value
        return logits.topk(count).indices.tolist()
