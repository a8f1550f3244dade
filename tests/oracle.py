"""The slow, obvious references of what Shoal does, made of transformers' own forward and hooks only.

The depth oracle rests on causality. In an uncached pass, let layer l compute all positions, then put the layer's
input back wherever the plan does not run it: the positions that the plan does run form a prefix and never look at
the others, so they come out as if the others had not been there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.depth.plan import DepthPlan

_ATTENTION = ("self_attn", "attn", "attention")
_MLP = ("mlp", "fc2")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's outermost ModuleList with one entry per layer."""
    config = model.config.get_text_config()
    wanted = getattr(config, "decoder_layers", config.num_hidden_layers)
    for module in (*model.get_decoder().modules(), *model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise ValueError(f"{type(model).__name__} has no ModuleList of length {wanted}")


def sublayers(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Attention and MLP of a layer; of an MLP without a module of its own, the last projection."""
    children = dict(layer.named_children())
    attention, mlp = ([children[name] for name in names if name in children] for names in (_ATTENTION, _MLP))
    if len(attention) != 1 or len(mlp) != 1:
        raise ValueError(f"{type(layer).__name__} has children {sorted(children)}; one of {_ATTENTION} and one of "
                         f"{_MLP} is needed")
    return attention[0], mlp[0]


@torch.no_grad()
def prefix_oracle(model: PreTrainedModel, ids: Tensor, attention_counts: Sequence[int],
                  mlp_counts: Sequence[int] | None = None) -> Tensor:
    """Logits of an uncached pass in which each sublayer processes only a prefix of the positions.

    Args:
        model: left as it was, also after an error.
        ids: [1, T].
        attention_counts: for each layer, how many of the first positions its attention processes.
        mlp_counts: the same for the MLPs; None means whole layers.

    Returns:
        [T, V] logits in the model's dtype.
    """
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; it must be [1, T]")
    layers = decoder_layers(model)
    mlp_counts = attention_counts if mlp_counts is None else mlp_counts
    with ExitStack() as stack:
        for layer, first, second in zip(layers, attention_counts, mlp_counts, strict=True):
            stack.enter_context(_limited(layer, first, second))
        logits: Tensor = model(ids, use_cache=False).logits
    return logits[0]


@contextmanager
def _limited(layer: nn.Module, attention_count: int, mlp_count: int) -> Iterator[None]:
    longest = max(attention_count, mlp_count)
    handles = [layer.register_forward_hook(lambda _, args, kwargs, output: _pass(args, kwargs, output, longest),
                                           with_kwargs=True)]
    if attention_count != mlp_count:
        attention, mlp = sublayers(layer)
        handles.append(attention.register_forward_hook(lambda _m, _a, output: _silence(output, attention_count)))
        handles.append(mlp.register_forward_hook(lambda _m, _a, output: _silence(output, mlp_count)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pass(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, count: int) -> Any:
    before = args[0] if args else kwargs["hidden_states"]
    return _on_first(output, lambda after: torch.cat([after[..., :count, :], before[..., count:, :]], dim=-2))


def _silence(output: Any, count: int) -> Any:
    """Zeroes the positions from `count` on of a sublayer's [1, T, H] or [T, H] output."""
    def cut(tensor: Tensor) -> Tensor:
        positions = torch.arange(tensor.shape[-2], device=tensor.device)
        return tensor.masked_fill((positions >= count)[:, None], 0)

    return _on_first(output, cut)


def _on_first(output: Any, change: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def prefix_counts(drop_steps: Sequence[int], prompt: int, length: int) -> list[int]:
    """How many of `length` positions each sublayer processes, if position `prompt + j - 1` is the node of step j.

    The prompt's positions are always processed. Position by position on purpose.
    """
    return [sum(position < prompt or position - prompt + 1 < drop for position in range(length))
            for drop in drop_steps]


def greedy_under_plan(model: PreTrainedModel, prompt: Sequence[int], plan: DepthPlan,
                      max_new_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens under a plan, each from a fresh uncached pass over everything before it.

    Returns:
        The new tokens, and the logits [max_new_tokens, V] that each was taken from.
    """
    ids, rows = list(prompt), []
    for _ in range(max_new_tokens):
        counts = [prefix_counts(drops, len(prompt), len(ids)) for drops in (plan.attention, plan.mlp)]
        rows.append(prefix_oracle(model, torch.tensor([ids], device=model.device), *counts)[-1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt):], torch.stack(rows)


@torch.no_grad()
def hf_greedy(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy tokens of transformers' own generate: each prompt alone, a fresh cache, never stopping early."""
    return [_hf_greedy_one(model, list(prompt), max_new_tokens) for prompt in prompts]


def _hf_greedy_one(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    # As an argument, None switches EOS off; inside a GenerationConfig the model's own one would replace it.
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
                            num_beams=1, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = output[0, len(prompt):].tolist()
    return tokens


@dataclass
class LayerCalls:
    """How often each decoder layer was called, and how many token rows (batch x positions) it and its parts saw.

    Calls that bypass `Module.__call__` are not seen. `attention_rows` and `mlp_rows` count the sublayers, also when
    they are called apart from their layer.
    """

    calls: list[int]
    rows: list[int]
    attention_rows: list[int]
    mlp_rows: list[int]


@contextmanager
def layer_calls(model: PreTrainedModel) -> Iterator[LayerCalls]:
    """Counts the work of every decoder layer while the context is open."""
    layers = decoder_layers(model)
    counted = LayerCalls(*([0] * len(layers) for _ in range(4)))
    handles = []
    for index, layer in enumerate(layers):
        attention, mlp = sublayers(layer)
        for module, tallies in ((layer, (counted.calls, counted.rows)), (attention, (None, counted.attention_rows)),
                                (mlp, (None, counted.mlp_rows))):
            handles.append(module.register_forward_hook(_counter(index, *tallies)))
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()


def _counter(index: int, calls: list[int] | None, rows: list[int]) -> Any:
    def count(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        rows[index] += hidden.numel() // hidden.shape[-1]
        if calls is not None:
            calls[index] += 1

    return count
