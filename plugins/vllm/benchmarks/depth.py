#!/usr/bin/env python3
"""Time depth plans inside vLLM beside what measured parts of a step promise.

    python plugins/vllm/benchmarks/depth.py MODEL --json OUT

One engine with the plug-in serves full depth and D3 at several mean depths, turn by turn. The ideal of a schedule is
the time of a step at full depth less, for each layer that a token leaves out, the time of a layer, measured in that
engine. `--plain` times vLLM without the plug-in, eager, and `--compiled` as vLLM is by default: each in a process of
its own, since the idle workers of a second engine take time.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker

import vllm
from vllm import LLM, SamplingParams

import shoal

PROMPT, MEANS = 32, (0.9, 0.8, 0.6)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    options: dict[str, Any] = {"enforce_eager": args.plain}
    if not args.plain and not args.compiled:
        options = {"additional_config": {"shoal": {}}}
    llm = LLM(args.model, dtype="bfloat16", max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=256 << 20,
              enable_prefix_caching=False, skip_tokenizer_init=True, **options)
    kinds: dict[str, Any] = {"full depth": None}
    if "additional_config" in options:
        kinds |= {f"d3 mean {mean}": {"method": "d3", "mean": mean} for mean in MEANS}
    layers = llm.llm_engine.model_config.get_total_num_hidden_layers()
    result = {"engine": "vllm" if args.plain else "vllm compiled" if args.compiled else "shoal-vllm",
              "vllm": vllm.__version__, "dtype": "bfloat16", "prompt": PROMPT, "tokens": args.tokens,
              "runs": args.runs, "layers": layers,
              "streams": [measure(llm, kinds, streams, args, layers) for streams in args.streams]}
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()


def measure(llm: LLM, kinds: dict[str, Any], streams: int, args: Any, layers: int) -> dict[str, Any]:
    """Seconds of a step for every kind, in turns, and the ideal."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for run in range(args.runs + 1):
        for name, asked in kinds.items():
            taken = step_seconds(llm, streams, args.tokens, asked)
            if run:  # the first one warms up
                seconds[name].append(taken)
    steps = {name: statistics.median(values) for name, values in seconds.items()}
    found: dict[str, Any] = {"streams": streams}
    if len(kinds) > 1:
        found["seconds_of"] = parts = timed_parts(llm, streams, args.tokens)
    for name, values in seconds.items():
        row = {"tokens_per_second": round(streams / steps[name], 2), "seconds": [round(value, 6) for value in values]}
        if (asked := kinds[name]) is not None:
            plan = shoal.D3(mean=asked["mean"]).recipe(shoal.ModelInfo(layers, args.tokens)).plan
            # Token 0 comes with the prompt, which is not timed here.
            mean = (plan.layer_tokens(args.tokens) - layers) / (args.tokens - 1)
            ideal = steps["full depth"] - (layers - mean) * parts["layer"]
            row |= {"mean_layers": round(mean, 3), "speedup": round(steps["full depth"] / steps[name], 3),
                    "ideal_speedup": round(steps["full depth"] / ideal, 3), "of_ideal": round(ideal / steps[name], 3)}
        found[name] = row
    return found


def step_seconds(llm: LLM, streams: int, tokens: int, asked: Any) -> float:
    """Seconds of a step in which all streams have read their prompts and none has ended."""
    engine = llm.llm_engine
    extra = None if asked is None else {"shoal": asked}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
    for stream in range(streams):
        prompt = [1000 + 37 * stream + place for place in range(PROMPT)]
        engine.add_request(f"{time.time_ns()}-{stream}", {"prompt_token_ids": prompt}, params)
    lengths: dict[str, int] = {}
    points: list[tuple[float, int]] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        lengths |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        if len(lengths) == streams and max(lengths.values()) < tokens:
            points.append((time.perf_counter(), min(lengths.values())))
    (started, first), (ended, last) = points[0], points[-1]
    return (ended - started) / (last - first)


def timed_parts(llm: LLM, streams: int, tokens: int) -> dict[str, float]:
    """Seconds of a layer and of the head in a step at full depth, and of all else."""
    llm.collective_rpc(begin_timing)
    step = step_seconds(llm, streams, tokens, None)
    layers, layer, head = llm.collective_rpc(end_timing)[0]
    return {"layer": layer, "head": head, "step": step - layer * layers - head}


def begin_timing(worker: Any) -> None:
    """In the worker: time what its layers and its head take in steps without a prompt."""
    import time

    model = worker.model_runner.get_model()
    worker.spent = {"layer": [], "head": []}

    def timing(call: Any, part: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = call(*args, **kwargs)
            worker.spent[part].append(time.perf_counter() - started)
            return found

        return timed

    worker.undo = [(layer, "forward", layer.forward) for layer in model.model.layers]
    worker.undo.append((model, "compute_logits", model.compute_logits))
    for owner, name, call in worker.undo:
        setattr(owner, name, timing(call, "head" if owner is model else "layer"))


def end_timing(worker: Any) -> tuple[int, float, float]:
    """In the worker: the number of layers, and the mean seconds of one and of the head, prompts left out."""
    for owner, name, call in worker.undo:
        setattr(owner, name, call)
    layers = len(worker.undo) - 1
    spent = worker.spent["layer"][layers:], worker.spent["head"][1:]
    return layers, *(sum(values) / len(values) for values in spent)


if __name__ == "__main__":
    main()
