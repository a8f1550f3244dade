#!/usr/bin/env python3
"""Time the drafter inside vLLM: plain vLLM, Shoal's auto and vLLM's own n-grams, on chats and on texts to copy.

    OMP_NUM_THREADS=1 python plugins/vllm/benchmarks/drafts.py MODEL --json OUT
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its three engines take turns, and idle processes would take time
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from vllm import LLM, SamplingParams

CODE = '''def total(prices, rate):
    """The sum of some prices with tax."""
    result = 0
    for price in prices:
        if price < 0:
            raise ValueError("a price is negative")
        result += price * (1 + rate)
    return round(result, 2)
'''
NOTE = ("The library opens at nine on weekdays and at ten on Saturdays. It is closed on Sundays and on public "
        "holidays. Books may be kept for four weeks, and longer if nobody else has asked for them. A lost card "
        "costs five euros.")
ASKED = {
    "chat": ["Give me three tips for a better sleep.", "Explain why the sky is blue.",
             "Tell me a story about a lighthouse."],
    "copy": [f"Repeat this code word for word:\n```python\n{CODE}```", f"Repeat this text word for word: {NOTE}",
             f"Write this code again with the argument rate named tax:\n```python\n{CODE}```"],
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"speculative_config": {"model": "shoal_vllm.drafter.Auto", "num_speculative_tokens": 15}},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,
                                     "prompt_lookup_min": 2}},
}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    engines = {name: LLM(args.model, dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
                         kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False, **options)
               for name, options in KINDS.items()}
    table: dict[str, Any] = {}
    for kind, questions in ASKED.items():
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for run in range(args.runs + 1):
            for name, llm in engines.items():
                tokens, seconds = zip(*(answer(llm, asked, args.tokens) for asked in questions), strict=True)
                if run:  # the first one warms up
                    rates[name].append(sum(tokens) / sum(seconds))
        plain = statistics.median(rates["plain"])
        table[kind] = {name: {"tokens_per_second": round(statistics.median(found), 2),
                              "over_plain": round(statistics.median(found) / plain, 3),
                              "runs": [round(one, 2) for one in found]} for name, found in rates.items()}
    result = {"vllm": vllm.__version__, "dtype": "bfloat16", "streams": 1, "kinds": table}
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))


def answer(llm: LLM, asked: str, tokens: int) -> tuple[int, float]:
    """Tokens of an answer and its seconds, the prompt included."""
    params = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False)
    started = time.perf_counter()
    outputs = llm.chat([{"role": "user", "content": asked}], params, use_tqdm=False)
    return len(outputs[0].outputs[0].token_ids), time.perf_counter() - started


if __name__ == "__main__":
    main()
