"""Who a request comes from, as a browser says: pages of strangers may not ask, nor names that were bound anew.

A browser lets any page send a request to any address, and hides only the answer; and a page whose name was made to
mean this machine reads that as well. Whatever is no browser sends none of the headers looked at here but Host.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shoal.serve.http.errors import ApiError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Origins of pages that this machine serves."""
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::(\d{1,5}))?", re.ASCII | re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


def hosts_of(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """The names by which a server that listens on a host may be asked; none for any.

    On a loopback address they are those of this machine, and `more`; elsewhere `more` and those of this machine where
    any are given, since nobody knows by what names a machine is known. `*` among them lets any in.
    """
    given, own = tuple(name.lower().rstrip(".") for name in more), _is_loopback(host)
    if "*" in given or not (given or own):
        return ()
    named = (f"[{host}]" if ":" in host else host.lower(),) if own else ()
    return tuple(dict.fromkeys((*_NAMES, *named, *given)))


def check_host(headers: Headers, hosts: Collection[str]) -> None:
    """Refuse a request under a name that is not the server's; ApiError 403."""
    for value in headers.getlist("host") if hosts else ():
        found = _HOST.fullmatch(value.strip())
        name = None if found is None else found[1].lower().rstrip(".")
        if name not in hosts and value.strip().lower() not in hosts:
            raise ApiError(403, f"this server may not be asked by the name {value[:200]!r}; the operator may allow it "
                           "by --allowed-host", code="host_not_allowed")


def check_origin(method: str, headers: Headers, allowed: Collection[str]) -> None:
    """Refuse a request of a page that is neither the server's own, nor of this machine, nor allowed; ApiError 403."""
    if "*" in allowed:
        return
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "").strip().lower()
    if origin is None:
        opened = method in ("GET", "HEAD") and headers.get("sec-fetch-mode", "").strip().lower() == "navigate"
        foreign = site == "cross-site" and not opened  # whoever follows a link to the page shows it to himself
    else:
        known = origin in allowed or re.fullmatch(LOCAL, origin, re.IGNORECASE) is not None
        foreign = not (known or site == "same-origin" or (not site and _is_own(origin, headers.get("host", ""))))
    if foreign:
        asking = f"pages of {origin[:200]!r}" if origin is not None else "pages of other sites"
        raise ApiError(403, f"{asking} may not ask this server; the operator may allow them by --cors-origin",
                       code="origin_not_allowed")


def _is_own(origin: str, host: str) -> bool:
    """Whether a page comes from where the request goes: what browsers say that send no Sec-Fetch-Site over http."""
    try:
        parts = urlsplit(origin)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return False
    found = _HOST.fullmatch(host.strip())
    if found is None or parts.hostname is None:
        return False
    return found[1].lower().strip("[]") == parts.hostname and int(found[2] or _PORTS.get(parts.scheme, 0)) == port


def _is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches it; False for a name that means nothing."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)
    except (OSError, ValueError, UnicodeError):
        return False
