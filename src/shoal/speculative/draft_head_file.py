"""A draft head on disk: a folder with a card, `part.json`, and its tensors, `part.safetensors`.

The card names the head's kind, the model and vocabulary that it was trained for, its shape, and how well it guessed.
Fingerprints of other weights of the same model may be added to it. Matrices may be 8-bit, with a scale for each
row. Knows no kind of head; imports no torch at first.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import Unsupported
from shoal.speculative.drafter_files import KINDS, is_drafter, kind_of
from shoal.user_cache import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.runner import ModelRunner
    from shoal.types import ModelInfo

log = logging.getLogger(__name__)
CARD, TENSORS = "part.json", "part.safetensors"
FORMAT = 1
SCALE = ".scale"
"""Suffix of a matrix's name in the name of its scales."""
TOKENS = "tokens"
"""The tensor, int32 [n], that lists the tokens that a head guesses."""
SHIPPED = Path(__file__).parent.parent / "parts"
"""The folders of heads that ship with Shoal."""


@dataclass(frozen=True)
class DraftHead:
    """A draft head as read from disk.

    Attributes:
        name: its folder, for messages.
        shape: the card's `shape`: the sizes by which the tensors fit together.
    """

    name: str
    shape: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    card: Mapping[str, Any]
    _taken: set[str] = field(default_factory=set, compare=False, repr=False)

    def size(self, name: str) -> int:
        """A number of the card's shape; ValueError if it is missing, or not a number."""
        found = self.shape.get(name)
        if not isinstance(found, int) or found < 1:
            raise ValueError(f"the card of the trained part {self.name!r} says that {name} is {found!r}; train the "
                             "part anew")
        return found

    def take(self, name: str, *size: int) -> Tensor:
        """A tensor of that size in float32: 8-bit rows times their scales. Other integer tensors keep their dtype.

        Raises:
            ValueError: it is missing, has another size, or holds values that are not finite.
        """
        held = self.tensors.get(name)
        if held is None or held.shape != size:
            found = "is not there" if held is None else f"is {list(held.shape)}"
            raise ValueError(f"the tensor {name!r} of the trained part {self.name!r} {found}; its card asks for "
                             f"{list(size)}. Train the part anew")
        self._taken.update((name, name + SCALE))
        scale = self.tensors.get(name + SCALE)
        if scale is not None:
            held = held.float() * scale.float()[:, None]
        elif held.is_floating_point():
            held = held.float()
        if not held.isfinite().all():
            raise ValueError(f"the tensor {name!r} of the trained part {self.name!r} holds what is no number; train "
                             "the part anew")
        return held

    def check_taken(self, *also: str) -> None:
        """Refuse, by a ValueError, tensors that were not read and whose names begin with none of `also`."""
        left = sorted(name for name in self.tensors.keys() - self._taken - {TOKENS} if not name.startswith(also))
        if left:
            raise ValueError(f"the trained part {self.name!r} holds {', '.join(map(repr, left[:4]))}"
                             f"{f' and {len(left) - 4} more' if len(left) > 4 else ''}, which a part of its kind has "
                             "no place for. Train the part anew")


def read(folder: str, kind: str, info: ModelInfo) -> DraftHead:
    """Read the head of a folder and check its kind and model.

    Raises:
        ValueError: the folder has no head, the head cannot be read, or it is of another kind.
        Unsupported: it was trained for another model or vocabulary.
    """
    assert info.tensors is not None
    card = _card(Path(folder) / CARD)
    if card["part"] != kind:
        raise ValueError(f"the trained part {folder!r} is of kind {card['part']!r}; {kind} needs one of kind {kind!r}")
    remedy = f"Train one for this model: shoal train {kind} --model MODEL --out DIR"
    if info.fingerprint is not None and info.fingerprint() not in card["fingerprints"]:
        others = " or ".join(card["fingerprints"])
        why = f"it was trained for a model with the fingerprint {others}; this one's is {info.fingerprint()}"
        raise Unsupported(f"the trained part {folder!r}", why, remedy)
    if info.tokenizer is not None and card["vocabulary"] not in (None, _vocabulary(info)):
        raise Unsupported(f"the trained part {folder!r}", "its model's tokenizer had another vocabulary", remedy)
    return DraftHead(folder, card["shape"], info.tensors(str(Path(folder) / TENSORS)), card)


