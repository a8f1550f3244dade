"""A real model: SmolLM2, dequantised to a Hugging Face folder, gives vLLM's plug-in and Shoal's engine equal tokens."""

from pathlib import Path

import pytest
import torch

import shoal
import tiny
from shoal import catalog
from shoal.engine.loading.gguf_checkpoint import GgufCheckpoint

ASKED = ["Give me three tips for a better sleep.", "Write a Python function that reverses a list."]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model in float32, with its tokenizer."""
    path, files = tmp_path_factory.mktemp("smollm2"), GgufCheckpoint(Path(catalog.find()))
    files.model(torch.float32).save_pretrained(path)
    tokenizer = files.tokenizer()
    assert tokenizer is not None
    tokenizer.save_pretrained(path)
    return path


def test_tokens_are_shoals(smollm2: Path) -> None:
    engine = shoal.load(str(smollm2), dtype="float32")
    prompts = [engine.tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True,
                                                    return_dict=False) for asked in ASKED]
    method, order = shoal.D3(mean=0.85, order="center_out"), {"method": "d3", "mean": 0.85, "order": "center_out"}
    with tiny.engine(smollm2, order, kv_cache_memory_bytes=256 << 20) as llm:
        together = tiny.answers(llm, prompts, tiny.params(48))
        assert together == [tiny.answers(llm, [prompt], tiny.params(48))[0] for prompt in prompts]
        full = tiny.answers(llm, prompts, tiny.params(48, "full"))
    for found, way in ((together, method), (full, "full")):
        for prompt, tokens in zip(prompts, found, strict=True):
            result = engine.generate(prompt, method=way, max_new_tokens=48, temperature=0, ignore_eos=True)
            assert tokens == list(result.tokens)
    assert together != full
