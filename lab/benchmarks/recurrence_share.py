"""The share of a decoding step that recurrences take, from samples of the kernels by Linux' `perf`.

    python lab/benchmarks/recurrence_share.py --model FILE.gguf [--context 64] [--new-tokens 120] [--json OUT]

Samples are taken while one sequence decodes, and only those inside the kernels count. A recurrence is its convolution
and its state's update and output; the projections before and after it are matrices like others. The last line on
stdout is the result as JSON.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import script
import shoal

OURS = re.compile(r"run_(delta|dual|scan|lightning|lru|recurrence|pieces)|gate_dual|convolve|select_inputs|turn_matrix")
"""Functions of the kernels that are recurrences, as far as the compiler left them functions."""
_WARM = 16


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=120)
    args = parser.parse_args(argv)
    engine = shoal.load(args.model)
    prompt = list(range(100, 100 + args.context))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "perf.data"
        seconds = _decode(engine, prompt, args.new_tokens, data)
        samples = _samples(data)
    ours = {name: count for name, count in samples.items() if OURS.fullmatch(name)}
    script.publish(__file__, argv, {
        "kind": "share of recurrences", "model": Path(args.model).name, "context": args.context,
        "step_seconds": seconds, "samples": sum(samples.values()),
        "share": sum(ours.values()) / sum(samples.values()), "recurrences": ours,
        "most": dict(samples.most_common(12)),
    }, args.json)
    return 0


def _decode(engine: shoal.Engine, prompt: list[int], tokens: int, data: Path) -> float:
    """Decode, with samples after the first steps; seconds of a step."""
    sampler, began = None, 0.0
    with engine.stream([prompt], max_new_tokens=_WARM + tokens, ignore_eos=True, method="full") as stream:
        for number, _ in enumerate(stream, 1):
            if number == _WARM:
                command = ["perf", "record", "-q", "-F", "997", "-o", str(data), "-p", str(os.getpid())]
                sampler, began = subprocess.Popen(command), time.monotonic()
        seconds = (time.monotonic() - began) / tokens
    assert sampler is not None
    sampler.send_signal(signal.SIGINT)
    sampler.wait(30)
    return seconds


def _samples(data: Path) -> Counter[str]:
    """Samples by function of the kernels."""
    told = subprocess.run(["perf", "script", "-i", str(data), "-F", "ip,sym,dso"], capture_output=True, text=True,
                          check=True).stdout
    return Counter(line.split()[1] for line in told.splitlines() if "libshoal" in line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
