"""Where models may already be on this machine: the Hub's cache, LM Studio's folder and Ollama's store.

LM Studio keeps repositories of the Hub as folders `org/name`. Ollama keeps files under their hashes, and a manifest for
each name, in the form of container images. What other tools hold is read and never changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal.catalog import ABSENT
from shoal.errors import Unsupported
from shoal.hub.choose import choose, complete
from shoal.hub.names import Wanted, parse
from shoal.user_cache import expanded

OLLAMA = "ollama:"
"""Beginning of the names of Ollama's models."""
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_WEIGHTS = "application/vnd.ollama.image.model"
_INDEX = ".index.json"


def here(wanted: Wanted, revision: str | None = None) -> Path | None:
    """The file or folder of a model that is on this machine as a whole, without the network; None where it is not.

    Args:
        revision: branch, tag or commit; None takes any that is here, the newest first.
    """
    for folder in _folders(wanted.repository, revision or wanted.revision):
        paths = paths_in(folder)
        with suppress(ValueError):
            chosen = choose(wanted, paths)
            if chosen.first and complete(chosen, paths):
                return folder / chosen.first
            if not chosen.first and _whole(folder, paths):
                return folder
    return None


def find(name: str, revision: str | None = None) -> Path | None:
    """The file or folder of a model of that name, as `here`; None where it may be on the Hub.

    Raises:
        ValueError: the name may mean several models, or is a short name of none.
        Unsupported: only Shoal reads the name, and the model is not on this machine.
    """
    if name.startswith(OLLAMA):
        if (file := ollama_file(name)) is not None:
            return file
        raise Unsupported(f"the model {name!r}", "Ollama holds none of that name", "`shoal models` lists those it does")
    wanted = parse(name)
    found = None if wanted is None else here(wanted, revision)
    if found is None and wanted is not None and wanted.spelled:
        raise Unsupported(f"the model {name!r}", ABSENT, f"Fetch it with: shoal pull {name}")
    return found


def paths_in(folder: Path) -> list[str]:
    """The files below a folder, relative to it, with / between folders; links to nowhere are left out."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def hub_cache() -> Path:
    """The folder of the Hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def storage(repository: str) -> Path:
    """The folder of a repository in the Hub's cache; it need not exist."""
    from huggingface_hub.file_download import repo_folder_name

    return hub_cache() / str(repo_folder_name(repo_id=repository, repo_type="model"))


def _folders(repository: str, revision: str | None) -> Iterator[Path]:
    """The folders that may hold a repository's files, the likeliest first."""
    home = storage(repository)
    named = _commit(home, revision or "main")
    if named.is_dir():
        yield named
    if revision is None:
        others = [one for one in _below(home / "snapshots") if one != named]
        yield from sorted(others, key=lambda one: one.stat().st_mtime, reverse=True)
        if repository.count("/") == 1:
            yield from (found for root in lm_studio() if (found := root / repository).is_dir())


def _commit(home: Path, revision: str) -> Path:
    """The snapshot that a branch, tag or commit names."""
    with suppress(OSError):
        revision = (home / "refs" / revision).read_text("ascii").strip()
    return home / "snapshots" / revision


def _whole(folder: Path, paths: list[str]) -> bool:
    """Whether a folder in the Hugging Face format has all its weights and a tokenizer."""
    indices = [path for path in paths if path.endswith(_INDEX) and "/" not in path]
    with suppress(OSError, ValueError, KeyError, AttributeError):
        parts = [set(json.loads((folder / path).read_text("utf-8"))["weight_map"].values()) for path in indices]
        return any("token" in path for path in paths) and all(part <= set(paths) for part in parts)
    return False


def lm_studio() -> list[Path]:
    """LM Studio's folders of models, of its present and its earlier versions."""
    homes = [expanded("~/.lmstudio"), expanded("~/.cache/lm-studio")]
    with suppress(OSError):
        pointer = expanded("~/.lmstudio-home-pointer")
        if pointer is not None:
            homes.insert(0, Path(pointer.read_text("utf-8").strip()))
    folders = [home / "models" for home in homes if home is not None]
    return [one for one in dict.fromkeys(folders) if one.is_dir()]


def in_lm_studio() -> Iterator[tuple[str, Path]]:
    """Each repository that LM Studio holds, by name and folder."""
    for root in lm_studio():
        for publisher in _below(root):
            yield from ((f"{publisher.name}/{one.name}", one) for one in _below(publisher))


def in_ollama() -> Iterator[tuple[str, Path]]:
    """Each model that Ollama holds whole: a name such as `ollama:qwen3:4b`, and the GGUF file."""
    root = _ollama()
    manifests = root / "manifests"
    for path in sorted(manifests.rglob("*")) if manifests.is_dir() else ():
        if path.is_file() and (blob := _blob(root, path)) is not None:
            yield OLLAMA + _ollama_name(path.relative_to(manifests).parts), blob


def ollama_file(name: str) -> Path | None:
    """The GGUF file of a name such as `ollama:qwen3:4b`, or `ollama:qwen3` for its tag latest; None without one."""
    held = dict(in_ollama())
    return held.get(name) or held.get(f"{name}:latest")


def _ollama() -> Path:
    place = os.environ.get("OLLAMA_MODELS") or "~/.ollama/models"
    return expanded(place) or Path(place)


def _ollama_name(parts: tuple[str, ...]) -> str:
    """A name as Ollama shows it, without the address of its own registry and library."""
    *where, tag = parts
    for own in (_REGISTRY, _LIBRARY):
        where = where[1:] if where[:1] == [own] else where
    return f"{'/'.join(where)}:{tag}"


def _blob(root: Path, manifest: Path) -> Path | None:
    """The file of weights that a manifest names; None where it names none, or several, or it is not there."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        layers = json.loads(manifest.read_text("utf-8"))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _WEIGHTS]
        found = root / "blobs" / digests[0].replace(":", "-") if len(digests) == 1 else None
        return found if found is not None and found.is_file() else None
    return None


def _below(folder: Path) -> list[Path]:
    """The folders in a folder, by name."""
    with suppress(OSError):
        return sorted(one for one in folder.iterdir() if one.is_dir())
    return []
