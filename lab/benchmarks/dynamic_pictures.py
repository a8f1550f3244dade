"""Right answers about pictures by the share of their tokens that a trained gate keeps, against random dropping.

    python lab/benchmarks/dynamic_pictures.py --model SmolLM2-135M-Instruct.Q4_1.gguf --work DIR --minutes 3
    python lab/benchmarks/dynamic_pictures.py --model SmolLM2-135M-Instruct.Q4_1.gguf --work DIR --json OUT

A small LLaVA is trained around the frozen model, then the gate inside it, then questions about held-out pictures are
asked by the product's own loading and method. Each call goes on where the last one stopped, for --minutes; without, to
the end. What is trained lies in DIR (300 MB).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal_lab.components.picture_gate import count_of
from shoal_lab.eval.paired import clustered_difference, wilson
from shoal_lab.methods.dynamic_pictures import DynamicPictures
from shoal_lab.pictures.gate import GateTraining
from shoal_lab.pictures.llava import HELD_OUT, SmallLlava, asked_of
from shoal_lab.pictures.shapes import TOKENS, Scene
from shoal_lab.train import files

SHARES = (0.7, 0.5, 0.3, 0.2, 0.1)
_SAVED_AT_ONCE = 25


def main() -> int:
    """Train, measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True, help="GGUF file of the language model")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is trained")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--steps", type=int, default=350, help="of the encoder with the language model")
    parser.add_argument("--gate-steps", type=int, default=110)
    parser.add_argument("--layer", type=int, default=2, help="the gate reads this layer's inputs")
    parser.add_argument("--keep", type=float, default=0.2, help="share of tokens with which the gate is trained")
    parser.add_argument("--pictures", type=int, default=150, help="held-out pictures, one question about each")
    parser.add_argument("--seeds", type=int, default=3, help="of random dropping")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    end = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    trained = train(args, end)
    if trained is None:
        print("not at the end; call again to go on", file=sys.stderr)
        return 0
    found = measure(args, end)
    if found is None:
        print("not at the end; call again to go on", file=sys.stderr)
        return 0
    script.publish(__file__, sys.argv[1:], {"training": trained, "results": found}, args.json)
    return 0


def train(args: Any, end: float) -> dict[str, Any] | None:
    """Train LLaVA and gate until `end`, in seconds of the monotonic clock; their facts, or None if that came first."""
    card, place = args.work / "gate" / "card.json", args.work / "llava"
    if card.exists():
        found: dict[str, Any] = files.read_json(card)
        return found
    base = shoal.load(args.model, backend="hf", dtype="bfloat16")
    llava = SmallLlava(base.model, base.tokenizer, place)
    loss = llava.train(args.steps, end - time.monotonic())
    if llava.steps["asking"] < args.steps:
        print(f"LLaVA: {llava.steps}, loss {loss:.3f}", file=sys.stderr)
        return None
    if not (place / "config.json").exists():
        llava.save()
    gate = GateTraining(base.model, llava.seer, base.tokenizer, args.work / "gate", layer=args.layer, keep=args.keep)
    surprise, share = gate.train(args.gate_steps, end - time.monotonic())
    if gate.steps < args.gate_steps:
        print(f"gate: {gate.steps} steps, loss {surprise:.3f}, {share:.3f} kept", file=sys.stderr)
        return None
    gate.export([shoal.load(str(place)).fingerprint])
    facts = {
        "llava": {"steps": llava.steps, "minutes": {name: round(one / 60, 1) for name, one in llava.seconds.items()}},
        "gate": {"steps": gate.steps, "minutes": round(gate.seconds / 60, 1), "layer": args.layer, "keep": args.keep,
                 "surprise": round(surprise, 3), "kept": round(share, 3)}}
    files.write_json(card, facts)
    return facts


def measure(args: Any, end: float) -> list[dict[str, Any]] | None:
    """A row for each way to answer; None if `end` came first."""
    ways: dict[str, dict[str, Any]] = {"all": {"keep": 1.0}}
    for keep in SHARES:
        ways[f"gate {keep}"] = {"keep": keep}
        ways |= {f"random {keep} {seed}": {"keep": keep, "random": seed} for seed in range(args.seeds)}
    kept = args.work / "answers.json"
    right: dict[str, list[bool]] = json.loads(kept.read_text()) if kept.exists() else {}
    engine, part = shoal.load(str(args.work / "llava")), str(args.work / "gate")
    for name, options in ways.items():
        method, own = DynamicPictures(part, **options), right.setdefault(name, [])
        while len(own) < args.pictures:
            if time.monotonic() > end:
                files.write_json(kept, right)
                return None
            own.append(answered(engine, method, len(own)))
            if len(own) % _SAVED_AT_ONCE == 0:
                files.write_json(kept, right)
    files.write_json(kept, right)
    return rows(right, args.pictures, args.seeds)


def answered(engine: Any, method: DynamicPictures, number: int) -> bool:
    """Whether the answer about a held-out picture is right."""
    scene = Scene(HELD_OUT + number)
    question = scene.questions[number % len(scene.questions)]
    found = engine.generate(asked_of(scene, question), method=method, max_new_tokens=1, temperature=0.0)
    return bool(found.text.strip() == question.answer)


def rows(right: dict[str, list[bool]], pictures: int, seeds: int) -> list[dict[str, Any]]:
    """Right answers of the gate and of random dropping, and their difference, by the share of tokens kept."""
    whole = right["all"][:pictures]
    made: list[dict[str, Any]] = [{"keep": 1.0, "tokens": TOKENS, "right": sum(whole) / pictures,
                                   "interval": wilson(sum(whole), pictures),
                                   "by_kind": by_kind(whole)}]
    for keep in SHARES:
        own = right[f"gate {keep}"][:pictures]
        blind = [right[f"random {keep} {seed}"][:pictures] for seed in range(seeds)]
        mean = [sum(each) / seeds for each in zip(*blind, strict=True)]
        apart = clustered_difference(mean, [*map(float, own)], range(pictures))
        made.append({
            "keep": keep, "tokens": count_of(TOKENS, keep), "right": sum(own) / pictures,
            "interval": wilson(sum(own), pictures), "by_kind": by_kind(own),
            "random": [sum(one) / pictures for one in blind], "random_by_kind": by_kind(mean),
            "difference": {"mean": apart.mean, "low": apart.low, "high": apart.high, "p": apart.p}})
    return made


def by_kind(right: Sequence[float]) -> dict[str, float]:
    """Right answers by what was asked."""
    kinds: dict[str, list[float]] = {}
    for number, one in enumerate(right):
        scene = Scene(HELD_OUT + number)
        kinds.setdefault(scene.questions[number % len(scene.questions)].about, []).append(one)
    return {name: sum(own) / len(own) for name, own in sorted(kinds.items())}


if __name__ == "__main__":
    raise SystemExit(main())
