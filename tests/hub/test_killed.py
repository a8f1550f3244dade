"""A pull whose process is killed goes on where it ended, as often as that happens."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hub_server import hub, sha256

FILE = "Big-Q4_K_M.gguf"
SIZE = 240 * 2**20  # of which pieces of 10 MiB are written at once


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    drawn = random.Random(7)
    data = drawn.randbytes(SIZE)
    with hub(repositories={"org/big": {FILE: data}}, piece=1 << 20, pause=0.05) as server:
        env = {**os.environ, "HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path),
               "HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*"}
        command = [sys.executable, "-m", "shoal", "pull", "org/big"]
        for number in range(10):
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            while len(server.gets()) == number and process.poll() is None:
                time.sleep(0.01)
            time.sleep(drawn.uniform(0.0, 1.6))
            process.kill()
            process.communicate()
        assert len(server.gets()) == 10
        server.pause = 0.0
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    place = Path(done.stdout.strip())
    assert place.name == FILE and sha256(place.read_bytes()) == sha256(data)
    blobs = tmp_path / "hub" / "models--org--big" / "blobs"
    assert [path.name for path in blobs.iterdir()] == [sha256(data)]
    begins = [int(asked[6:-1] or 0) if asked else 0 for asked in server.gets()]
    assert begins == sorted(begins) and begins[-1] > 0, begins
    assert "are here" in done.stderr
