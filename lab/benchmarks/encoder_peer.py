"""T5 beside CTranslate2, in int8: seconds to the first token and of whole answers, and tokens per second.

    python lab/benchmarks/encoder_peer.py --work DIR [--peer DIR] [--sources 64,256,1024] [--rounds 5] [--json OUT]

The weights are random, in the form of T5 v1.1-base. CTranslate2 converts the same model; `--peer` is a folder with that
package, where it is not installed otherwise. In each round both answer the same sources, one after another, in one
process: with one token, then with all. Equal sources are encoded once, so each call has its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import script
import shoal
from shoal_lab.bench import idle, rounds

_VOCABULARY, _LAST = 32128, 32000
Answer = Callable[[list[int], int], int]
"""Answers a source with that many tokens; returns how many there were."""
Times = tuple[float, float]
"""Seconds to the first token, and of the whole answer."""


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the models, 1.3 GB")
    parser.add_argument("--peer", type=Path, help="folder with the package ctranslate2")
    parser.add_argument("--sources", default="64,256,1024", help="tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.peer:
        sys.path.insert(0, str(args.peer))
    import ctranslate2

    torch.set_num_threads(args.threads)
    folder = made(args.work)
    answers = {"shoal": of_shoal(folder / "transformers"), "ctranslate2": of_peer(folder / "ctranslate2", args.threads)}
    busy, results = idle.watch(1.0), list[dict[str, Any]]()
    for size in map(int, args.sources.split(",")):
        found: dict[str, list[Times]] = {name: [] for name in answers}
        for number in range(-1, args.rounds):  # the first one warms
            for name in rounds.in_order(list(answers), number):
                found[name].append(timed(answers[name], size, args.new_tokens, number))
        results.append(row(size, args.new_tokens, {name: times[1:] for name, times in found.items()}))
    script.publish(__file__, sys.argv[1:], {"threads": args.threads, "ctranslate2": ctranslate2.__version__,
                                            "busy_before": busy, "results": results}, args.json)
    return 0


def made(folder: Path) -> Path:
    """The folder with both forms of the model, written once."""
    if (folder / "ctranslate2" / "model.bin").is_file():
        return folder
    from ctranslate2.converters import transformers as converters

    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(
        d_model=768, d_ff=2048, d_kv=64, num_heads=12, num_layers=12, num_decoder_layers=12, vocab_size=_VOCABULARY,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=0)).eval()
    model.save_pretrained(folder / "transformers")
    spec = converters._MODEL_LOADERS["T5Config"].get_model_spec(model)
    spec.register_source_vocabulary(names(range(_VOCABULARY)))
    spec.register_target_vocabulary(names(range(_VOCABULARY)))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = names(range(3))
    spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.bos_token, False
    spec.validate()
    spec.optimize(quantization="int8")
    (folder / "ctranslate2").mkdir(parents=True, exist_ok=True)
    spec.save(str(folder / "ctranslate2"))
    return folder


def names(ids: Any) -> list[str]:
    """Tokens by their ids."""
    return [f"t{one}" for one in ids]


def of_shoal(folder: Path) -> Answer:
    """Shoal, greedy."""
    engine = shoal.load(str(folder), quant="int8")
    return lambda ids, new: len(engine.generate(ids, max_new_tokens=new, temperature=0.0, ignore_eos=True).tokens)


def of_peer(folder: Path, threads: int) -> Answer:
    """CTranslate2, greedy."""
    import ctranslate2

    engine = ctranslate2.Translator(str(folder), device="cpu", compute_type="int8", inter_threads=1,
                                    intra_threads=threads)

    def answer(ids: list[int], new: int) -> int:
        found = engine.translate_batch([names(ids)], beam_size=1, max_decoding_length=new, min_decoding_length=new,
                                       max_input_length=0)
        return len(found[0].hypotheses[0])

    return answer


def timed(answer: Answer, size: int, new_tokens: int, number: int) -> Times:
    """Of answers to sources of that many tokens, which depend on the number."""
    times = list[float]()
    for place, new in enumerate((1, new_tokens)):
        seeded = torch.Generator().manual_seed(2 * (number + 1) + place)
        ids = torch.randint(10, _LAST, (size,), generator=seeded).tolist()
        began = time.perf_counter()
        if answer(ids, new) != new:
            raise RuntimeError(f"an answer has another number of tokens than {new}")
        times.append(time.perf_counter() - began)
    return times[0], times[1]


def row(size: int, new_tokens: int, found: Mapping[str, list[Times]]) -> dict[str, Any]:
    """Figures of sources of a size: how many times as soon, and as fast, Shoal answers."""
    pairs = list(zip(found["shoal"], found["ctranslate2"], strict=True))
    speeds = {name: [(new_tokens - 1) / (whole - first) for first, whole in times] for name, times in found.items()}
    return {"source": size, "first_seconds": {name: [first for first, _ in times] for name, times in found.items()},
            "whole_seconds": {name: [whole for _, whole in times] for name, times in found.items()},
            "tokens_per_second": speeds,
            "first_times_sooner": rounds.ratio(theirs / ours for (ours, _), (theirs, _) in pairs),
            "whole_times_sooner": rounds.ratio(theirs / ours for (_, ours), (_, theirs) in pairs),
            "times_faster": rounds.ratio(
                ours / theirs for ours, theirs in zip(speeds["shoal"], speeds["ctranslate2"], strict=True))}


if __name__ == "__main__":
    raise SystemExit(main())
