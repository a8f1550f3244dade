"""CTranslate2: int8 weights, activations rounded to int8, the rest in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lines


def prepare(folder: Path, work: Path, bits: int, threads: int) -> tuple[lines.Running, dict[str, Any]]:
    """Convert with its own converter."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(work), quantization="int8", force=True)
    generator = ctranslate2.Generator(str(work), device="cpu", intra_threads=threads, compute_type="int8")
    words = _words(folder)

    def running(prompt: list[int], new_tokens: int, seen: lines.Clock) -> None:
        def told(step: Any) -> bool:
            seen.note(step.token_id)
            return False

        generator.generate_batch([[words[token] for token in prompt]], max_length=new_tokens, min_length=new_tokens,
                                 sampling_topk=1, beam_size=1, include_prompt_in_result=False, callback=told)

    return running, {"detail": "int8, its own converter", "bits": 8}


def _words(folder: Path) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    named = {number: word for word, number in tokenizer.get_vocab().items()}
    return [named.get(number, "") for number in range(max(named) + 1)]


if __name__ == "__main__":
    lines.serve("ctranslate2", prepare)
