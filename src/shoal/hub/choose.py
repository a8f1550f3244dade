"""Which files of a repository make the model that was asked for, by their names alone.

Files that are no model by themselves are told by their names, as llama.cpp does (common/download.cpp).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath

from shoal.hub.names import Wanted

USUAL = "Q4_K_M"
_QUANT = re.compile(
    r"(?<![A-Z0-9])(UD-)?(I?Q[1-8](?:_[A-Z0-9]{1,3})+|TQ[12]_0|BF16|FP16|F16|FP32|F32|MXFP4(?:_MOE)?|NVFP4)(?![A-Z0-9])",
    re.IGNORECASE)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_ENCODES = "mmproj"
"""Part of the names of files that read pictures for the model beside them."""
_ASIDE = (_ENCODES, "imatrix", "eagle3-", "dflash-", "dspark-")
"""Parts of the names of GGUF files that are no model."""
_PRECISE = ("F16", "BF16", "Q8_0", "F32")
"""Of several files that read pictures the first of these is fetched."""
_FURTHER = "mtp-"
"""Beginning of the names of files that predict further tokens for the model beside them."""
_BITS = (4, 5, 6, 8, 3, 2, 16, 32, 1)
"""Widths, the usual one first: somewhat more than asked for loses nothing, less does."""
_ENDS = ("_K_M", "_K_XL", "_K_L", "_K_S", "_1", "_0")
_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Endings of what a model in the Hugging Face format has beside its weights."""


@dataclass(frozen=True)
class Chosen:
    """The files of a model in a repository.

    Attributes:
        first: the file to load, the first of several parts; empty for a folder in the Hugging Face format.
        paths: all files to fetch.
        quant: the quantisation by the file's name; empty where it names none.
        sees: the one of them that reads pictures for the model; empty without one.
        left: a file that would, and that is not fetched.
    """

    first: str
    paths: tuple[str, ...]
    quant: str = ""
    sees: str = ""
    left: str = ""


def choose(wanted: Wanted, paths: Iterable[str], sees: bool = True) -> Chosen:
    """The files of the model that was asked for.

    Args:
        paths: all files of the repository, with / between folders.
        sees: whether what reads pictures beside a GGUF file is one of them.

    Raises:
        ValueError: there is no such model among them, or several; names what there is.
    """
    paths = sorted(paths)
    models = [path for path in paths if path.lower().endswith(".gguf") and not _aside(path) and _number(path) == 1]
    if not wanted.choice and (folder := _folder(paths)) and any("safetensors" in path for path in folder):
        return Chosen("", folder)
    if models or wanted.choice:
        first = _one(wanted, models)
        sight, left = (_encoder(first, paths), "") if sees else ("", _encoder(first, paths))
        beside = _further(first, paths) + (sight,) * bool(sight)
        return Chosen(first, (*_parts(first), *beside), quant_of(first), sight, left)
    if folder := _folder(paths):
        return Chosen("", folder)
    if "adapter_config.json" in paths:
        raise ValueError(f"{wanted.repository} holds an adapter and no model. Fetch its model, merge the adapter into "
                         "it with peft's merge_and_unload, and give that folder")
    raise ValueError(f"{wanted.repository} holds no model that Shoal reads: neither .gguf files nor config.json and "
                     "weights")


def quant_of(path: str) -> str:
    """The quantisation that a file's name says, such as Q4_K_M or UD-Q4_K_XL; empty where it says none."""
    found = list(_QUANT.finditer(PurePosixPath(path).name))
    return found[-1][0].upper() if found else ""


def models_of(paths: Iterable[str]) -> list[str]:
    """The GGUF models among the files of a folder: first parts, without what lies beside models."""
    return [path for path in sorted(paths)
            if path.lower().endswith(".gguf") and not _aside(path) and _number(path) == 1]


def complete(chosen: Chosen, paths: Iterable[str]) -> bool:
    """Whether all files of a model in GGUF are among `paths`; those beside it may be missing."""
    return set(_parts(chosen.first)) <= set(paths)


