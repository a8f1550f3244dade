"""Small studies of other fields.

The systems decode no text, or decode it from something else. A study is a module or a package here with the names of
`FieldStudy`. Nothing outside this folder imports one.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.errors import unknown

_REPORTS = Path(__file__).parents[3] / "reports" / "other_fields"
"""In a clone; a wheel has no reports."""


@dataclass(frozen=True)
class Options:
    """How a study is run.

    Attributes:
        full: Hours where the paper's claim needs them; otherwise under 15 minutes on two cores.
        seed: Of all that is drawn.
        pictures: Folder for pictures, or None.
        work: Folder in which training is kept, so that it goes on after a kill; None keeps nothing.
        data: Folder of data sets, for the studies that read one.
        models: GGUF files, for the studies that read language models.
    """

    full: bool = False
    seed: int = 0
    pictures: Path | None = None
    work: Path | None = None
    data: Path | None = None
    models: tuple[Path, ...] = ()


class FieldStudy(Protocol):
    """What a module of a study holds."""

    PAPER: str
    """Where the system was published, such as arXiv 2411.11925."""
    LINE: str
    """What the study does, in one line."""

    def run(self, options: Options) -> dict[str, Any]:
        """Train what must be trained, measure, and return all readings as JSON takes them."""

    def headline(self, found: Mapping[str, Any]) -> str:
        """The finding of a report in one sentence, with its figures."""


def names() -> list[str]:
    """All studies, by their names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def study(name: str) -> FieldStudy:
    """The study of a name.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in names():
        raise unknown("study", name, names())
    return cast("FieldStudy", import_module(f"{__name__}.{name}"))


def reported(name: str) -> dict[str, Any] | None:
    """The report of a study that the repository keeps, or None outside a clone."""
    path = _REPORTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None
