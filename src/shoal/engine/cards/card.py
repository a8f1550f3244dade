"""What is known of a model's layers, and where such cards lie: beside the weights, in the user's cache, or in Shoal.

A card holds what was measured: `layer_scores` (kind of score -> one number per layer), `order` (the recommended removal
order: a kind of score, a name, or a list of layers), and what the model bears. Beside a model's weights it is
`shoal.json`. Other cards are found by the model's fingerprint. A quantised file has other values than the original, so
there is a second key: a hash of the norm vectors, which quantised files keep whole. Together with the sizes it tells
models apart. Weights tuned without their norms have the same key, so such a match is said.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engine.loaded import LoadedModel
from shoal.model.hf import HFRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner
from shoal.user_cache import cache_folder, replace_whole

FILE = "shoal.json"
FORMAT = 2
"""Version of the format of cards that hold a model's identity."""
BEARABLE = 0.1
"""Most KL in nats per token, against all layers, at which a model bears a depth schedule."""
SHIPPED = Path(__file__).parents[2] / "cards"
_NEAR_ZERO = 0.006
"""Norm weights below count as 0: some files hold 1 + w in float32, which does not give a small w back exactly."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Card:
    """What is known about a model's layers.

    Attributes:
        layer_scores: kind of score -> one number per layer, low meaning cheap to drop.
        order: the recommended removal order: a kind of score, a name, or a list of layers.
        bears: mean depth in layers at which D3 moves the distribution by no more than `BEARABLE`; None if unknown.
        skips: layers whose attention, and layers whose MLP, a draft does best without; None if unknown.
        origin: where the card is from, in words.
        borrowed: whether it was measured on other weights of the same model, such as quantised ones.
    """

    layer_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    order: str | tuple[int, ...] | None = None
    bears: float | None = None
    skips: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    origin: str = ""
    borrowed: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing is known that a depth method could use."""
        return not self.layer_scores and self.order is None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], num_layers: int, name: str = FILE) -> Card:
        """A card from its JSON; ValueError where the numbers are not those of a model with `num_layers` layers."""
        try:
            scores = {kind: tuple(map(float, values)) for kind, values in data.get("layer_scores", {}).items()}
            order, skips = data.get("order"), data.get("skips")
            bears = data.get("bears", {}).get("mean_layers")
            chosen = None if skips is None else (tuple(map(int, skips["attention"])), tuple(map(int, skips["mlp"])))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{name} is no calibration card ({error}); calibrate this model or remove the file"
            raise ValueError(why) from error
        for kind, values in scores.items():
            if len(values) != num_layers:
                raise ValueError(f"{name} holds {len(values)} scores of kind {kind!r}, but the model has {num_layers} "
                                 "layers; calibrate this model or remove the file")
        real = isinstance(bears, int | float) and not isinstance(bears, bool)
        if bears is not None and not (real and 0 < bears <= num_layers):
            raise ValueError(f"{name} says the model bears {bears!r} layers; it must be in (0, {num_layers}]")
        return cls(scores, tuple(order) if isinstance(order, list) else order, bears, chosen)


def load_json(path: Path) -> dict[str, Any]:
    """The object in a card's file; the ValueError where it cannot be read, or holds none, names the file."""
    remedy = "remove it, or calibrate this model anew"
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the calibration card {str(path)!r} cannot be read ({error}); {remedy}") from error
    if not isinstance(data, dict):
        raise ValueError(f"the calibration card {str(path)!r} holds no JSON object; {remedy}")
    return data


