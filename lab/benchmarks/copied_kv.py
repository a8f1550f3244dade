"""What it costs a chat's next turn to read copied KV where an answer skipped layers (arXiv 2503.08524, D3).

    python lab/benchmarks/copied_kv.py --model FILE [--questions 8] [--means 0.9,0.7] [--json OUT]

D3 answers a question, greedily and in at most 48 tokens; the full model is then told to say that in one sentence. What
it says after a refill is the reference: `nats` is the mean loss of its tokens where the first answer's tokens are read
otherwise, less that after the refill, and `same` the share that would still be the argmax. `copy` reads the KV of the
nearest layer below that ran them; the control reads `zeros` in its place.
Intervals of 95 % take questions as what was drawn. The last line on stdout is the report as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal.depth.plan import DepthPlan
from shoal.model.runner import SequenceChunk
from shoal_lab.train.prompts import open_prompts

FIRST, SECOND, AGAIN = 48, 24, "Now say that in one sentence."


def main(argv: Sequence[str]) -> int:
    """Chat, compare and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--means", default="0.9,0.7")
    args = parser.parse_args(argv)
    engine = shoal.load(args.model)
    questions = open_prompts(args.questions, 0)
    rows = [row(engine, questions, float(mean)) for mean in args.means.split(",")]
    result = {"kind": "copied_kv", "model": Path(engine.model_name).name, "questions": len(questions), "rows": rows}
    script.publish(__file__, argv, result, args.json)
    return 0


def row(engine: shoal.Engine, questions: Sequence[str], mean: float) -> dict[str, Any]:
    """The losses of the reference's tokens at one mean depth."""
    found = {way: list[tuple[float, float]]() for way in ("copy", "zeros")}
    for question in questions:
        spoken, least = reference(engine, question, mean)
        for way, (loss, same) in zip(found, copied(engine, question, mean, spoken), strict=True):
            found[way].append((loss - least, same))
    plan = engine.recipe(shoal.D3(mean=mean), FIRST).plan
    return {"mean": mean, "planned_layers": plan.mean_depth(FIRST),
            **{way: {"nats": spread([loss for loss, _ in own]), "same": spread([same for _, same in own])}
               for way, own in found.items()}}


def reference(engine: shoal.Engine, question: str, mean: float) -> tuple[tuple[int, ...], float]:
    """The second answer after a refill, and its mean loss."""
    chat = engine.session(temperature=0)
    chat.send(question, method=shoal.D3(mean=mean), max_new_tokens=FIRST)
    found = chat.send(AGAIN, method="full", max_new_tokens=SECOND, logprobs=0)
    return found.tokens, -sum(one.logprob for one in found.logprobs) / len(found.tokens)


def copied(engine: shoal.Engine, question: str, mean: float, spoken: Sequence[int]) -> list[tuple[float, float]]:
    """Mean loss of the second answer and its share of argmaxes, with copies and with zeros in their place."""
    chat = engine.session(temperature=0)
    first = chat.send(question, method=shoal.D3(mean=mean, fill="copy"), max_new_tokens=FIRST)
    ids = chat.stream(AGAIN, method="full", max_new_tokens=1).tokens  # cuts the cache, and runs nothing yet
    tokens, full = [*ids[chat._cache.positions[0] :], *spoken[:-1]], DepthPlan.full(engine.runner.num_layers)
    chunk = SequenceChunk(0, tokens, [0] * len(tokens), full, wanted=len(spoken))
    found, own = [], torch.tensor(spoken)
    for zeros in (False, True):
        if zeros:
            chat._cache.rollback(0)
            blank(engine, chat, mean, first.stats.prompt_tokens)
        logits = torch.as_tensor(engine.runner.forward([chunk], chat._cache)).float()
        loss = torch.nn.functional.cross_entropy(logits, own).item()
        found.append((loss, (logits.argmax(-1) == own).float().mean().item()))
    return found


def blank(engine: shoal.Engine, chat: Any, mean: float, prompt: int) -> None:
    """Put zeros in place of the copies."""
    plan = engine.recipe(shoal.D3(mean=mean), FIRST).plan
    for number, layer in enumerate(chat._cache.layers):
        first = prompt + plan.attention[number] - 1
        if first < layer.stored(0):
            layer.keys[0, :, first:], layer.values[0, :, first:] = 0, 0


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and the half width of its 95 % interval."""
    found = torch.tensor(values)
    return {"mean": found.mean().item(), "half": 1.96 * (found.std() / len(found) ** 0.5).item()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
