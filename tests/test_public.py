"""The public names: all there, all lazy."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import shoal


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running `code`."""
    script = f"import sys\n{code}\nsys.stderr.write(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_import_is_light():
    assert not {"torch", "transformers", "numpy"} & loaded_by("import shoal")


def test_methods_and_values_are_light():
    code = "import shoal; shoal.D3(alpha=0.9).recipe(shoal.ModelInfo(32)); shoal.Sampling(); shoal.DepthPlan.full(4)"
    assert not {"torch", "transformers", "numpy"} & loaded_by(code)


@pytest.mark.parametrize("name", shoal.__all__)
def test_every_public_name_is_there(name):
    assert getattr(shoal, name) is not None
    assert name in dir(shoal)


def test_each_name_is_its_home_s_own():
    assert {"__version__", *shoal._HOME} == set(shoal.__all__)
    for name, home in shoal._HOME.items():
        assert getattr(shoal, name) is getattr(import_module(home), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'D4'"):
        getattr(shoal, "D4")  # noqa: B009


def test_the_package_stays_small():
    """As installed; `test_wheel.py` bounds what is loaded down."""
    package = Path(shoal.__file__).parent
    sizes = {path.relative_to(package).parts: path.stat().st_size for path in package.rglob("*") if path.is_file()}
    parts = sum(size for place, size in sizes.items() if place[0] == "parts")
    rest = sum(size for place, size in sizes.items() if place[0] != "parts" and "__pycache__" not in place)
    assert parts < 5 * 10**6 and rest < 3.6 * 10**6
