"""A model that a command names and that is not on this machine: it is fetched, or the user is told how to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import catalog
from shoal.errors import Unsupported
from shoal.heap import available
from shoal.hub.names import Wanted, parse
from shoal.hub.places import OLLAMA, here

if TYPE_CHECKING:
    from shoal.hub.fetch import Order

NEEDS = 1.25
"""Memory that a model takes, as a multiple of its weights: KV, buffers and libraries included."""
_YES = ("", "y", "yes")


def ready(name: str | None, revision: str | None = None, *, yes: bool = False) -> None:
    """Have the model of that name on this machine, where it is one of the Hub.

    Args:
        name: what `--model` takes; paths, known names and what is here are left alone.
        yes: fetch without asking.

    Raises:
        Unsupported: it is not here, and nobody could be asked, or said no.
        ValueError: it cannot be fetched.
    """
    wanted = absent(name, revision)
    if wanted is None:
        return
    if not yes and not _can_ask():
        raise Unsupported(f"the model {wanted.name!r}", catalog.ABSENT, f"Fetch it with: shoal pull {wanted.name}")
    asked = _order(wanted, revision)
    tell(asked)
    if not yes and not _agrees(asked):
        raise Unsupported(f"the model {wanted.name!r}", catalog.ABSENT, "Give another one, or let it be fetched")
    fetched(asked)


def absent(name: str | None, revision: str | None = None) -> Wanted | None:
    """What a name means on the Hub if it is not on this machine; None for what is here, and for paths."""
    if name is None or name.startswith(OLLAMA) or Path(name).exists() or catalog.find(name) != name:
        return None
    wanted = parse(name)
    return None if wanted is None or here(wanted, revision) is not None else wanted


def asked(name: str, revision: str | None = None, *, sees: bool = True) -> Order | None:
    """What the Hub says of a name, and of what reads pictures beside it; None where it is none of the Hub."""
    wanted = parse(name)
    return None if wanted is None else _order(wanted, revision, sees)


def _order(wanted: Wanted, revision: str | None, sees: bool = True) -> Order:
    from huggingface_hub.utils import logging

    from shoal.hub.fetch import order

    logging.set_verbosity_error()  # what fails is said in one line
    return order(wanted, revision, sees)


def tell(asked: Order) -> None:
    """Say on stderr what will be fetched, what will not, and what it means for this machine."""
    from shoal.hub.fetch import amount

    chosen, free = asked.chosen, available()
    what = chosen.first or "a folder in the Hugging Face format"
    print(f"{asked.wanted.repository}: {what}, {len(asked.files)} file{'s' * (len(asked.files) > 1)}, "
          f"{amount(asked.nbytes)}{_picked(asked)}", file=sys.stderr)
    if chosen.sees:
        print(f"with {chosen.sees}, which reads pictures; shoal pull --no-mmproj leaves it out", file=sys.stderr)
    if chosen.left:
        print(f"not fetched: {chosen.left}, which reads pictures", file=sys.stderr)
    if free is not None and asked.nbytes * NEEDS > free:
        print(f"note: it takes about {amount(int(asked.nbytes * NEEDS))} of memory, and {amount(free)} are free on "
              "this machine", file=sys.stderr)


def _picked(asked: Order) -> str:
    """Which quantisation was chosen where the name says none."""
    from shoal.hub.choose import USUAL

    chosen = asked.chosen
    if asked.wanted.choice or not chosen.quant:
        return ""
    return f" ({chosen.quant}, {'the usual choice' if chosen.quant == USUAL else f'the nearest to {USUAL} it has'})"


def fetched(asked: Order) -> Path:
    """Fetch a model and return what to load; says on stderr what is kept when it is interrupted."""
    from shoal.hub.fetch import fetch

    try:
        return fetch(asked, say=lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print(f"what is here is kept: shoal pull {asked.wanted.name} goes on from it", file=sys.stderr)
        raise


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _agrees(asked: Order) -> bool:
    from shoal.hub.fetch import amount

    print(f"fetch {amount(asked.missing)} now? [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in _YES
