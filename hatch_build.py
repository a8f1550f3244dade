"""Puts compiled kernels into wheels built on Linux with a C compiler, on x86-64 or ARM; others hold sources only.

`SHOAL_PREBUILT=0` leaves them out. `auditwheel repair` gives a wheel for everybody its tag.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src") / "shoal" / "model" / "packed" / "native"


class KernelHook(BuildHookInterface):
    """Compiles before a wheel is put together, and clears away after it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling; an editable install compiles on first use."""
        if version == "editable" or os.environ.get("SHOAL_PREBUILT") == "0":
            return
        build = _build_module(Path(self.root) / NATIVE / "build.py")
        folder = self._folder()
        try:
            libraries = build.build_ahead(folder)
        except build.BuildError as error:
            self.app.display_warning(f"without compiled kernels: {error}")
            return
        target = (NATIVE / build.PREBUILT).relative_to("src")
        build_data["force_include"].update({str(path): str(target / path.name) for path in libraries})
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-linux_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See hatchling."""
        shutil.rmtree(self._folder(), ignore_errors=True)

    def _folder(self) -> Path:
        return Path(self.directory) / "kernels"


def _build_module(path: Path) -> ModuleType:
    """The file as a module: the package would import torch."""
    spec = importlib.util.spec_from_file_location("shoal_kernel_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
