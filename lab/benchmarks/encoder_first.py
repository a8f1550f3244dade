"""An encoder with a shallow decoder beside a decoder of equal size: seconds to the first token, and tokens per second.

    python lab/benchmarks/encoder_first.py --work DIR [--prompts 64,256,1024] [--rounds 5] [--json OUT]

Both have random weights and the same width: T5's form with two thirds of its layers in the encoder, and Llama's with as
many numbers in all (Return of the Encoder, arXiv 2501.16273, has that split). The prompt is the encoder's source on one
side and the decoder's prompt on the other. Decoders and the encoder are in int8 on Shoal's kernels. In each round both
take their turn, in one process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import script
import shoal
from shoal_lab.bench import idle, rounds

_WIDTH, _INNER, _HEADS, _VOCABULARY = 1024, 2816, 16, 32128
_ENCODER, _DECODER, _ALONE = 16, 8, 27
"""Layers: 16 of 12.9 million numbers and 8 of 17.0, and 27 of 12.9."""


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the models, 1.7 GB")
    parser.add_argument("--prompts", default="64,256,1024", help="tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folders = {name: made(args.work / name, config) for name, config in configs().items()}
    engines = {name: shoal.load(str(folder), quant="int8") for name, folder in folders.items()}
    lengths = [int(word) for word in args.prompts.split(",")]
    found = {length: {name: list[tuple[float, float]]() for name in engines} for length in lengths}
    for engine in engines.values():
        answer(engine, lengths[0], 4, args.rounds)  # a prompt of its own: equal sources are encoded once
    busy = idle.watch(1.0)
    for number in range(args.rounds):
        for length in lengths:
            for name in rounds.in_order(list(engines), number):
                found[length][name].append(answer(engines[name], length, args.new_tokens, number))
    script.publish(__file__, sys.argv[1:], {
        "threads": args.threads, "busy_before": busy,
        "numbers": {name: count(engine) for name, engine in engines.items()},
        "results": [row(length, each) for length, each in found.items()]}, args.json)
    return 0


def configs() -> dict[str, Any]:
    """Of both models, by name."""
    return {
        "encoder-decoder": hf.T5Config(
            d_model=_WIDTH, d_ff=_INNER, d_kv=_WIDTH // _HEADS, num_heads=_HEADS, num_layers=_ENCODER,
            num_decoder_layers=_DECODER, vocab_size=_VOCABULARY, feed_forward_proj="gated-gelu",
            tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=0),
        "decoder": hf.LlamaConfig(
            hidden_size=_WIDTH, intermediate_size=_INNER, num_attention_heads=_HEADS, num_key_value_heads=_HEADS,
            num_hidden_layers=_ALONE, vocab_size=_VOCABULARY, max_position_embeddings=4096),
    }


def made(folder: Path, config: Any) -> Path:
    """The folder of a model with random weights, written once."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        kind = hf.T5ForConditionalGeneration if config.is_encoder_decoder else hf.LlamaForCausalLM
        kind(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def count(engine: Any) -> dict[str, int]:
    """Bytes of the weights, of the decoder's and of the encoder's."""
    encoder = engine.encoder
    held = 0 if encoder is None else sum(one.nbytes for one in encoder.module.parameters())
    return {"decoder_bytes": engine.runner.weights.nbytes, "encoder_bytes": held}


def answer(engine: Any, length: int, new_tokens: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token of an answer, and tokens per second after it; each round has prompts of its own."""
    ids = torch.randint(10, _VOCABULARY - 10, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    times, began = list[float](), time.perf_counter()
    for _ in engine.stream(ids, max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True):
        times.append(time.perf_counter() - began)
    return times[0], (len(times) - 1) / (times[-1] - times[0])


def row(length: int, each: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Figures of prompts of a length: how many times as soon, and as fast, the pair with an encoder answers."""
    pairs = list(zip(each["encoder-decoder"], each["decoder"], strict=True))
    return {"prompt": length, "first_seconds": {name: [one for one, _ in runs] for name, runs in each.items()},
            "tokens_per_second": {name: [one for _, one in runs] for name, runs in each.items()},
            "times_sooner": rounds.ratio(alone / ours for (ours, _), (alone, _) in pairs),
            "times_faster": rounds.ratio(ours / alone for (_, ours), (_, alone) in pairs)}


if __name__ == "__main__":
    raise SystemExit(main())
