"""A GGUF file needs little more memory than its size, while it is woven and when it was woven before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gguf_peak
import load_peak
from shoal.model.packed import native

HIDDEN, FFN, LAYERS, VOCAB = 512, 2048, 4, 64000
"""An embedding of 35 MB, read and woven in one go it would take 70, and as many small matrices as make 18 MB."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
def test_the_peak_is_little_more_than_the_file(tmp_path: Path) -> None:
    small = gguf_peak.write(tmp_path / "small.gguf", 64, 96, 2, 128)
    large = gguf_peak.write(tmp_path / "large.gguf", HIDDEN, FFN, LAYERS, VOCAB)
    command = [sys.executable, gguf_peak.__file__, str(small), str(large)]
    for start in ("first", "next"):
        environment = {**os.environ, "SHOAL_WEIGHTS": str(tmp_path / "woven")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode == load_peak.UNKNOWN:
            pytest.skip("this system does not restart the count of a process's peak")
        assert done.returncode == 0, done.stderr
        sizes = json.loads(done.stdout.splitlines()[-1])
        assert sizes["stack"] == "NativeStack"
        assert large.stat().st_size < sizes["peak"] + 4e6 and sizes["peak"] < 1.2 * large.stat().st_size, start
