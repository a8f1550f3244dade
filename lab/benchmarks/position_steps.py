"""What telling positions costs a step: rotation, ALiBi's slopes, and T5's biases by distance, at the same sizes.

    python lab/benchmarks/position_steps.py --work DIR [--past 64,2048] [--rounds 7] [--json OUT]

Three decoders of 8 layers with random weights, in int8 on the kernels: GPT-NeoX's (rotation of whole heads, no parallel
residual), BLOOM's (ALiBi), and T5's (biases by distance; besides, each layer reads a source of 16 places). Widths,
heads and feed-forwards are equal. A step is a forward of one token behind so many; each round times 20 of each, by
turns. What a past costs is the difference of two pasts: there only attention differs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as hf

import script
import shoal
from shoal.depth.plan import DepthPlan
from shoal.model.runner import SequenceChunk
from shoal_lab.bench import idle, rounds

_WIDTH, _HEADS, _LAYERS, _VOCABULARY, _SOURCE, _STEPS = 1024, 16, 8, 32128, 16, 20


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the models, 1 GB")
    parser.add_argument("--past", default="64,2048", help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pasts = [int(word) for word in args.past.split(",")]
    steps = {name: Steps(made(args.work / name, config), pasts) for name, config in configs(max(pasts)).items()}
    busy = idle.watch(1.0)
    found = {(name, past): list[float]() for name in steps for past in pasts}
    for number in range(args.rounds):
        for name, past in rounds.in_order(list(found), number):
            found[name, past].append(steps[name].time(past))
    results = [{"model": name, "past": past, "ms": [round(1000 * one, 4) for one in times],
                "median_ms": round(1000 * median(times), 3),
                "over_rotation": rounds.ratio(own / base for own, base in zip(times, found["rotary", past],
                                                                              strict=True))}
               for (name, past), times in found.items()]
    script.publish(__file__, sys.argv[1:], {"threads": args.threads, "busy_before": busy, "results": results},
                   args.json)
    return 0


def configs(longest: int) -> dict[str, Any]:
    """Of the models, by how they tell positions."""
    return {
        "rotary": hf.GPTNeoXConfig(
            hidden_size=_WIDTH, intermediate_size=4 * _WIDTH, num_attention_heads=_HEADS, num_hidden_layers=_LAYERS,
            vocab_size=_VOCABULARY, use_parallel_residual=False, max_position_embeddings=longest + 64,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}),
        "alibi": hf.BloomConfig(hidden_size=_WIDTH, n_head=_HEADS, n_layer=_LAYERS, vocab_size=_VOCABULARY),
        "t5": hf.T5Config(
            d_model=_WIDTH, d_ff=4 * _WIDTH, d_kv=_WIDTH // _HEADS, num_heads=_HEADS, num_layers=1,
            num_decoder_layers=_LAYERS, vocab_size=_VOCABULARY, decoder_start_token_id=0),
    }


def made(folder: Path, config: Any) -> Path:
    """The folder of a model with random weights, written once."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        kind = hf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else hf.AutoModelForCausalLM
        kind.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Steps:
    """Times steps of a model behind texts of the given lengths."""

    def __init__(self, folder: Path, pasts: list[int]) -> None:
        engine = shoal.load(str(folder), quant="int8")
        self._runner, self._plan, self._caches = engine.runner, DepthPlan.full(_LAYERS), dict[int, Any]()
        for past in pasts:
            cache = self._caches[past] = self._runner.new_cache(1)
            if engine.encoder is not None:
                cache.attach(0, engine.encoder(torch.arange(10, 10 + _SOURCE)))
            for first in range(0, past, self._runner.prefill_chunk):
                self._run(cache, min(past - first, self._runner.prefill_chunk))
                cache.commit(0, range(min(past - first, self._runner.prefill_chunk)))

    def time(self, past: int) -> float:
        """Seconds of a step, the median of 20."""
        cache, times = self._caches[past], list[float]()
        for _ in range(_STEPS):
            began = time.perf_counter()
            self._run(cache, 1)
            times.append(time.perf_counter() - began)
            cache.rollback(0)
        return median(times)

    @torch.no_grad()
    def _run(self, cache: Any, count: int) -> None:
        tokens = [*range(100, 100 + count)]
        self._runner.forward([SequenceChunk(0, tokens, [0] * count, self._plan, wanted=1)], cache)


if __name__ == "__main__":
    raise SystemExit(main())
