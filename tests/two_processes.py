"""One of the processes that share a model: makes its calls, and writes what came of them. Started by torchrun.

argv: where to write, the calls to make as JSON, then folders of models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4], [20] * 12]
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "d3": {"method": {"method": "d3", "method_args": {"alpha": 0.8, "core": 2}}},
    "early_exit": {"method": {"method": "early_exit", "method_args": {"exit_layer": 2}}},
    "prompt_lookup": {"method": "prompt_lookup"},
    "d3_spec": {"method": {"method": "d3_spec", "method_args": {"mean": 0.6, "core": 1}}},
    "draft_model": {"method": {"method": "draft_model", "method_args": {"draft": "BESIDE"}}},
    "sampled": {"temperature": 1.0, "seed": 11},
    "best_of": {"method": {"method": "best_of", "method_args": {"n": 3}}, "temperature": 1.0, "seed": 11},
}
"""What is asked of both, where nothing else is said; BESIDE stands for the folder of a second model."""


def answers(engine: Any, calls: Mapping[str, dict[str, Any]] = CALLS) -> dict[str, Any]:
    """What an engine says, alone or as one of several processes."""
    found = {}
    calls_here = json.dumps(calls).replace("BESIDE", str(Path(engine.model_name).with_name("hybrid")))
    for name, options in json.loads(calls_here).items():
        results = engine.generate(PROMPTS, max_new_tokens=12, **options)
        found[name] = [[*result.tokens, *result.depths] for result in results]
    return found


def held(model: Any) -> int:
    """How many numbers this process holds."""
    return sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())


def torchrun(*argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Two processes that run these words."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, argv)]
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here.parent / 'src'}{os.pathsep}{here}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, **options)


def main() -> None:
    import shoal
    from shoal.engine.loading import ranks
    from shoal.engine.scheduling.scheduler import Scheduler

    report: dict[str, Any] = {}
    for folder in sys.argv[3:]:
        for dtype in ("float64", "float32"):
            engine = shoal.load(folder, dtype=dtype, device="cpu", tensor_parallel=True)
            said = answers(engine, json.loads(sys.argv[2]))
            report[f"{Path(folder).name} {dtype}"] = {**said, "held": held(engine.model)}
    drawn = engine.generate([5, 6], max_new_tokens=6, temperature=1.0)
    report["drawn"] = [drawn.seed, *drawn.tokens]
    report["refused"] = {}
    control = {"method": "prompt_lookup", "method_args": {"control": "goodput"}}
    for name, call in {
        "controller": lambda: engine.generate([5], method=control),
        "scheduler": lambda: Scheduler(engine),
    }.items():
        try:
            call()
        except ValueError as error:
            report["refused"][name] = str(error)
    Path(f"{sys.argv[1]}.{engine.ranks.rank}").write_text(json.dumps(report))
    ranks.leave()


if __name__ == "__main__":
    main()