def known(kind: str, info: ModelInfo) -> str | None:
    """The folder of a head of that kind for this model; None if there is none.

    It looks in the user's cache, under `parts`, then among the heads that ship with Shoal. A drafter of another tool
    under `parts`, or in an `mtp-*.gguf` beside the model's file, will do as well, if it is of that kind and its sizes
    are the model's.
    """
    if info.tensors is None or info.fingerprint is None or not info.free:
        return None
    found = info.memory.get(("known", kind))
    if found is None:
        found = info.memory[("known", kind)] = _known(kind, info) or ""
    return found or None


def _known(kind: str, info: ModelInfo) -> str | None:
    for path in [card for place in (cache_folder() / "parts", SHIPPED) for card in sorted(place.glob(f"*/{CARD}"))]:
        try:
            card = _card(path)
        except ValueError as error:  # maybe another model's head, which is no reason to refuse this model
            log.warning("%s", error)
            continue
        if card["part"] == kind and card.get("layers") == info.num_layers and _is_one_of(card["fingerprints"], info):
            return str(path.parent)
    folders = [*info.beside(), *sorted((cache_folder() / "parts").glob("*"))] if kind in KINDS else []
    return next((str(folder) for folder in folders if is_drafter(folder) and _runs(folder, kind, info)), None)


def _runs(folder: Path, kind: str, info: ModelInfo) -> bool:
    """Whether a drafter of another tool is of that kind and runs beside the model; it is then ready."""
    try:
        if kind_of(folder) != kind:
            return False
        info.drafter(str(folder))
    except (ValueError, OSError) as reason:  # maybe another model's
        log.info("%s", reason)
        return False
    return True


def cards_of(info: ModelInfo, folders: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """The cards of all heads for this model, whatever their kind: those in `folders`, the user's cache, and Shoal's.

    Raises:
        ValueError: a folder that was named has no card, or one of another model.
    """
    found = [_card(Path(folder) / CARD) for folder in folders]
    for folder, card in zip(folders, found, strict=True):
        if not _is_one_of(card["fingerprints"], info):
            raise ValueError(f"the trained part {folder!r} is of another model; name parts of this one")
    for place in (cache_folder() / "parts", SHIPPED):
        found += [card for path in sorted(place.glob(f"*/{CARD}")) if _is_one_of((card := _card(path))["fingerprints"],
                                                                                info)]
    return [card for number, card in enumerate(found) if card not in found[:number]]


def _is_one_of(fingerprints: Sequence[str], info: ModelInfo) -> bool:
    """Whether the model has one of these fingerprints; False if its own cannot be computed."""
    assert info.fingerprint is not None
    try:
        return info.fingerprint() in fingerprints
    except ValueError:  # the weights cannot be read again
        return False


def _card(path: Path) -> Mapping[str, Any]:
    try:
        card = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the card of a trained part cannot be read from {str(path)!r}: {error}; name the folder that "
                         "`shoal train` wrote") from None
    needed = {"format", "part", "fingerprints", "vocabulary", "shape"}
    if not isinstance(card, dict) or not needed <= set(card) or card["format"] != FORMAT:
        raise ValueError(f"{str(path)!r} is no card of a trained part in format {FORMAT}; train the part anew")
    return card


def _vocabulary(info: ModelInfo) -> str:
    """Worked out once for a model."""
    if "vocabulary" not in info.memory:
        info.memory["vocabulary"] = vocabulary(info.tokenizer)
    return str(info.memory["vocabulary"])


def vocabulary(tokenizer: Any) -> str:
    """A hash of the map from tokens to ids."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def guessed_tokens(part: DraftHead, target: ModelRunner) -> list[int]:
    """The ids of the tokens that a head guesses.

    Raises:
        ValueError: the head has no such list.
        Unsupported: the model lacks some of the tokens, or its states have another size.
    """
    listed = part.tensors.get(TOKENS)
    if listed is None or listed.dim() != 1 or not len(listed):
        raise ValueError(f"the trained part {part.name!r} has no list of {TOKENS!r}; train the part anew")
    hidden, found = part.size("hidden"), target.head_rows([0]).shape[1]
    if hidden != found or not 0 <= int(listed.min()) <= int(listed.max()) < target.vocab_size:
        why = (f"it is for states of {hidden} numbers and tokens up to {int(listed.max())}; the model has {found} and "
               f"{target.vocab_size - 1}")
        raise Unsupported(f"the trained part {part.name!r}", why, "Train one for this model with shoal train")
    return list(listed.tolist())
