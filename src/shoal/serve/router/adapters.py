"""Which model of a list an adapter belongs to: the one that is named, else the only one whose matrices it fits.

Nothing is loaded for that: a model's files say the sizes of its matrices, and an adapter's own those that it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.engine.loading.adapters import AdapterWish
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.model.lora.adapter import Adapter, Place
from shoal.serve.router.listing import Listed


@dataclass(frozen=True)
class Matrices:
    """What a model's files say of the matrices of its layers.

    Attributes:
        family: the type of its config; "" where the files cannot be read.
        sizes: rows and columns by place; empty where they say none.
    """

    family: str = ""
    sizes: Mapping[Place, tuple[int, int]] = field(default_factory=dict)


def assigned(
    models: Sequence[Listed], wishes: Sequence[tuple[str | None, AdapterWish]], files: Callable[[Listed], Checkpoint]
) -> list[Listed]:
    """The models with their adapters.

    Args:
        models: the list.
        wishes: adapters, each with a name of its model, or None.
        files: of a model of the list; ValueError where they cannot be read.

    Raises:
        ValueError: an adapter's files are missing or odd, it fits no model or several, or not the one that is named;
            there is no model of that name, or one that is named as the adapter.
        Unsupported: an adapter is more than products of low rank.
    """
    found, known = list(models), dict[str, Matrices]()

    def of(one: Listed) -> Matrices:
        if one.name not in known:
            known[one.name] = _matrices(one, files)
        return known[one.name]

    for model, wish in wishes:
        if any(wish.name in one.names for one in found):
            raise ValueError(f"the adapter {wish.path!r} would have the name {wish.name!r}, which there is already; "
                             "write NAME=PATH with another name")
        place = _place(found, wish, wish.load(), of) if model is None else _named(found, model, wish, of)
        found[place] = replace(found[place], adapters=(*found[place].adapters, wish))
    return found


def _place(models: Sequence[Listed], wish: AdapterWish, adapter: Adapter, of: Callable[[Listed], Matrices]) -> int:
    """The place of the only model that an adapter fits."""
    fitting = [at for at, one in enumerate(models) if _misfit(adapter, of(one), whole=True) is None]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise ValueError(f"the adapter {wish.path!r} fits none of the models {', '.join(one.name for one in models)}: "
                         f"{_misfit(adapter, of(models[0]), whole=True)}. Give the model that it was trained on")
    raise ValueError(f"the adapter {wish.path!r} fits {' and '.join(models[at].name for at in fitting)} alike. Say "
                     f"whose it is: --lora-for {models[fitting[0]].name}={wish.name}={wish.path}")


def _named(models: Sequence[Listed], name: str, wish: AdapterWish, of: Callable[[Listed], Matrices]) -> int:
    """The place of the model of a name, which an adapter must not contradict."""
    place = next((at for at, one in enumerate(models) if name in (one.name, *one.aliases, one.source)), None)
    if place is None:
        raise ValueError(f"--lora-for {name}: there is no such model; there are "
                         f"{', '.join(one.name for one in models)}")
    if (why := _misfit(wish.load(), of(models[place]), whole=False)) is not None:
        raise ValueError(f"the adapter {wish.path!r} is not for {models[place].name}: {why}. Give the model that it "
                         "was trained on")
    return place


def _misfit(adapter: Adapter, model: Matrices, *, whole: bool) -> str | None:
    """Why an adapter is for another model; None where it fits.

    Args:
        whole: whether the model's files must know each of its matrices. Some have other names in files than in
            transformers, which only loading settles.
    """
    if adapter.families and model.family and model.family not in adapter.families:
        return f"it is for the type {' or '.join(sorted(adapter.families))}, and that is {model.family}"
    for place, part in adapter.parts.items():
        wanted, held = (len(part.up), part.down.shape[1]), model.sizes.get(place)
        if held != wanted and (held is not None or whole):
            told = "there is none" if held is None else f"there it is {list(held)}"
            return f"its {place[1]!r} of layer {place[0]} is for a matrix {list(wanted)}, and {told}"
    return None


def _matrices(one: Listed, files: Callable[[Listed], Checkpoint]) -> Matrices:
    try:
        found = files(one)
        return Matrices(str(found.config().model_type), found.sizes())
    except (ValueError, OSError):  # loading the model says what is wrong
        return Matrices()
