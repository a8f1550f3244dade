"""Which neurons of the gated MLPs matter, and how many each layer keeps: structured width pruning.

`peak_to_peak` uses the weights alone (arXiv 2512.22671). `cfsp` also runs the model over texts once: how much each
layer changes its input decides how many neurons it keeps, weights and activations decide which ones (arXiv 2409.13199).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from shoal.model.packed.source import Source
from shoal.model.probe import find_layers

Form = Literal["stated", "released"]
FORMS: tuple[Form, ...] = ("stated", "released")
_GATE = re.compile(r"(.*layers\.\d+\.mlp\.)(gate_proj|gate_up_proj)\.weight")
_TOKENS = 128 * 2048
"""Number of tokens on which CFSP calibrates; its importances are sums over them."""
_SCALE = 1e4
_HAIR = 1e-6
"""Tolerance for products that are integers on paper."""
_MARGIN = 1.05


@dataclass(frozen=True)
class Activity:
    """Activity of a model's MLPs on some texts.

    Attributes:
        norms: for each layer the 2-norm of every neuron's activation over all tokens, [ffn] in float64: of the inputs
            of the MLP's last matrix.
        turns: for each layer the mean angle between its input and its output, in half turns.
        tokens: number of tokens.
    """

    norms: tuple[Tensor, ...]
    turns: tuple[float, ...]
    tokens: int


@torch.no_grad()
def activity(model: Any, texts: Sequence[Sequence[int]], progress: bool | None = None) -> Activity:
    """Run transformers' model over texts once, and record.

    Args:
        model: of `AutoModelForCausalLM`; hooks are removed afterwards.
        texts: token ids.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.

    Raises:
        ValueError: there is no token.
    """
    if not any(texts):
        raise ValueError("there are no texts to watch the model on; give some")
    layers: Any = find_layers(model, model.config.num_hidden_layers)
    squares = [torch.zeros(layer.mlp.down_proj.in_features, dtype=torch.float64) for layer in layers]
    turns, tokens = torch.zeros(len(layers), dtype=torch.float64), 0

    def fired(number: int, given: Tensor) -> None:
        squares[number] += given.double().flatten(0, -2).square().sum(0).cpu()

    def turned(number: int, before: Tensor, after: Tensor) -> None:
        cosine = torch.cosine_similarity(before.double(), after.double(), dim=-1).clamp(-1, 1)
        turns[number] += float(cosine.acos().sum()) / math.pi

    with _watched(layers, fired, turned):
        for text in tqdm(texts, desc="neurons", disable=None if progress is None else not progress):
            if text:
                model(torch.tensor([list(text)], device=model.device), use_cache=False)
                tokens += len(text)
    return Activity(tuple(square.sqrt() for square in squares), tuple((turns / tokens).tolist()), tokens)


@contextmanager
def _watched(layers: Sequence[Any], fired: Any, turned: Any) -> Iterator[None]:
    """Hooks that report each layer's input and output, and the inputs of its MLP's last matrix."""
    hooks = []
    for number, layer in enumerate(layers):
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(lambda _, given, n=number: fired(n, given[0])))
        hooks.append(layer.register_forward_hook(
            lambda _, given, named, out, n=number: turned(
                n, given[0] if given else named["hidden_states"], out[0] if isinstance(out, tuple) else out),
            with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def peak_to_peak(source: Source) -> list[Tensor]:
    """Scores of all layers' neurons: max + |min| of a gate row, and the same of the up row; [ffn] each.

    "Peak-to-peak magnitude", formerly "maximum absolute weight": what the authors' code computes, which is not a range
    if all weights of a row have the same sign.
    """
    return [sum((rows.amax(1) + rows.amin(1).abs() for rows in (gate, up)), torch.zeros(1))
            for gate, up, _ in matrices(source)]


def cfsp(source: Source, seen: Activity, form: Form = "stated", b: float = 1.0, c: float = 1.0) -> list[Tensor]:
    """Scores of all layers' neurons by weights and activations, [ffn] each.

    `stated`: a neuron's share of the absolute weights of gate, up and down at each hidden unit, those of down times its
    activity to the power b, averaged over the units, times its activity to the power c. `released`: what the published
    code computes, which takes each share over the axis over which it is then averaged, so that all weights cancel and
    only the activity remains.

    Args:
        source: the weights.
        seen: the model's activity.
        form: one of the two.
        b, c: powers of a neuron's activity.
    """
    scores = []
    for (gate, up, down), norms in zip(matrices(source), seen.norms, strict=True):
        if form == "released":
            scores.append(norms.pow(c))
            continue
        parts = [gate.abs(), up.abs(), down.T.abs() * norms.pow(b)[:, None]]
        scores.append(sum((_shares(part) for part in parts), torch.zeros(1)) * norms.pow(c))
    return scores


def _shares(weights: Tensor) -> Tensor:
    """A neuron's share of weights [ffn, hidden] at each hidden unit, averaged; units without weights do not count."""
    totals = weights.sum(0)
    return (weights / totals.where(totals > 0, torch.inf)).mean(1)


