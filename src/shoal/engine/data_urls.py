"""Files that clients send as data URLs. None is fetched."""

from __future__ import annotations

import base64
import binascii
import reprlib

from shoal.errors import Unsupported


def bytes_of(url: str, what: str, kind: str, most: int) -> bytes:
    """What a data URL holds.

    Args:
        what: "picture" or "sound", for errors.
        kind: a media type such as "image/png", for errors.
        most: bytes.

    Raises:
        ValueError: it is none, damaged, or holds more.
        Unsupported: it is an address from which the file would have to be fetched.
    """
    head, comma, body = url.partition(",")
    if not head.startswith("data:"):
        scheme = url.partition(":")[0]
        raise Unsupported(f"a {what} at {reprlib.repr(scheme)}:", "Shoal fetches nothing that a request names",
                          f"Send it as a data URL, such as data:{kind};base64,...")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"a {what}'s data URL must be data:{kind};base64, and the file in base64")
    if len(body) > most * 4 // 3 + 4:
        raise ValueError(f"a {what} has more than {most >> 20} MiB, the most that is read; send a smaller one")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"a {what}'s data URL is no valid base64") from None
