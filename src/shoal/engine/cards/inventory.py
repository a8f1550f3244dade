"""Models on this machine, found without loading one: known files, GGUF files beside them, and the Hub's cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, scan_cache_dir

from shoal import catalog
from shoal.engine.cards import card as cards
from shoal.model.gguf.header import Header, Strings, read_header

_WEIGHTS = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True)
class HeldModel:
    """A model on this machine.

    Attributes:
        name: what `--model` takes.
        title: what it is called elsewhere; the name where nothing else is known.
        form: the form of its weights, such as "GGUF, Q4_1 and F32".
        architecture: by its file or config.
        nbytes: bytes of its weights on disk.
        cards: names of the cards whose model has the same sizes.
        problem: why it cannot be loaded; empty where it can.
    """

    name: str
    title: str
    form: str = ""
    architecture: str = ""
    nbytes: int = 0
    cards: tuple[str, ...] = ()
    problem: str = ""


def held() -> list[HeldModel]:
    """All models that are found, known names first."""
    named = list(_named())
    files = {path for _, path in named}
    others = sorted(path for path in catalog.folder().glob("*.gguf") if path.resolve() not in files)
    return [*(_file(name, path, catalog.KNOWN[name].title) for name, path in named),
            *(_file(path.stem, path, path.stem) for path in others), *_in_hub_cache()]


def _named() -> Iterator[tuple[str, Path]]:
    for name in catalog.KNOWN:
        path = catalog.place(name)
        if path is not None:
            yield name, path.resolve()


def _file(name: str, path: Path, title: str) -> HeldModel:
    """A GGUF file, by its header."""
    size = path.stat().st_size
    try:
        header = read_header(path)
    except ValueError as error:
        return HeldModel(name, title, "GGUF", nbytes=size, problem=str(error))
    kind = str(header.metadata.get("general.architecture", ""))
    counts = Counter(tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1)
    form = "GGUF, " + " and ".join(name for name, _ in counts.most_common(2))
    return HeldModel(name, title, form, kind, size, _cards(_sizes(header, kind)))


def _sizes(header: Header, kind: str) -> dict[str, Any]:
    words = header.metadata.get("tokenizer.ggml.tokens")
    return {"layers": header.metadata.get(f"{kind}.block_count"),
            "vocab": len(words) if isinstance(words, Strings) else None,
            "hidden": header.metadata.get(f"{kind}.embedding_length")}


def _in_hub_cache() -> Iterator[HeldModel]:
    with suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model" and repo.revisions:
                newest = max(repo.revisions, key=lambda revision: revision.last_modified)
                found = _folder(repo.repo_id, newest.snapshot_path)
                if found is not None:
                    yield found


def _folder(name: str, folder: Path) -> HeldModel | None:
    """A checkpoint of the Hub's cache; None where it holds no weights."""
    files = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS]
    if not files:
        return None
    size = sum(path.stat().st_size for path in files)
    endings = " and ".join(sorted({path.suffix[1:] for path in files}))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        why = "" if any(path.suffix == ".gguf" for path in files) else "it has no config.json"
        return HeldModel(name, name, endings, nbytes=size, problem=why)
    except ValueError:
        return HeldModel(name, name, endings, nbytes=size, problem="its config.json is no JSON")
    sizes = {"layers": config.get("num_hidden_layers"), "vocab": config.get("vocab_size"),
             "hidden": config.get("hidden_size")}
    dtype = config.get("dtype") or config.get("torch_dtype")
    form = f"{endings}, {dtype}" if dtype else endings
    return HeldModel(name, name, form, str(config.get("model_type", "")), size, _cards(sizes))


def _cards(sizes: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(data["model"]["name"]) for _, data in cards.every() if data["model"].get("sizes") == sizes)
