"""A GGUF file needs little more memory than its size, while it is woven and when it was woven before."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
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
        assert sizes["stack"] == "NativeRunner"
        assert large.stat().st_size < sizes["peak"] + 4e6 and sizes["peak"] < 1.2 * large.stat().st_size, start


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="pages that are shared are read from /proc")
@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
def test_two_servers_of_one_model_have_its_weights_in_memory_once(tmp_path: Path) -> None:
    file = gguf_peak.write(tmp_path / "large.gguf", HIDDEN, FFN, LAYERS, VOCAB)
    environment = {**os.environ, "SHOAL_WEIGHTS": str(tmp_path / "woven")}
    command = [sys.executable, "-m", "shoal", "serve", "--model", str(file), "--port", "0",
               "--served-model-name", "large"]
    servers = list[subprocess.Popen[str]]()
    try:
        for _ in range(2):  # the second finds what the first one has kept
            servers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
            url = next(found[1] for line in servers[-1].stderr or () if (found := re.search(r"(http://\S+)/v1", line)))
            body = {"model": "large", "prompt": [5, 6, 7], "max_tokens": 3}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        for server in servers:
            (weights,) = (one for one in psutil.Process(server.pid).memory_maps() if one.path.endswith("weights.bin"))
            assert weights.rss > 0.9 * file.stat().st_size
            assert weights.private_clean + weights.private_dirty < 0.01 * weights.rss
    finally:
        for server in servers:
            server.terminate()
            server.communicate()