def matrices(source: Source) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Gate and up [ffn, hidden] and down [hidden, ffn] of each layer in float64, layer after layer."""
    found = [match for match in map(_GATE.fullmatch, source.names()) if match]
    for match in sorted(found, key=lambda one: int(one[1].split(".")[-3])):
        gate = source[match[0]].double()
        gate, up = gate.chunk(2) if match[2] == "gate_up_proj" else (gate, source[f"{match[1]}up_proj.weight"].double())
        yield gate, up, source[f"{match[1]}down_proj.weight"].double()


def shares(turns: Sequence[float], gone: float, a: float = 1.0) -> list[float]:
    """The share of its neurons that each layer keeps, 1 - gone on average: more if it changes its input more.

    Importances are sums over as many tokens as in the paper, whatever the number of tokens here.

    Args:
        turns: as in `Activity`.
        gone: the share that is removed, in [0, 1).
        a: how much layers differ; 0 keeps the same share of all.
    """
    kept, mean = 1 - gone, sum(turns) / len(turns)
    weights = [1 / (1 + math.exp(-a * _TOKENS / _SCALE * (turn - mean))) for turn in turns]
    found = [weight / (sum(weights) / len(weights)) * kept for weight in weights]
    most = max(found)
    factor = (1 - kept) / ((most - kept) * _MARGIN) if most > 1 else 1.0
    return [kept + factor * (share - kept) for share in found]


def shares_by_rank(scores: Sequence[Tensor], gone: float) -> list[float]:
    """The share of its neurons that each layer keeps if the best of all layers together stay; the first wins ties.

    Args:
        scores: for each layer [ffn], comparable between layers.
        gone: the share of all neurons that is removed, in [0, 1).
    """
    widths = [len(score) for score in scores]
    stay = torch.zeros(sum(widths))
    order = torch.cat(list(scores)).sort(descending=True, stable=True).indices
    stay[order[: round((1 - gone) * sum(widths))]] = 1
    return [float(part.mean()) for part in stay.split(widths)]


def counts(kept: Sequence[float], widths: Sequence[int], multiple: int = 1, *, up: bool = False) -> list[int]:
    """Neurons that each layer keeps: multiples, as far as a layer has that many, and at least one multiple.

    Args:
        kept: the share of its neurons that each layer is to keep.
        widths: its number of neurons.
        multiple: the multiple.
        up: whether to round up instead of to the nearest multiple.
    """
    rounded = (lambda number: math.ceil(number - _HAIR)) if up else round
    return [width if share >= 1 else min(max(rounded(share * width / multiple), 1) * multiple, width)
            for share, width in zip(kept, widths, strict=True)]


def best(scores: Sequence[Tensor], keep: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The neurons with the highest scores of each layer, ascending; the first wins ties."""
    return tuple(tuple(sorted(score.sort(descending=True, stable=True).indices[:count].tolist()))
                 for score, count in zip(scores, keep, strict=True))
