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
    found = Path(shoal.__file__).parent.rglob("*")
    files = [path for path in found if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 5 * 10**6
