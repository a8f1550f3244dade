"""Files that are written whole or not at all, and are on the disk when the call returns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write to a temporary path, then move the file to `path`; the old file stays if that fails.

    Raises:
        OSError: there is no room, or no permission; names the file.
    """
    part = path.with_name(path.name + ".part")
    try:
        save(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if _is_full(error):
            raise OSError(f"{path} cannot be written ({error}); what was there before is untouched") from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    write(path, lambda part: part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8"))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: it cannot be read; names the file.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _is_full(error: BaseException) -> bool:
    """Whether writing failed; safetensors has an error of its own for that."""
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
