"""OpenVINO GenAI: weights rounded to 4 or 8 bits by NNCF, exported by Optimum."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lines

GROUP = 64
"""Inputs that share a scale at 4 bits, so that all matrices divide by it."""


def prepare(folder: Path, work: Path, bits: int, threads: int) -> tuple[lines.Running, dict[str, Any]]:
    """Export by Optimum's command, all matrices at the asked bits; embedding and head have 8."""
    import numpy as np
    import openvino
    import openvino_genai

    rounded = ["--weight-format", f"int{bits}"]
    rounded += ["--group-size", str(GROUP), "--ratio", "1.0"] if bits == 4 else []
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(folder),
               "--task", "text-generation-with-past", *rounded, str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise lines.Absent(f"its exporter failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # every round reads the same prompt
    pipe = openvino_genai.LLMPipeline(str(work), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
    base: Any = openvino_genai.StreamerBase

    class Stamps(base):  # type: ignore[misc]
        """Notes tokens as they come."""

        def __init__(self, seen: lines.Clock) -> None:
            super().__init__()
            self.seen = seen

        def write(self, token: Any) -> Any:
            """One token, or several."""
            for one in token if isinstance(token, list) else [token]:
                self.seen.note(one)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is left over."""

    def running(prompt: list[int], new_tokens: int, seen: lines.Clock) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        pipe.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), config, Stamps(seen))

    version = openvino.__version__.partition("-")[0]
    scales = 16 / GROUP if bits == 4 else 0
    return running, {"detail": f"int{bits} by NNCF, openvino {version}", "bits": bits + scales}


if __name__ == "__main__":
    lines.serve("openvino-genai", prepare)
