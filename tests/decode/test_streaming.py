"""StreamingLLM with positions by slot (arXiv 2309.17453, 3.2), beside a slow twin made of transformers' modules.

The twin stores keys before they are rotated. For each query anew it rotates those that stay by the places that they
have among each other, and the query by its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from backends import HF, NATIVE, TORCH, Backend, on_backends, reference
from drive import decode, gap, prompt
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.streaming_llm import StreamingLLM
from shoal.model.runner import ModelRunner
from shoal.types import ModelInfo

NEW = 70
PROMPTS = [prompt(3, 1), prompt(30, 2), prompt(41, 3)]
SHORT = {"max_position_embeddings": 32}
"""A context that the answers outlive; the rotary table of these families does not depend on it."""
TABLE = 1e-3
"""Tables of transformers are of float32, so that a turn and sixty that make it up differ by so much in logits."""


def info_of(runner: ModelRunner) -> ModelInfo:
    return ModelInfo(runner.num_layers, NEW, windows=runner.windows, turns_keys=runner.turns_keys, context=32)


def twin_logits(model: PreTrainedModel, ids: Sequence[int], method: StreamingLLM) -> Tensor:
    """Logits [T, V] of a text, query by query."""
    decoder, size = model.model, len(ids)
    hidden = decoder.embed_tokens(torch.tensor(ids))
    for layer in decoder.layers:
        own = layer.self_attn
        x = layer.input_layernorm(hidden)
        queries, keys, values = (made(x).view(size, -1, own.head_dim).transpose(0, 1)
                                 for made in (own.q_proj, own.k_proj, own.v_proj))
        if hasattr(own, "q_norm"):
            queries, keys = own.q_norm(queries), own.k_norm(keys)
        read = []
        for query in range(size):
            slots, places = kept(query, method)
            cos, sin = decoder.rotary_emb(hidden, torch.tensor([places]))
            turned, _ = apply_rotary_pos_emb(keys[None, :, slots], keys[None, :, slots], cos, sin)
            asking, _ = apply_rotary_pos_emb(queries[None, :, [query]], queries[None, :, [query]], cos[:, -1:],
                                             sin[:, -1:])
            groups = len(queries) // len(keys)
            scores = asking[0] @ turned[0].repeat_interleave(groups, 0).mT * own.scaling
            read.append((scores.softmax(-1) @ values[:, slots].repeat_interleave(groups, 0)).transpose(0, 1).flatten())
        hidden = hidden + own.o_proj(torch.stack(read))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(decoder.norm(hidden))


def kept(query: int, method: StreamingLLM) -> tuple[list[int], list[int]]:
    """The slots that a query reads, by position in the text, and the places by which their keys are rotated."""
    cut, most = query // method.every * method.every, method.sinks + method.window
    gone = max(0, cut - most)
    slots = [*range(method.sinks), *range(method.sinks + gone, query + 1)] if gone else list(range(query + 1))
    return slots, list(range(len(slots)))


@on_backends("llama", "qwen3", backends=(TORCH, NATIVE))
@pytest.mark.parametrize(("sinks", "window", "every"), [(2, 9, 1), (0, 6, 4), (3, 12, 5)])
@torch.no_grad()
def test_answers_outlive_the_context(backend: Backend, name: str, sinks: int, window: int, every: int) -> None:
    runner = backend.runner(name, **SHORT)
    method = StreamingLLM(window=window, sinks=sinks, every=every, positions="slots")
    run = decode(None, PROMPTS, method.recipe(info_of(runner)), NEW, runner=runner)
    by_text = replace(method, positions="text")
    for number, seq in enumerate(run.seqs):
        assert len(seq.tokens) > 2 * 32
        expected = twin_logits(reference(name, **SHORT), seq.tokens[:-1], method)[seq.prompt_length - 1 :]
        assert gap(run.logits(number).to(expected.dtype), expected) <= max(backend.exact, TABLE)
    other = decode(None, PROMPTS, by_text.recipe(info_of(runner)), NEW, runner=runner)
    if sinks:  # without them nothing but distances within the window is seen, which turning leaves as they are
        same = next((i for i, pair in enumerate(zip(run.seqs[2].tokens, other.seqs[2].tokens, strict=True))
                     if pair[0] != pair[1]), NEW)
        assert same < len(run.seqs[2].tokens) or gap(run.logits(2), other.logits(2)) > 0.05


def test_what_cannot_be_turned_is_refused() -> None:
    method = StreamingLLM(window=9, sinks=2, every=4, positions="slots")
    with pytest.raises(Unsupported, match="its keys cannot be turned"):
        method.recipe(info_of(HF.runner("llama", **SHORT)))
    with pytest.raises(Unsupported, match="sliding windows"):
        method.recipe(info_of(TORCH.runner("hybrid")))
    info = info_of(TORCH.runner("llama", **SHORT))
    with pytest.raises(ValueError, match="fit the model's context of 32"):
        replace(method, window=30).recipe(info)
    with pytest.raises(Unsupported, match="each turn would round"):
        replace(method.recipe(info), store=KVInt8().recipe(info).store)
    assert StreamingLLM(window=None, positions="slots").recipe(info).keep is None


@torch.no_grad()
def test_beside_a_depth_plan_and_forks_the_places_go_along() -> None:
    """A shallow layer's keys are never read again; and a copied sequence goes on as the first one does."""
    runner = TORCH.runner("llama", **SHORT)
    method = StreamingLLM(window=9, sinks=2, every=4, positions="slots")
    recipe = replace(method.recipe(info_of(runner)), plan=D3(alpha=0.99, core=2).recipe(info_of(runner)).plan)
    together, alone = (decode(None, prompts, recipe, NEW, runner=runner) for prompts in (PROMPTS, PROMPTS[2:]))
    assert together.seqs[2].tokens == alone.seqs[0].tokens
