from __future__ import annotations

import torch
import transformers

from shoal import compat


def test_versions_are_those_of_the_libraries():
    assert compat.installed_version("torch") == torch.__version__
    assert compat.installed_version("transformers") == transformers.__version__


def test_absent_package():
    assert compat.installed_version("no-such-distribution") is None
