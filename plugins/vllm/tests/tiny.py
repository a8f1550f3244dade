"""Tiny random models of the families, as folders, and engines on them."""

import functools
import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from vllm import LLM, SamplingParams

import shoal

BASE = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.25, bos_token_id=1,
            eos_token_id=2, pad_token_id=0)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma3": ("Gemma3", {"sliding_window": 32, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
                          "tie_word_embeddings": False,
                          "layer_types": ["sliding_attention", "full_attention"] * 4}),
}
LOOPS = {"llama-loops": ("Llama", {"initializer_range": 0.06})}
"""Its answers soon repeat themselves."""
ENGINE = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=224, max_num_seqs=6, block_size=32,
              kv_cache_memory_bytes=32 << 20)


@functools.cache
def folder(family: str) -> Path:
    """A model of the family, in float32."""
    name, more = (FAMILIES | LOOPS)[family]
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**BASE | more)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for at, parameter in model.named_parameters():  # biases and norms of a new model are all alike
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        if name == "Gemma3" and "post_" in at:  # its layers would hardly change what comes from the embedding
            parameter.data += 2
    path = Path(tempfile.mkdtemp(prefix=f"shoal-vllm-{family}-"))
    model.save_pretrained(path)
    return path


@functools.cache
def by_shoal(family: str) -> shoal.Engine:
    """Shoal's own engine on it."""
    return shoal.load(str(folder(family)), dtype="float32")


@contextmanager
def engine(model: Path, asked: dict[str, Any] | str | None = None, **options: Any) -> Iterator[LLM]:
    """vLLM on a folder, with these options for Shoal, or none."""
    if asked is not None:
        options["additional_config"] = {"shoal": asked}
    else:
        options.setdefault("enforce_eager", True)
    llm = LLM(str(model), **ENGINE | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def params(tokens: int, asked: Any = None, **more: Any) -> SamplingParams:
    """Greedy options for so many tokens."""
    extra = None if asked is None else {"shoal": asked}
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra, **more)


def answers(
    llm: LLM, prompts: Sequence[list[int]], wanted: Sequence[SamplingParams] | SamplingParams
) -> list[list[int]]:
    """What vLLM generates."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def reference(family: str, prompt: list[int], tokens: int, method: Any = "full") -> list[int]:
    """What Shoal's own engine generates."""
    result = by_shoal(family).generate(prompt, method=method, max_new_tokens=tokens, temperature=0, ignore_eos=True)
    return list(result.tokens)


def worker(llm: LLM) -> Any:
    """The worker, which lies in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


def scheduler(llm: LLM) -> Any:
    """The scheduler, which lies in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler
