"""Removes models from the Hub's cache, and from nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.hub.choose import choose, models_of
from shoal.hub.fetch import parts_of
from shoal.hub.names import Wanted
from shoal.hub.places import hub_cache


@dataclass(frozen=True)
class Removal:
    """Files of the cache that may be removed.

    Attributes:
        nbytes: what that frees.
        paths: the files, as their repository calls them; empty for the whole repository.
        execute: removes them.
    """

    nbytes: int
    paths: tuple[str, ...]
    execute: Callable[[], object]


def removal(wanted: Wanted) -> Removal | None:
    """What a name has in the cache; None for nothing.

    A name with a file or a quantisation means that model's files; where nothing else is here of its repository, and for
    a name without, it is the whole repository with what unfinished pulls have left.

    Raises:
        ValueError: the name may mean several models that are here, or none of them.
    """
    parts = parts_of(wanted.repository)
    left = sum(part.stat().st_size for part in parts)
    repository = _cached(wanted.repository)
    if repository is None:
        return Removal(left, (), lambda: _unlink(parts)) if parts else None
    files = {_name(file, revision): file for revision in repository.revisions for file in revision.files}
    chosen = set(choose(wanted, files).paths) if wanted.choice else set()
    others = set(models_of(files)) - chosen
    if chosen and others:
        needed = {path for other in others for path in choose(Wanted("", wanted.repository, other), files).paths}
        return _of_files(repository, chosen - needed)
    alone = replace(_info(), repos=frozenset({repository}))  # renamed repositories and copies have equal commits
    plan = alone.delete_revisions(*(revision.commit_hash for revision in repository.revisions))
    return Removal(repository.size_on_disk + left, (), plan.execute)  # with all revisions the whole folder goes


def _of_files(repository: Any, chosen: set[str]) -> Removal:
    """Some files in all revisions, and their bytes where no other file has the same."""
    every = [(file, _name(file, revision) in chosen) for revision in repository.revisions for file in revision.files]
    kept = {file.blob_path for file, gone in every if not gone}
    pointers = [file.file_path for file, gone in every if gone]
    blobs = {file.blob_path: file.size_on_disk for file, gone in every if gone and file.blob_path not in kept}
    return Removal(sum(blobs.values()), tuple(sorted(chosen)), lambda: _unlink([*pointers, *blobs]))


def _cached(repository: str) -> Any | None:
    """A repository of the cache, as `huggingface_hub` describes it."""
    from huggingface_hub import CacheNotFound

    with suppress(CacheNotFound):
        return next((one for one in _info().repos if one.repo_id == repository and one.repo_type == "model"), None)
    return None


def _info() -> Any:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(hub_cache())


def _name(file: Any, revision: Any) -> str:
    """A file's path in its repository."""
    path: Path = file.file_path
    return path.relative_to(revision.snapshot_path).as_posix()


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
