"""Errors for requests that cannot be done, and checks of text and JSON from outside."""

from __future__ import annotations

import difflib
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

ONE_FILE = getattr(sys, "frozen", False)
"""Whether this is the one file without Python, which deploy/standalone makes."""


def pip_install(what: str) -> str:
    """The command that installs a package; where none can be added to this Python, that it takes another one."""
    where = ", in a Python of your own: this one file takes no packages" if ONE_FILE else ""
    return f"pip install {shlex.quote(what)}{where}"


LAB_INSTALL = pip_install("shoal-lab")


class Unsupported(ValueError):
    """A request that Shoal understands but cannot honour.

    Args:
        what: the thing asked for, with its value.
        why: the reason it cannot be done.
        remedy: what the caller can do instead.
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why}. {remedy}")
        self.what, self.why, self.remedy = what, why, remedy


class OutOfMemory(Unsupported):
    """A request or a model is too large for the memory; smaller ones still work."""


class QueueFull(RuntimeError):
    """Too many requests are waiting; the same request may be accepted later."""


class Interrupted(RuntimeError):
    """Work under way was lost, through no fault of the request; it may be sent again."""


class Closed(RuntimeError):
    """The engine or scheduler takes no more requests."""


@contextmanager
def told_by_transformers(what: str) -> Iterator[None]:
    """Turn what transformers' code raises on odd files inside the block into a ValueError of one line.

    Args:
        what: what the files say, for the message.
    """
    try:
        yield
    except (ImportError, MemoryError, OSError, Unsupported):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):  # which is how a CPU runs out of it
            raise
        told = " ".join(str(error).split())
        strict = "alidation error for" in told
        if isinstance(error, ValueError) and not strict:
            raise ValueError(told) from error
        why = (told.partition("ValueError: ")[2] or told) if strict else f"{type(error).__name__}: {told}"
        raise ValueError(f"{what} contradicts itself: {why:.300}. Fetch it again, or give a config that belongs to its "
                         "weights") from error


@contextmanager
def needs(extra: str, what: str, package: str = "shoal") -> Iterator[None]:
    """Turn an ImportError inside the block into `Unsupported`, which names the extra to install.

    Args:
        extra: name of the extra.
        what: what was asked for, for the message.
        package: the package that has the extra.
    """
    try:
        yield
    except ImportError as error:
        why = f"{error.name or error} is not installed"
        raise Unsupported(what, why, f"Install the extra: {pip_install(f'{package}[{extra}]')}") from error


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ValueError:
    """The error for an unknown name; it suggests the nearest known one, lists them all, and ends with `hint`."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), choices, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}.{meant} Known: {', '.join(choices) or 'none'}{hint}")


def lab_hint(what: str) -> str:
    """A hint, to end an error with, that shoal-lab brings more of `what`; empty if it is installed."""
    return "" if find_spec("shoal_lab") else f". More {what} come with shoal-lab: {LAB_INSTALL}"


def check_text(value: Any, what: str) -> None:
    """Refuse, by a ValueError that names `what`, text in a value with a lone surrogate, which has no UTF-8 form."""
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


def json_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object from its bytes; `what` names it in errors.

    Raises:
        ValueError: it is no UTF-8, no JSON or no object, is nested too deeply, or holds NaN, infinity or a surrogate.
    """
    try:
        given = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
        json.dumps(given, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be a JSON object")
    return given


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def stays_here(what: str) -> TypeError:
    """The error for pickling `what`, an object that belongs to its process."""
    return TypeError(f"{what} can be neither pickled, copied nor sent to another process: its weights and kernels "
                     "belong to this one. Send what shoal.load was given, and load the model there; processes that "
                     "load one GGUF file share its weights")
