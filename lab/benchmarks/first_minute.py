"""From a clone to the first answer: seconds and megabytes of `make demo`, of several commits by turns.

    python lab/benchmarks/first_minute.py --commits OLD,NEW --work FOLDER [--repository DIR] [--rounds 1] [--json OUT]

Every run clones into an empty folder, which is removed afterwards, and has an empty cache of its own for kernels and
weights. Packages come as pip is configured here, and pip's cache is that of the user, alike for all. The last line on
stdout is the report.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import script


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--commits", required=True, help="names or hashes, with commas between them")
    parser.add_argument("--repository", type=Path, default=Path.cwd())
    parser.add_argument("--work", type=Path, required=True, help="folder for the clones")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    results = [_first_answer(args.repository.resolve(), commit, args.work) for _ in range(args.rounds)
               for commit in args.commits.split(",")]
    found = {"kind": "first_minute", "pip": _pip("--version").split(" from ")[0], "results": results}
    script.publish(__file__, sys.argv[1:], found, args.json)
    return int(any(one["exit_code"] for one in results))


def _first_answer(repository: Path, commit: str, work: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=work) as folder:
        clone, load, start = Path(folder, "shoal"), os.getloadavg()[0], time.monotonic()
        _git("clone", "--quiet", str(repository), str(clone))
        _git("-C", str(clone), "checkout", "--quiet", commit)
        cloned = time.monotonic() - start
        environment = {name: value for name, value in os.environ.items()
                       if name not in ("PYTHONPATH", "SHOAL_MODELS", "SHOAL_SHARED", "MAKEFLAGS")}
        environment |= {"XDG_CACHE_HOME": str(Path(folder, "cache")), "PIP_CACHE_DIR": _pip("cache", "dir").strip()}
        process = subprocess.Popen(["make", "demo"], cwd=clone, env=environment, text=True, errors="replace",
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        moments, last = _moments(process, start)
        found = {
            "commit": _git("-C", str(clone), "rev-parse", "HEAD").strip(), "exit_code": process.wait(),
            "seconds": {"clone": cloned, "first_line": moments[0], "answer": time.monotonic() - start,
                        "longest_silence": max(b - a for a, b in zip(moments, moments[1:], strict=False))},
            "megabytes": {name: _megabytes(path) for name, path in (
                (".git", clone / ".git"), (".venv", clone / ".venv"), ("cache", Path(folder, "cache")))},
            "packages": len(list((clone / ".venv").glob("lib*/python*/site-packages/*.dist-info"))),
            "last_lines": last, "load_before": load,
        }
    print(found, file=sys.stderr, flush=True)
    return found


def _moments(process: subprocess.Popen[str], start: float) -> tuple[list[float], list[str]]:
    """When lines came, and when the output ended, in seconds after `start`; and the last three lines."""
    assert process.stdout is not None
    lines = [(time.monotonic() - start, line.rstrip()) for line in process.stdout]
    return [*(moment for moment, _ in lines), time.monotonic() - start], [line for _, line in lines[-3:]]


def _megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e6


def _git(*argv: str) -> str:
    return subprocess.run(["git", *argv], check=True, capture_output=True, text=True).stdout


def _pip(*argv: str) -> str:
    return subprocess.run([sys.executable, "-m", "pip", *argv], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