def _one(wanted: Wanted, models: Sequence[str]) -> str:
    """The model that was asked for, its first part."""
    found = _matching(wanted.choice, models) if wanted.choice else _nearest_usual(models)
    if not found:
        raise ValueError(f"{wanted.repository} has no {wanted.choice!r}. {_there(wanted.choice, models)}")
    if len(found) > 1:
        raise ValueError(f"{wanted.name!r} may be {', '.join(found)}: give one of them, as in "
                         f"{wanted.repository}:{found[0]}")
    return found[0]


def _matching(choice: str, models: Sequence[str]) -> list[str]:
    """The models that a file's name, a quantisation or the end of a name picks."""
    asked = choice.lower()
    if asked.endswith(".gguf"):
        exact = [path for path in models if path.lower() == asked]
        return exact or [path for path in models if PurePosixPath(path).name.lower() == asked]
    for quant in (asked, f"ud-{asked}"):
        if found := [path for path in models if quant_of(path).lower() == quant]:
            return found
    return [path for path in models if _stem(path).lower().endswith(asked)]


def _nearest_usual(models: Sequence[str]) -> list[str]:
    """The models whose quantisation is the usual one, or the nearest to it that there is."""
    best = min(map(_distance, models))
    return [path for path in models if _distance(path) == best]


def _distance(path: str) -> tuple[int, int, bool]:
    quant = quant_of(path)
    bits = int(digits[0]) if (digits := re.search(r"\d+", quant)) else 0
    end = next((number for number, end in enumerate(_ENDS) if quant.endswith(end)), len(_ENDS))
    return _BITS.index(bits) if bits in _BITS else len(_BITS), end, quant.startswith("UD-")


def _there(choice: str, models: Sequence[str]) -> str:
    """What a repository has instead."""
    if not models:
        return "It has no .gguf file; leave out what follows the colon for its folder"
    names = [path if choice.lower().endswith(".gguf") or not quant_of(path) else quant_of(path) for path in models]
    near = get_close_matches(choice.lower(), [name.lower() for name in names], n=1, cutoff=0.5)
    meant = f"Did you mean {next(name for name in names if name.lower() == near[0])}? " if near else ""
    return f"{meant}It has {', '.join(sorted(set(names)))}"


def _parts(first: str) -> tuple[str, ...]:
    found = _PART.fullmatch(first)
    if found is None:
        return (first,)
    return tuple(f"{found[1]}-{part:05}-of-{found[3]}{first[-5:]}" for part in range(1, int(found[3]) + 1))


def _number(path: str) -> int:
    """Which part of a model a file is, by its name."""
    found = _PART.fullmatch(path)
    return 1 if found is None else int(found[2])


def _stem(path: str) -> str:
    found = _PART.fullmatch(path)
    return PurePosixPath(found[1]).name if found else PurePosixPath(path).stem


def _aside(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return name.startswith(_FURTHER) or any(part in name for part in _ASIDE)


def _further(first: str, paths: Sequence[str]) -> tuple[str, ...]:
    """The file that predicts further tokens beside a model: of several the one with the nearest quantisation."""
    beside = [path for path in paths if posixpath.dirname(path) == posixpath.dirname(first)
              and PurePosixPath(path).name.lower().startswith(_FURTHER) and path.lower().endswith(".gguf")]
    beside.sort(key=lambda path: (quant_of(path) != quant_of(first), _distance(path)))
    return tuple(beside[:1])


def _encoder(first: str, paths: Sequence[str]) -> str:
    """The file that reads pictures beside a model: of several the most precise of usual size; empty without one."""
    beside = [path for path in paths if posixpath.dirname(path) == posixpath.dirname(first)
              and _ENCODES in PurePosixPath(path).name.lower() and path.lower().endswith(".gguf")]
    kinds = {path: quant_of(path).replace("FP", "F") for path in beside}
    beside.sort(key=lambda path: _PRECISE.index(kinds[path]) if kinds[path] in _PRECISE else len(_PRECISE))
    return beside[0] if beside else ""


def _folder(paths: Sequence[str]) -> tuple[str, ...]:
    """The files of a model in the Hugging Face format; empty where there is none."""
    top = [path for path in paths if "/" not in path]
    weights = ([path for path in top if path.startswith("model") and path.endswith(".safetensors")]
               or [path for path in top if path.startswith("pytorch_model") and path.endswith(".bin")])
    if "config.json" not in top or not weights:
        return ()
    return (*weights, *(path for path in top if path.endswith(_TEXTS)))
