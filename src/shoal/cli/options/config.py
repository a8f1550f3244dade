"""Defaults of options from `shoal.toml`: the user's, in ~/.config/shoal, and the project's, in the working directory.

    model = "qwen2.5-coder-0.5b"    # of every command that has the option
    [serve]                         # of one command
    port = 8080
    method = "d3"
    mean = 0.95                     # an option of that method

The command line overrides the project's file, which overrides the user's. SHOAL_CONFIG names a file to read instead of
both; if it is empty, none is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import unknown
from shoal.user_cache import expanded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "shoal.toml"
SHARED = ("backend", "color", "device", "dtype", "model", "quant", "revision", "threads")
"""Settings allowed above the tables."""
OWN = ("mcp", "mcp-allow", "trust-remote-code", "unsafe")
"""Settings allowed in the user's own file only: a downloaded project must not be able to run code by them."""


def files() -> list[Path]:
    """The existing files, in rising priority."""
    named = os.environ.get("SHOAL_CONFIG")
    if named is not None:
        return [Path(named)] if named else []
    home = expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    own = [] if home is None else [home / "shoal" / FILE]
    return [path for path in (*own, Path(FILE)) if os.path.isfile(path)]  # not `is_file`, which raises if forbidden


def arguments(command: str, commands: Iterable[str], options: Iterable[str], argv: Sequence[str]) -> list[str]:
    """The files' settings for a command, as command-line arguments.

    Args:
        commands: all names that tables may have.
        options: the command's options that do not depend on a method, such as `--port`.
        argv: the command line. If it names a method, the files' method and its options are left out; models that it
            names take the place of theirs.

    Raises:
        ValueError: a file cannot be read, or holds an unknown setting; names the file.
    """
    known = set(options)
    own_method, own_model = (any(arg.split("=")[0] == option for arg in argv) for option in ("--method", "--model"))
    settings: dict[str, Any] = {}
    for path in files():
        found = _read(path, set(commands))
        if "method" in found.get(command, {}):  # options in an earlier file belong to another method
            settings = {name: value for name, value in settings.items() if f"--{name}" in known}
        settings |= {name: value for name, value in found.items() if not isinstance(value, Mapping)}
        settings |= found.get(command, {})
    return [arg for name, value in settings.items() for arg in _typed(name, value)
            if not (own_model and name == "model")
             and not (name in (*SHARED, *OWN) and f"--{name}" not in known)
            and not (own_method and (name == "method" or f"--{name}" not in known))]


def _read(path: Path, commands: set[str]) -> dict[str, Any]:
    """The settings of a file, with dashes in their names."""
    try:
        found = _dashed(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    for name, value in found.items():
        if isinstance(value, Mapping) and name not in commands:
            raise ValueError(f"{path}: {unknown('table', name, commands)}")
        if not isinstance(value, Mapping) and name not in (*SHARED, *OWN):
            raise ValueError(f"{path}: {unknown('setting of all commands', name, SHARED)}")
    tables = [found, *(value for value in found.values() if isinstance(value, Mapping))]
    if path == Path(FILE) and (risky := next((name for table in tables for name in table if name in OWN), None)):
        raise ValueError(f"{path}: {risky} may only stand in your own file, not in a project's; give it on the command "
                         "line")
    return found


def _dashed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): _dashed(value) if isinstance(value, Mapping) else value
            for name, value in found.items()}


def _typed(name: str, value: Any) -> list[str]:
    """A setting as it would be typed: a list repeats the option, `false` leaves it out."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