def read_card(model: str | os.PathLike[str], num_layers: int, revision: str | None = None) -> Card:
    """The card of a local folder or a hub repository; an empty one where there is none."""
    from transformers.utils import cached_file

    found = cached_file(str(model), FILE, revision=revision, _raise_exceptions_for_gated_repo=False,
                        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    if found is None:
        return Card()
    return replace(Card.from_dict(load_json(Path(found)), num_layers), origin=f"the card beside the model, {FILE}")


def cached() -> Path:
    """The folder of the user's own cards: `shoal/cards` in XDG_CACHE_HOME, by default in ~/.cache."""
    return cache_folder() / "cards"


def find(engine: LoadedModel) -> Card:
    """The card of an engine's model; an empty one where none is known.

    A file in the cache that cannot be read is named in a warning and left where it is.
    """
    like = _alike(engine)
    if not like:
        return Card()
    print_ = _fingerprint(engine)
    own = [one for one in like if print_ is not None and print_ in one[1]["model"].get("fingerprints", ())]
    path, data = (own or like)[0]
    where = "the card that ships with Shoal" if path.parent == SHIPPED else f"the card {path.name} in your cache"
    origin = f"{where} for {data['model'].get('name', 'this model')}"
    if not own:
        weights = data["model"].get("weights") or "other weights"
        log.info("%s: its card was calibrated on %s", engine.model_name or "the model", weights)
        origin += f", calibrated on {weights}"
    return replace(Card.from_dict(data, engine.runner.num_layers, str(path)), origin=origin, borrowed=not own)


def evidence(engine: LoadedModel) -> dict[str, Any]:
    """What was measured of methods on the model, by its first card that has evidence; empty where none has."""
    return next((data["evidence"] for _, data in _alike(engine) if isinstance(data.get("evidence"), dict)), {})


def _alike(engine: LoadedModel) -> list[tuple[Path, dict[str, Any]]]:
    """The cards of the model, in whatever form its weights were."""
    sizes = sizes_of(engine.runner)
    like = [(path, data) for path, data in every() if data["model"].get("sizes") == sizes]
    norms = norm_keys(engine.runner) if like else ()
    return [(path, data) for path, data in like if set(norms) & set(data["model"].get("norms", ()))]


def identity(engine: LoadedModel, weights: str = "") -> dict[str, Any]:
    """A model's identity for its card; `weights` is their form, such as "Q4_1", by default the dtype."""
    print_ = _fingerprint(engine)
    return {"name": Path(engine.model_name).name, "fingerprints": [] if print_ is None else [print_],
            "norms": list(norm_keys(engine.runner)), "sizes": sizes_of(engine.runner),
            "weights": weights or str(engine.runner.dtype).removeprefix("torch.")}


def keep(data: Mapping[str, Any]) -> Path:
    """Write a card to the user's cache atomically; ValueError where it has no key, OSError where that cannot be."""
    keys = [*data["model"]["fingerprints"], *data["model"]["norms"]]
    if not keys:
        raise ValueError("the model has neither a fingerprint nor norm vectors, so its card could not be found again")
    path, text = cached() / f"{keys[0]}.json", json.dumps(data) + "\n"
    replace_whole(path, lambda file: file.write(text.encode()))
    return path


def sizes_of(runner: ModelRunner) -> dict[str, int]:
    """Layers, vocabulary and width, the same for every backend; of a hybrid also how many layers have attention."""
    hidden = runner.shape.hidden if isinstance(runner, PackedRunner) else max(map(len, _norms(runner, 0)), default=0)
    attends = sum(heads > 0 for heads, *_ in runner.kv_sizes)
    hybrid = {} if attends == runner.num_layers else {"attention": attends}
    return {"layers": runner.num_layers, "vocab": runner.vocab_size, "hidden": hidden, **hybrid}


def norm_keys(runner: ModelRunner) -> tuple[str, ...]:
    """Hashes of the layers' norm weights as they are and less 1, as some formats store 1 + w; none without norms.

    Values are rounded to bfloat16. Two models are alike where any of their keys are equal.
    """
    layers = [list(_norms(runner, layer)) for layer in range(runner.num_layers)]
    if not any(layers):
        return ()
    return tuple(_hash([[vector - shift for vector in layer] for layer in layers]) for shift in (0.0, 1.0))


def _norms(runner: ModelRunner, layer: int) -> Iterator[Tensor]:
    """The norm weights of a layer, in float32."""
    if isinstance(runner, HFRunner):
        for module in runner.parts.layers[layer].modules():
            weight = getattr(module, "weight", None)
            if "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter) and weight.dim() == 1:
                yield weight.detach().float().cpu()
    elif isinstance(runner, PackedRunner):
        block = runner.weights.layers[layer]
        assert is_dataclass(block)
        for one in fields(block):
            value = getattr(block, one.name)
            if one.name.endswith("norm") and isinstance(value, Tensor):
                yield value.float().cpu()


def _hash(layers: list[list[Tensor]]) -> str:
    digest = hashlib.sha256()
    for layer in layers:
        parts = [torch.where(v.abs() < _NEAR_ZERO, torch.zeros_like(v), v).to(torch.bfloat16) for v in layer]
        for part in sorted(bytes(part.view(torch.int16).numpy().tobytes()) for part in parts):
            digest.update(hashlib.sha256(part).digest())
        digest.update(b"layer")
    return digest.hexdigest()[:16]


def _fingerprint(engine: LoadedModel) -> str | None:
    try:
        return engine.fingerprint
    except ValueError:  # there is nothing to read the weights from again
        return None


def every() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every card: the user's own first, newest first, then those that ship."""
    own = sorted(cached().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [*own, *sorted(SHIPPED.glob("*.json"))]:
        try:
            data = load_json(path)
        except ValueError as error:
            log.warning("%s", error)
            continue
        if isinstance(data.get("model"), dict):
            yield path, data
