"""What goes wrong between this machine and the Hub, as one line that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from time import sleep
from typing import Any, TypeVar

from shoal.hub.names import Wanted, table

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk, or a user's share of it, that has no room left."""
_BUSY, _TRIES, _LONGEST = 429, 4, 60.0
_LOG_IN = "`hf auth login`, or a token in HF_TOKEN"
T = TypeVar("T")


def patient(ask: Callable[[], T]) -> T:
    """What a question to the Hub gives; where it says that it is asked too often, it is asked again, thrice at most."""
    from huggingface_hub.errors import HfHubHTTPError

    for tried in range(1, _TRIES):
        try:
            return ask()
        except HfHubHTTPError as error:
            if error.response.status_code != _BUSY:
                raise
            sleep(_wait(error.response.headers, tried))
    return ask()


def _wait(headers: Any, tried: int) -> float:
    """Seconds to wait: as the Hub says, a minute at most, or longer each time."""
    with suppress(TypeError, ValueError):
        return min(max(float(headers.get("retry-after")), 0.0), _LONGEST)
    return float(2**tried)


@contextmanager
def told(wanted: Wanted, path: str = "") -> Iterator[None]:
    """Turn what fails inside the block into a ValueError of one line.

    Args:
        wanted: what was asked for.
        path: the file that is being fetched; empty before one is.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as error:
        raise ValueError(_refused(error, wanted, path)) from error
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise ValueError(_out_of_reach(error, wanted, path)) from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        what = path or wanted.repository
        raise ValueError(f"the disk is full: {what} could not be written, and what there was of it is removed. Free "
                         "some room, or set HF_HOME to a folder on another disk, and pull again") from error


def site() -> str:
    """The address of the Hub."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _refused(error: Any, wanted: Wanted, path: str) -> str:
    from huggingface_hub import errors

    repository, status = wanted.repository, error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return (f"{repository} is gated: accept its terms at {site()}/{repository} in a browser, then give your token: "
                f"{_LOG_IN}")
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not path):  # the Hub hides both alike
        return f"{site()} has no model {repository!r} that you may see{_near(wanted)}. If it is private: {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no branch, tag or commit of that name; see {site()}/{repository}"
    if isinstance(error, errors.EntryNotFoundError) or status == 404:
        return f"{repository} has no file {path!r} any more; pull again, or see {site()}/{repository}"
    if status == _BUSY:
        return (f"{site()} says that it is asked too often (429), and said so {_TRIES} times. Wait some minutes, or "
                f"log in, which allows more: {_LOG_IN}")
    if status in (401, 403):
        return f"{site()} does not let you have {repository} ({status}): check your token: {_LOG_IN}"
    return f"{site()} fails to give {path or repository} ({status}); pull again later"


def _near(wanted: Wanted) -> str:
    """Names that exist and are like the one that does not."""
    names = get_close_matches(wanted.name.lower(), table(), n=3, cutoff=0.6) or _like(wanted.repository)
    return f". Did you mean {' or '.join(names)}?" if names else ""


def _like(repository: str) -> list[str]:
    """Repositories of the Hub whose names begin alike, the most downloaded first."""
    from huggingface_hub import HfApi

    name = repository.rpartition("/")[2]
    for search in dict.fromkeys((name, name.rpartition("-")[0] or name, name.partition("-")[0])):
        with suppress(Exception):  # a hint is not worth a second error
            found = [model.id for model in HfApi().list_models(search=search, sort="downloads", limit=20)]
            if found:
                return get_close_matches(repository, found, n=3, cutoff=0.5) or found[:3]
    return []


def _out_of_reach(error: Exception, wanted: Wanted, path: str) -> str:
    from shoal import catalog

    cause = " ".join(str(error.__cause__ or error).split())[:120]
    page = f"{site()}/{wanted.repository}"
    file = path or (wanted.choice if wanted.choice.lower().endswith(".gguf") else "")
    what = f"{page}/resolve/main/{file}" if file else f"the files at {page}"
    return (f"{site()} cannot be reached ({cause}). By hand: fetch {what} on a machine that can, put it into "
            f"{catalog.folder()}, and give its path as --model; or pull again later, which goes on where this ended")
