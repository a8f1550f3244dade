"""What an answer loses whose queries read few slots: cache correction of `tidal`, labels of `double_sparsity`.

    python lab/benchmarks/sparse_options.py --model FILE --channels CARD.json --text FILE,... [--k 64] [--json OUT]

A prompt of 3,072 tokens of each text is read in full; the next 256 tokens are then forced, one by one, as an answer.
`nats` is by how much their mean loss exceeds the full model's, for each text. `window` keeps as many slots by place,
the control. The last line on stdout is the report as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal.methods import make
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.tidal import Tidal

PROMPT, ANSWER, EVERY = 3072, 256, 64


def main(argv: Sequence[str]) -> int:
    """Read, and print the losses."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--channels", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--k", type=int, default=64)
    args = parser.parse_args(argv)
    engine = shoal.load(args.model)
    texts = [engine.tokenizer(Path(one).read_text("utf-8"))["input_ids"][2048:][: PROMPT + ANSWER]
             for one in args.text.split(",")]
    plain = [loss(engine, ids, "full") for ids in texts]
    ways = ways_of(make(args.channels), args.k, engine.runner.kv_sizes[0][1])
    found = {name: [loss(engine, ids, way) - full for ids, full in zip(texts, plain, strict=True)]
             for name, way in ways.items()}
    result = {"kind": "sparse_options", "model": Path(engine.model_name).name, "k": args.k, "prompt": PROMPT,
              "answer": ANSWER, "texts": [Path(one).name for one in args.text.split(",")], "full": plain,
              "nats": found}
    script.publish(__file__, argv, result, args.json)
    return 0


def ways_of(card: Any, k: int, dim: int) -> dict[str, Any]:
    """Methods by their names in the report."""
    def labeled(**options: Any) -> Any:
        return replace(card, inner=replace(card.inner, k=k, **options))

    return {
        "window": StreamingLLM(window=k - 4, every=1), "tidal": Tidal(k), f"tidal, correct {EVERY}":
        Tidal(k, correct=EVERY), f"double_sparsity, {dim // 4} of {dim}": labeled(), f"{dim // 4} in 4 bits":
        labeled(bits=4), f"{dim // 16} of {dim}": labeled(width=dim // 16), f"{dim // 16} in 4 bits":
        labeled(width=dim // 16, bits=4),
    }  # fmt: skip


def loss(engine: shoal.Engine, ids: Sequence[int], method: Any) -> float:
    """Mean loss in nats of the tokens behind the prompt."""
    found: list[float] = []

    def force(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = ids[text.shape[-1]]
        found.append(-scores[0].float().log_softmax(-1)[token].item())
        return torch.full_like(scores, -torch.inf).index_fill_(-1, torch.tensor([token]), 0.0)

    engine.generate(list(ids[:PROMPT]), method=method, max_new_tokens=len(ids) - PROMPT, temperature=0, ignore_eos=True,
                    logits_processor=[force])
    return sum(found[: len(ids) - PROMPT]) / (len(ids) - PROMPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
