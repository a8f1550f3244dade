"""ONNX Runtime GenAI: 4-bit weights in groups of 32, activations rounded to int8 where its kernels do that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lines


def prepare(folder: Path, work: Path, bits: int, threads: int) -> tuple[lines.Running, dict[str, Any]]:
    """Build by its model builder."""
    import onnxruntime_genai as engine

    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(work), "-p",
               f"int{bits}", "-e", "cpu", "-c", str(work.with_name("cache")), "--extra_options",
               "int4_accuracy_level=4", "int4_block_size=32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise lines.Absent(f"its builder failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    config = engine.Config(str(work))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
    model = engine.Model(config)

    def running(prompt: list[int], new_tokens: int, seen: lines.Clock) -> None:
        params = engine.GeneratorParams(model)
        length = len(prompt) + new_tokens
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = engine.Generator(model, params)
        generator.append_tokens(prompt)
        for _ in range(new_tokens):
            generator.generate_next_token()
            seen.note(generator.get_next_tokens()[0])

    return running, {"detail": f"int{bits} in groups of 32, accuracy level 4 (int8 activations)", "bits": bits + 0.5}


if __name__ == "__main__":
    lines.serve("onnxruntime-genai", prepare)
