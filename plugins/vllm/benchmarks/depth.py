#!/usr/bin/env python3
"""Time depth plans inside vLLM beside what measured parts of a step promise.

    OMP_NUM_THREADS=2 python plugins/vllm/benchmarks/depth.py MODEL --json OUT

One engine with the plug-in serves all kinds of requests, turn by turn: full depth and D3 at several mean depths. vLLM
without the plug-in, eager and compiled, runs in the same turns as engines of their own. The ideal of a schedule is the
time of full depth in vLLM alone less, for each layer that a token leaves out, the time of a layer, measured there.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that layers can be timed from here
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from vllm import LLM, SamplingParams

import shoal

PROMPT, MEANS = 32, (0.9, 0.8, 0.6)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--compiled", action="store_true", help="vLLM's compiled model, too")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    sizes: dict[str, Any] = dict(dtype="bfloat16", max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=256 << 20,
                                 enable_prefix_caching=False, skip_tokenizer_init=True)
    engines = {"vllm": LLM(args.model, enforce_eager=True, **sizes),
               "shoal": LLM(args.model, additional_config={"shoal": {}}, **sizes)}
    if args.compiled:
        engines["compiled"] = LLM(args.model, **sizes)
    layers = engines["vllm"].llm_engine.model_config.get_total_num_hidden_layers()
    kinds = {"vllm alone": (engines["vllm"], None), "full depth": (engines["shoal"], None)}
    kinds |= {f"d3 mean {mean}": (engines["shoal"], {"method": "d3", "mean": mean}) for mean in MEANS}
    if args.compiled:
        kinds["vllm alone, compiled"] = engines["compiled"], None
    found = [measure(kinds, streams, args, layers, engines["vllm"]) for streams in args.streams]
    result = {
        "command": f"plugins/vllm/benchmarks/depth.py {args.model} --tokens {args.tokens} --runs {args.runs}",
        "vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": "bfloat16",
        "processor": platform.processor() or platform.machine(), "prompt": PROMPT, "tokens": args.tokens,
        "runs": args.runs, "layers": layers, "streams": found,
    }
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))


def measure(kinds: dict[str, tuple[LLM, Any]], streams: int, args: Any, layers: int, plain: LLM) -> dict[str, Any]:
    """Seconds of a step for every kind, in turns, and the ideal."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    parts = timed_parts(plain, streams, args.tokens)
    for run in range(args.runs + 1):
        for name, (llm, asked) in kinds.items():
            taken = step_seconds(llm, streams, args.tokens, asked)
            if run:  # the first one warms up
                seconds[name].append(taken)
    steps = {name: statistics.median(values) for name, values in seconds.items()}
    table = {}
    for name, values in seconds.items():
        row = {"tokens_per_second": round(streams / steps[name], 2), "seconds": [round(value, 6) for value in values]}
        if (asked := kinds[name][1]) is not None:
            plan = shoal.D3(mean=asked["mean"]).recipe(shoal.ModelInfo(layers, args.tokens)).plan
            # Token 0 comes with the prompt, which is not timed here.
            mean = (plan.layer_tokens(args.tokens) - layers) / (args.tokens - 1)
            ideal = steps["vllm alone"] - (layers - mean) * parts["layer"]
            row |= {"mean_layers": round(mean, 3), "speedup": round(steps["vllm alone"] / steps[name], 3),
                    "ideal_speedup": round(steps["vllm alone"] / ideal, 3), "of_ideal": round(ideal / steps[name], 3)}
        table[name] = row
    return {"streams": streams, "seconds_of": {name: round(value, 7) for name, value in parts.items()}, "kinds": table}


def step_seconds(
    llm: LLM, streams: int, tokens: int, asked: Any, begin: Callable[[], None] = lambda: None
) -> float:
    """Seconds of a step after the prompts, all streams in phase; `begin` is called where they begin."""
    engine = llm.llm_engine
    extra = None if asked is None else {"shoal": asked}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
    for stream in range(streams):
        prompt = [1000 + 37 * stream + place for place in range(PROMPT)]
        engine.add_request(f"{time.time_ns()}-{stream}", {"prompt_token_ids": prompt}, params)
    engine.step()
    begin()
    started, steps = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    assert steps == tokens - 1, steps
    return (time.perf_counter() - started) / steps


def timed_parts(llm: LLM, streams: int, tokens: int) -> dict[str, float]:
    """Seconds of a layer and of the head in a step of vLLM alone, and of all else."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    model, spent = runner.get_model(), {"layer": 0.0, "head": 0.0}

    def timing(call: Any, part: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = call(*args, **kwargs)
            spent[part] += time.perf_counter() - started
            return found

        return timed

    step_seconds(llm, streams, tokens, None)
    stack = list(model.model.layers)
    for layer in stack:
        layer.forward = timing(layer.forward, "layer")
    model.compute_logits = timing(model.compute_logits, "head")
    step = step_seconds(llm, streams, tokens, None, lambda: spent.update(layer=0.0, head=0.0))
    for layer in stack:
        del layer.forward
    del model.compute_logits
    layer, head = spent["layer"] / (tokens - 1) / len(stack), spent["head"] / (tokens - 1)
    return {"layer": layer, "head": head, "step": step - layer * len(stack) - head}


if __name__ == "__main__":
    main()
