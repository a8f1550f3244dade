"""The report of a benchmark: one JSON object with the command, the machine, and all readings."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.system import Setting

SCHEMA = 1
_NUMBERS = re.compile(r"\[[-+.,\de\s]*\]")


def framed(
    found: Mapping[str, Any],
    model: MeasuredModel,
    setting: Setting,
    *,
    machine: Mapping[str, Any],
    command: Sequence[str],
) -> dict[str, Any]:
    """Findings with the heading, the model and the setting before them."""
    return {
        **heading(machine, command),
        "subject": dict(model.facts()),
        "setting": dataclasses.asdict(setting),
        **found,
    }


def heading(machine: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The fields that every report begins with."""
    return {
        "schema": SCHEMA,
        "command": shown(command),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": dict(machine),
    }


def shown(argv: Sequence[str]) -> str:
    """A command line without folders of this machine: GGUF files stand in $SHOAL_MODELS, other files by their name."""
    return " ".join(_shown(argument) for argument in argv)


def _shown(argument: str) -> str:
    name, sign, value = argument.partition("=")
    if sign and Path(value).is_absolute():
        return f"{name}={_shown(value)}"
    path = Path(argument)
    if not path.is_absolute():
        return shlex.quote(argument)
    if path.suffix == ".gguf":
        return f"$SHOAL_MODELS/{shlex.quote(path.name)}"
    inside = path.is_relative_to(Path.cwd()) and path != Path.cwd()
    return shlex.quote(str(path.relative_to(Path.cwd()) if inside else path.name))


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write a report to a file, each list of numbers on one line."""
    text = json.dumps(found, indent=1)
    path.write_text(_NUMBERS.sub(lambda list_: " ".join(list_[0].split()), text) + "\n", encoding="utf-8")


def publish(report: Mapping[str, Any], path: Path | None) -> None:
    """Write a report if a path is given, and print it on one line: the last step of a script in `benchmarks/`."""
    if path is not None:
        write(report, path)
    print(json.dumps(report))


def commit(folder: Path | None = None) -> str | None:
    """The git commit of this code, with `-dirty` if tracked files have changed; None outside a clone."""
    where = folder or Path(__file__).parent
    try:
        head = _git(where, "rev-parse", "HEAD")
        return head + ("-dirty" if _git(where, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *argv: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *argv], capture_output=True, text=True, check=True)
    return done.stdout.strip()
