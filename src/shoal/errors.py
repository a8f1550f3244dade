"""What Shoal says when it is asked for something that cannot be done."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

LAB_INSTALL = "pip install shoal-lab"


class Unsupported(ValueError):
    """A request that Shoal understands but cannot honour.

    Args:
        what: the thing that was asked for, with its value.
        why: the reason it cannot be done.
        remedy: what the caller can do instead.
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why}. {remedy}")
        self.what, self.why, self.remedy = what, why, remedy


class OutOfMemory(Unsupported):
    """A request or a model that is too large for the memory there is; smaller ones go on working."""


class QueueFull(RuntimeError):
    """Too much is waiting already; the same request may be taken later."""


class Interrupted(RuntimeError):
    """Work under way was lost through no fault of the request; the same request may be made again."""


class Closed(RuntimeError):
    """Whoever was asked takes no more requests."""


@contextmanager
def needs(extra: str, what: str, package: str = "shoal") -> Iterator[None]:
    """Around imports of what an extra installs.

    Args:
        extra: its name.
        what: what was asked for, for the error.
        package: whose extra it is.

    Raises:
        Unsupported: something is not installed; names the extra.
    """
    try:
        yield
    except ImportError as error:
        why = f"{error.name or error} is not installed"
        raise Unsupported(what, why, f"Install the extra: pip install '{package}[{extra}]'") from error


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ValueError:
    """The error for an unknown name: it names the nearest known one and lists them all; `hint` ends it."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), choices, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}.{meant} Known: {', '.join(choices) or 'none'}{hint}")


def lab_hint(what: str) -> str:
    """The end of an error where shoal-lab, which brings more of `what`, is not installed."""
    return "" if find_spec("shoal_lab") else f". More {what} come with shoal-lab: {LAB_INSTALL}"


def check_text(value: Any, what: str) -> None:
    """Refuse text that is none: a lone surrogate, half of a character that UTF-16 writes in two, has no UTF-8.

    Args:
        value: text, or lists and mappings that may hold some.
        what: names it in the error.

    Raises:
        ValueError: says where the surrogate stands.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            lone = ascii(value[error.start])
            raise ValueError(f"{what} has the lone surrogate {lone} at character {error.start}, which is half of a "
                             "character that was cut in two; give the whole character, or leave it out") from None
    elif isinstance(value, Mapping):
        for key, one in value.items():
            check_text(key, what)
            check_text(one, what)
    elif isinstance(value, list | tuple):
        for one in value:
            check_text(one, what)


def stays_here(what: str) -> TypeError:
    """The error for pickling what belongs to its process, as giving it to another process does.

    Args:
        what: names the object.
    """
    return TypeError(f"{what} can be neither pickled, copied nor sent to another process: its weights and kernels "
                     "belong to this one. Send what shoal.load was given, and load the model there; processes that "
                     "load one GGUF file share its weights")
