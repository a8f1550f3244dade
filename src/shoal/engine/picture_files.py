"""Pictures as clients send them: decoded within bounds, and none fetched.

Pillow reads them. A file's size in pixels is known from its header, before anything of it is decoded.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from shoal.errors import Unsupported, pip_install

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What Pillow may decode: forms that browsers show, whose decoders many eyes have seen."""
MOST_PIXELS = 64 << 20
"""Of one picture, and twice as many of a conversation's. Decoded they take three bytes each."""
MOST_BYTES = 64 << 20
_INSTALL = f"Install it with: {pip_install('shoal[pictures]')}"


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise Unsupported("a picture", "Pillow, which reads it, is not installed", _INSTALL) from None
    return Image


def all_decoded(files: Sequence[bytes]) -> list[Any]:
    """The pictures of a conversation; ValueError as for `decoded`, and for too many pixels in all."""
    total = sum(image.width * image.height for image in map(opened, files))
    if total > 2 * MOST_PIXELS:
        raise ValueError(f"{len(files)} pictures have {total / 2**20:.0f} million pixels; at most "
                         f"{2 * MOST_PIXELS >> 20} million are decoded for a conversation. Send smaller ones")
    return [*map(decoded, files)]


def url_of(data: bytes) -> str:
    """The data URL of a picture's file; ValueError if it is none."""
    kind = opened(data).format.lower()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def decoded(data: bytes) -> Any:
    """The picture of a file, upright, its first frame, as Pillow's image in RGB.

    Raises:
        ValueError: it is no picture, a broken one, or one of too many pixels.
        Unsupported: Pillow is not installed.
    """
    image = opened(data)
    from PIL import ImageOps

    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if "transparency" in upright.info or upright.mode in ("RGBA", "LA", "PA"):
            return _on_white(upright.convert("RGBA"))
        return upright.convert("RGB")
    except (OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError) as error:
        raise ValueError(f"a picture is damaged: {' '.join(str(error).split())}") from None


def _on_white(image: Any) -> Any:
    """A picture with transparent parts as one sees it on a page."""
    ground = _pillow().new("RGBA", image.size, "white")
    return _pillow().alpha_composite(ground, image).convert("RGB")


def opened(data: bytes) -> Any:
    """The picture of a file, whose header alone is read; ValueError as for `decoded`."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own limit of pixels, which ours replaces
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError:
        raise _too_large("") from None
    except Exception:  # a header may break any parser
        raise ValueError(f"a picture of {len(data)} bytes is none of {', '.join(FORMATS)}, or is damaged") from None
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(f" of {image.width} by {image.height}")
    return image


def _too_large(size: str) -> ValueError:
    return ValueError(f"a picture{size} has more than {MOST_PIXELS >> 20} million pixels, the most that is decoded; "
                      "send a smaller one")
