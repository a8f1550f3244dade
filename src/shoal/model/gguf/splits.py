"""Models in several files, `NAME-00001-of-00003.gguf` and so on, and files that lie beside a model.

The first part has the metadata. Each says its number and how many there are (`split.no`, `split.count`), and how many
tensors they have together, as llama.cpp's gguf-split writes them.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.model.gguf.header import Header, mapped, parse

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_MOST = 99_999
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_FURTHER = "mtp-"
_ENCODES = "mmproj"
"""What names of files that are no model by themselves begin with, or hold."""
_ENCODERS = ("clip",)
"""Architectures of files that encode other things than text."""


def opened(path: Path, *, encoder: bool = False) -> tuple[Header, tuple[Path, ...], tuple[mmap.mmap, ...]]:
    """The header of a whole model, the paths of its parts, and their mappings; raises as `read_header`.

    ValueError as well for a part that is not the first one, is missing, or is of another model, and for an encoder
    of pictures unless that is asked for.
    """
    buffer = mapped(path)
    first = parse(buffer, path.name)
    _check_kind(first, path, encoder)
    paths = _parts(path, first)
    buffers = (buffer, *map(mapped, paths[1:]))
    headers = [first, *(parse(one, part.name) for one, part in zip(buffers[1:], paths[1:], strict=True))]
    return (first if len(paths) == 1 else _joined(headers, paths)), paths, buffers


def read_whole(path: Path) -> tuple[Header, tuple[Path, ...]]:
    """The header of a whole model and the paths of its parts, as `opened`."""
    header, paths, _ = opened(path)
    return header, paths


def is_later_part(name: str) -> bool:
    """Whether a file of that name is a part of a model, but not the first one."""
    found = _NAME.fullmatch(name)
    return found is not None and int(found[2]) != 1


def models_among(files: Iterable[Path]) -> list[Path]:
    """The files that can be loaded: later parts of others are left out, and what lies beside a model."""
    return sorted(path for path in files if not is_later_part(path.name) and not _is_beside(path.name.lower()))


def _is_beside(name: str) -> bool:
    return name.startswith(_FURTHER) or _ENCODES in name


def only_model(folder: Path) -> Path | None:
    """The model in a folder, be it in parts; None if there is none, and ValueError if there are several."""
    found = models_among(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(repr(path.name) for path in found[:4]) + (" and others" if len(found) > 4 else "")
        raise ValueError(f"the folder {str(folder)!r} holds several models: {names}. Give one of the files")
    return found[0] if found else None


def further_beside(folder: Path) -> list[Path]:
    """The files of a folder that predict further tokens for a model."""
    return sorted(path for path in folder.glob("*.gguf") if path.name.lower().startswith(_FURTHER))


def encoders_beside(folder: Path) -> list[Path]:
    """The files of a folder that encode pictures or sound for a model."""
    return sorted(path for path in folder.glob("*.gguf") if _ENCODES in path.name.lower())


def bytes_on_disk(path: Path) -> int:
    """Bytes of a file, or of all parts of a model that are there, by their names alone."""
    found = _NAME.fullmatch(path.name)
    names = path.parent.glob(f"*-of-{found[3]}{found[4]}") if found else ()
    parts = [one for one in names if (part := _NAME.fullmatch(one.name)) and found and part[1] == found[1]]
    return sum(one.stat().st_size for one in parts or (path,))


def _check_kind(header: Header, path: Path, encoder: bool) -> None:
    encodes = header.metadata.get("general.architecture") in _ENCODERS
    if encodes and not encoder:
        raise ValueError(f"{path.name!r} encodes images or sound for a model, and is none itself. Give the model's own "
                         ".gguf file")
    if encoder and not encodes:
        raise ValueError(f"{path.name!r} is no encoder of pictures (general.architecture must be clip)")


def _parts(path: Path, header: Header) -> tuple[Path, ...]:
    """The paths of all parts, by the name of the first one, whose header is given."""
    count, number = (_whole(header, key, path.name) for key in (_COUNT, _NUMBER))
    if not count or count == 1:
        return (path,)
    found = _NAME.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        own = (number or 0) + 1
        raise ValueError(f"{path.name!r} is part {own} of {count} of a model, and its name does not end in "
                         f"{own:05}-of-{count:05}.gguf. Rename it, so that the others are found")
    names = [f"{found[1]}-{part:05}-of-{count:05}{found[4]}" for part in range(1, count + 1)]
    if number or int(found[2]) != 1:
        raise ValueError(f"{path.name!r} is part {(number or 0) + 1} of {count} of a model; give the first one, "
                         f"{names[0]!r}")
    paths = tuple(path.with_name(name) for name in names)
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(f"the model in {count} parts {path.name!r} lacks {', '.join(map(repr, missing[:4]))}{more} in "
                         "its folder. Fetch all parts")
    return paths


def _joined(headers: Sequence[Header], paths: Sequence[Path]) -> Header:
    """The first header with the tensors of all parts."""
    whole, count = headers[0], len(headers)
    tensors = dict(whole.tensors)
    for part, (header, path) in enumerate(zip(headers, paths, strict=True)):
        said = _whole(header, _COUNT, path.name), _whole(header, _NUMBER, path.name)
        if said != (count, part):
            found = "nothing of parts" if said[0] is None else f"that it is part {(said[1] or 0) + 1} of {said[0]}"
            raise _stray(path, paths[0], f"it says {found}; it must be part {part + 1} of {count}")
        for name, info in header.tensors.items() if part else ():
            if name in tensors:
                raise _stray(path, paths[0], f"its tensor {name!r:.80} is in {paths[tensors[name].part].name!r}, too")
            tensors[name] = replace(info, part=part)
        total = _whole(header, _TENSORS, path.name)
        if total != _whole(whole, _TENSORS, paths[0].name):
            raise _stray(path, paths[0], f"it says that all parts have {total} tensors")
    total = _whole(whole, _TENSORS, paths[0].name)
    if total is not None and total != len(tensors):
        raise ValueError(f"the {count} parts of {paths[0].name!r} have {len(tensors)} tensors; it says {total}, so one "
                         "is of another model or damaged. Fetch them again")
    return replace(whole, tensors=tensors)


def _stray(path: Path, first: Path, why: str) -> ValueError:
    return ValueError(f"{path.name!r} does not belong to {first.name!r}: {why}. Fetch all parts of one model")


def _whole(header: Header, key: str, name: str) -> int | None:
    """A count of the metadata; ValueError for anything else."""
    found = header.metadata.get(key)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= _MOST * _MOST):
        raise ValueError(f"the GGUF file {name!r} has {key} {found!r:.40}; it must be a count. Fetch the file again")
    if key == _COUNT and found is not None and found > _MOST:
        raise ValueError(f"the GGUF file {name!r} has {key} {found}; it must be at most {_MOST}. Fetch the file again")
    return found
