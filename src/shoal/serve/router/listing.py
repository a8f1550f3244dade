"""Which models a server has, and by which names. Nothing here loads one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.engine.loading.adapters import AdapterWish
from shoal.hub.choose import models_of

_LATEST, _GGUF = ":latest", ".gguf"


@dataclass(frozen=True)
class Listed:
    """A model that may be served.

    Attributes:
        name: for clients.
        source: what `shoal.load` takes; None for the default model.
        aliases: further names.
        method: how requests that name no method are decoded; None for as the server says.
        adapters: what runs beside it for requests that name it.
    """

    name: str
    source: str | None
    aliases: tuple[str, ...] = ()
    method: Any = None
    adapters: tuple[AdapterWish, ...] = ()

    @property
    def served(self) -> tuple[str, ...]:
        """Its name, and those of its adapters: what lists show."""
        return (self.name, *(one.name for one in self.adapters))

    @property
    def names(self) -> tuple[str, ...]:
        """All names that mean it or one of its adapters."""
        return (*self.served, *self.aliases)

    def called(self, asked: str | None) -> str:
        """What a request by one of these names means: the name of an adapter, or its own."""
        meant = self.name if asked is None else next(
            (name for like in (asked, _short(asked)) for name in self.names if name == like),
            next((name for name in self.names if name.startswith(f"{asked}:")), self.name))
        return meant if meant in self.served else self.name


def listed(
    models: Sequence[str | None], folder: str | None = None, aliases: Iterable[tuple[str, str]] = (),
    methods: Mapping[str, Any] | None = None,
) -> list[Listed]:
    """The models of a server, those that are named one by one first.

    Args:
        models: what `--model` takes.
        folder: whose models are served, too; see `in_folder`.
        aliases: names and what they stand for: a model of the list by name or source, or a further one.
        methods: methods by models' names.

    Raises:
        ValueError: two models would have one name, a name is empty, a method belongs to none, or there is no model.
    """
    found = [Listed(name_of(model), model) for model in models] + ([] if folder is None else in_folder(folder))
    found = list(dict.fromkeys(found))
    _check_names(found)
    for alias, model in aliases:
        place = next((at for at, one in enumerate(found) if model in (one.name, one.source)), None)
        if place is None:
            found.append(Listed(alias, model))
        elif alias != found[place].name:
            found[place] = replace(found[place], aliases=(*found[place].aliases, alias))
    _check_names(found)
    for name, method in (methods or {}).items():
        place = next((at for at, one in enumerate(found) if name in one.names), None)
        if place is None:
            raise ValueError(f"--method-for {name}: there is no such model; there are {_names(found)}")
        found[place] = replace(found[place], method=method)
    if not found:
        raise ValueError(f"--models {folder}: it holds no model: neither .gguf files nor folders with them or with "
                         "config.json")
    return found


def name_of(source: str | None) -> str:
    """The name of a model: a path's last part without `.gguf`, else what was typed; `default` for the default model."""
    if source is None:
        return "default"
    path = Path(source)
    name = path.resolve().name if path.exists() else source
    return name[: -len(_GGUF)] if name.lower().endswith(_GGUF) else name


def in_folder(folder: str) -> list[Listed]:
    """The models in a folder: GGUF files, folders with one, and folders in the Hugging Face format.

    A folder with several GGUF models gives each, as `folder/file`. What lies beside models, such as projectors of
    pictures and further parts, is left out, as in llama-server's `--models-dir`.

    Raises:
        ValueError: it is no folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"--models {folder}: it is no folder; give one that holds models")
    paths = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    found = [Listed(name_of(str(root / path)), str(root / path)) for path in _files(root)]
    for one in paths:
        if one.is_dir() and (one / "config.json").is_file():
            found.append(Listed(one.name, str(one)))
        elif one.is_dir():
            files = _files(one)
            names = [one.name] if len(files) == 1 else [f"{one.name}/{name_of(str(one / file))}" for file in files]
            found += [Listed(name, str(one / file)) for name, file in zip(names, files, strict=True)]
    return found


def _files(folder: Path) -> list[str]:
    return models_of(path.name for path in folder.iterdir() if path.is_file())


def _check_names(found: Sequence[Listed]) -> None:
    owners: dict[str, Listed] = {}
    for one in found:
        for name in one.names:
            if not name.strip():
                raise ValueError("a model's name is empty; give --alias NAME=MODEL")
            other = owners.setdefault(name, one)
            if other is not one:
                raise ValueError(f"the name {name!r} would stand for both {other.source} and {one.source}; give one of "
                                 "them another name with --alias NAME=MODEL instead of --model")


def match(asked: str, found: Sequence[Listed]) -> Listed | list[Listed]:
    """The model that a request's name means, or all that it may mean, or none.

    Beside names and aliases it may end in `:latest` or `.gguf`, or be the part of one name before its colon.
    """
    for name in (asked, _short(asked)):
        for one in found:
            if name in one.names:
                return one
    like = [one for one in found if any(name.startswith(f"{asked}:") for name in one.names)]
    return like[0] if len(like) == 1 else like


def _short(asked: str) -> str:
    asked = asked.removesuffix(_LATEST)
    return asked[: -len(_GGUF)] if asked.lower().endswith(_GGUF) else asked


def stamp(listed: Listed) -> Any:
    """Tells a file that has changed, a model's or an adapter's; folders by what lies in them."""
    own = None if listed.source is None else _stamp(Path(listed.source))
    return (own, *(_stamp(Path(one.path)) for one in listed.adapters)) if listed.adapters else own


def _stamp(path: Path) -> Any:
    try:
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
        return [(each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in paths]
    except OSError:
        return None


def _names(found: Iterable[Listed]) -> str:
    return ", ".join(name for one in found for name in one.names) or "none"
