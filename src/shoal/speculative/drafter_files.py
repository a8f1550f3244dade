"""The files of a drafter that another tool has trained, as they lie on the Hub: a config and its tensors.

Names that differ between tools are made one here: those of SafeAILab's EAGLE, by which the others go as well. Knows
neither what the tensors mean nor the model that is drafted for; imports no torch at first.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import Unsupported
from shoal.model.gguf.header import is_gguf

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.packed.source import Source

CONFIG = "config.json"
_SAFE = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
_HEADS = "medusa_lm_head.safetensors"
REMEDY = "Name the folder or GGUF file of a drafter that was trained for this model, or leave part out"
KINDS = ("eagle", "dflash", "medusa", "mlp_speculator", "mtp")
"""The kinds of drafters that are read, each named after the method that runs it."""
_FORM = "speculators_model_type"
_PREFIXES = (
    ("model.", ""), ("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."),
    ("embed_layernorm.", "embedding_layernorm."), ("hidden_layernorm.", "layers.0.input_layernorm."),
    ("lm_head_layernorm.", "norm."), ("pre_lm_head_layernorm.", "norm."), ("draft_id_to_target_id", "d2t"),
    ("medusa_head.", ""), ("medusa_heads.", ""), ("speculator.", ""),
)
"""What names begin with elsewhere, and here."""
_IDLE = ("t2d", "verifier_", "layers.0.self_attn.rotary_emb.")
"""What names begin with that are not needed: the map back, what is the model's, and constants."""


def kind_of(folder: str | Path) -> str:
    """What kind of drafter a folder has, one of `KINDS`, by its config; ValueError if that cannot be read.

    One that names no other kind is taken for EAGLE's. It may be a GGUF file as well; Unsupported for one of no drafter.
    """
    if is_gguf(folder):
        from shoal.model.gguf import drafters

        return drafters.kind_of(folder)
    config = _config(Path(folder) / CONFIG)
    told = {str(config.get(_FORM)), str(config.get("model_type")), *map(str, config.get("architectures") or ())}
    if "dflash_config" in config or told & {"dflash", "DFlashDraftModel", "DFlashSpeculator"}:
        return "dflash"
    if "medusa_num_heads" in config or told & {"medusa", "MedusaModel"}:
        return "medusa"
    if told & {"mlp_speculator", "MLPSpeculatorPreTrainedModel"}:
        return "mlp_speculator"
    if told & {"gemma4_assistant", "gemma4_unified_assistant"}:
        return "mtp"
    return "eagle"


def check_kind(folder: str, kind: str) -> None:
    """Refuse, by Unsupported, a drafter of another kind than that of a method."""
    if (found := kind_of(folder)) != kind:
        raise Unsupported(f"the drafter {folder!r} with method {kind}", f"it is of kind {found!r}",
                          f"Use method {found}, or auto, which tells the kind by itself")


def is_drafter(folder: str | Path) -> bool:
    """Whether it is a GGUF file, or a folder with a drafter of another tool, not a part that Shoal has trained."""
    place, names = Path(folder), (*_SAFE, _HEADS, *_PICKLED)
    return is_gguf(place) or ((place / CONFIG).is_file() and any((place / name).is_file() for name in names))


def stamp(folder: str) -> tuple[Any, ...]:
    """Tells the files of a drafter from others, and from these after a change."""
    place = Path(folder).resolve()
    files = [place] if place.is_file() else sorted(place.iterdir())
    found = [(path.name, path.stat()) for path in files if path.is_file()]
    return str(place), *((name, one.st_mtime_ns, one.st_size) for name, one in found)


class DrafterFiles:
    """A drafter's config and tensors.

    Attributes:
        name: its folder or GGUF file, for messages.
        config: the config of its files.
        layer: the part of the config that describes its decoder layer.
        kind: what the `speculators` form says it is, such as "eagle3"; None for other forms.

    Raises:
        ValueError: a file is missing or cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.name, place = str(folder), Path(folder)
        self.config, self._source = _opened(place)
        form = self.config.get("speculators_config")
        told = self.config.get(_FORM) or (form.get("algorithm") if isinstance(form, dict) else None)
        self.kind = None if told is None else str(told)
        inner = self.config.get("transformer_layer_config" if told else "model")
        self.layer: Mapping[str, Any] = inner if isinstance(inner, dict) else self.config
        self._places = {_usual(name): name for name in self._source.names()}
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._places

    def size(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes; Unsupported if it is not there."""
        return tuple(self._held(name).shape)

    def take(self, name: str, *size: int) -> Tensor:
        """A tensor in its own dtype, which is read anew.

        Raises:
            Unsupported: it is missing, has another size, or holds values that are not finite.
        """
        held = self._held(name)
        if held.shape != size:
            raise self.refusal(f"its tensor {name!r} is {list(held.shape)}; {list(size)} is needed")
        if held.is_floating_point() and not held.isfinite().all():
            raise self.refusal(f"its tensor {name!r} holds what is no number")
        self._taken.add(name)
        return held

    def number(self, name: str, default: int | None = None) -> int:
        """A positive whole number of the layer's config; Unsupported if it is missing, or no such number."""
        found = self.layer.get(name)
        found = default if found is None else found
        if not isinstance(found, int) or found < 1:
            raise self.refusal(f"its config says that {name} is {found!r}; it must be a whole number of at least 1")
        return found

    def below(self, start: str) -> list[str]:
        """The names that begin so."""
        return sorted(name for name in self._places if name.startswith(start))

    def check_taken(self) -> None:
        """Refuse, by Unsupported, tensors that were not read."""
        left = sorted(name for name in self._places.keys() - self._taken if not name.startswith(_IDLE))
        if left:
            raise self.refusal(f"it holds {_listed(left)}, for which Shoal has no place")

    def check_held(self, names: Iterable[str]) -> None:
        """Refuse, by Unsupported, files that lack tensors."""
        if lacking := [name for name in names if not self.has(name)]:
            raise self.refusal(f"its files lack {_listed(lacking)}")

    def refusal(self, why: str) -> Unsupported:
        """The error for a drafter that cannot be used."""
        return Unsupported(f"the drafter {self.name!r}", why, REMEDY)

    def _held(self, name: str) -> Tensor:
        self.check_held([name])
        return self._source[self._places[name]]


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _usual(name: str) -> str:
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name


def _opened(place: Path) -> tuple[dict[str, Any], Source]:
    if not is_gguf(place):
        return _config(place / CONFIG), _source(place)
    from shoal.model.gguf import drafters

    return drafters.opened(place)


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"a drafter's config cannot be read from {str(path)!r}: {error}; fetch it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} is a {type(found).__name__}; a drafter's config is an object. Fetch it again")
    return found


def _source(folder: Path) -> Source:
    import torch
    from torch import Tensor

    from shoal.model.packed.source import FileSource, TensorSource

    if any((folder / name).is_file() for name in _SAFE):
        return FileSource(folder)
    if (folder / _HEADS).is_file():
        return FileSource(folder, _HEADS)
    path = next((folder / name for name in _PICKLED if (folder / name).is_file()), folder / _PICKLED[0])
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        told = str(error).partition("\n")[0]
        raise ValueError(f"tensors cannot be read from {str(path)!r}: {told}; fetch the drafter again") from None
    if not isinstance(tensors, dict) or not all(isinstance(one, Tensor) for one in tensors.values()):
        raise ValueError(f"{str(path)!r} is no map from names to tensors; fetch the drafter again")
    return TensorSource(tensors)
