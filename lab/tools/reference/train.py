"""Train shoal-reference from the token file of `build.py`; stop and start it at will.

    python -m tools.reference.train --data DIR --out DIR --dtype bfloat16 --compile --batch 4096 --minutes 95

The learning rate falls to zero at the end of the budget: `--minutes` of wall clock over all starts, or `--tokens`,
whichever is spent first. Checkpoints are written every few minutes, at the end, and on SIGTERM.
`--compile` makes a step 2.5 times as fast on a CPU (3,200 tokens/s instead of 1,280 in bfloat16 on two cores) and needs
a C++ compiler. `--init` starts from the weights of another run or of an exported folder, with a schedule of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import Batch, Corpus
from .build import KINDS
from .export import export, restore
from .model import Model, Shape, layer
from .muon import Muon

WARMUP = 100
FLAT = 0.45


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that build.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, the loss curve and the model")
    parser.add_argument("--shape", default="24,128,352,4", help="layers,hidden,ffn,heads")
    parser.add_argument("--vocab", type=int, default=2_048)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--batch", type=int, default=6_144, help="tokens per step")
    parser.add_argument("--lr", type=float, default=0.02, help="of the matrices (Muon)")
    parser.add_argument("--lr-rest", type=float, default=3e-3, help="of embeddings and norms (AdamW)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=240.0, help="seconds between checkpoints")
    parser.add_argument(
        "--layer-dropout", type=float, default=0.0, help="rate at the last layer (LayerSkip, 2404.16710)"
    )
    parser.add_argument("--early-exit", type=float, default=0.0, help="weight of the early-exit loss (LayerSkip)")
    parser.add_argument("--init", type=Path, help="state.pt of another run, or an exported folder, to start from")
    return parser


class Run:
    """A training run with everything that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.set_num_threads(args.threads)
        self.corpus = Corpus(args.data / "corpus.pt")
        self.model = Model(Shape(*map(int, args.shape.split(",")), args.vocab), args.seed)
        if args.init:
            _start_from(args.init, self.model)
        self.optimizers = _optimizers(self.model, args)
        self.dtype = getattr(torch, args.dtype)
        self.step, self.tokens, self.spent = 0, 0, 0.0
        self.curve: list[dict[str, float]] = []
        self.stop = False
        if args.compile:
            self.model.layer = torch.compile(layer, dynamic=True)
        if (args.out / "state.pt").exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.args.out / "state.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.spent, self.curve = (state[key] for key in ("step", "tokens", "spent", "curve"))

    def save(self) -> None:
        """Write the state, the curve and a model folder, each of them whole or not at all."""
        out = self.args.out
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        state |= {
            "step": self.step,
            "tokens": self.tokens,
            "spent": self.spent,
            "curve": self.curve,
            "shape": asdict(self.model.shape),
        }
        torch.save(state, out / "state.new")
        os.replace(out / "state.new", out / "state.pt")
        (out / "curve.new").write_text(json.dumps(self.curve))
        os.replace(out / "curve.new", out / "curve.json")
        export(self.model, self.args.data / "tokenizer.json", out / "latest")

    def progress(self) -> float:
        """The spent share of the budget, 0 to 1."""
        return min(1.0, max(self.spent / 60 / self.args.minutes, self.tokens / self.args.tokens))

    def train(self) -> None:
        """Run until the budget is spent or SIGTERM comes."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        plan = itertools.islice(self.corpus.plan(self.args.batch, self.args.seed), self.step, None)
        before = saved = time.monotonic()
        while self.progress() < 1 and not self.stop:
            point = self._step(self.corpus.batch(next(plan)))
            now = time.monotonic()
            self.spent += now - before
            point |= {"rate": self.tokens / self.spent, "minutes": self.spent / 60}
            before = now
            self.curve.append(point)
            if self.step % 10 == 0:
                print(" ".join(f"{key} {value:.4g}" for key, value in point.items()), flush=True)
            if now - saved > self.args.every:
                self.save()
                saved = now
        self.save()

    def _step(self, batch: Batch) -> dict[str, float]:
        scale = min(1.0, (self.step + 1) / WARMUP) * min(1.0, (1 - self.progress()) / (1 - FLAT))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * scale
        loss, losses = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.tokens
        return {"step": self.step, "tokens": self.tokens, "loss": float(loss.detach()), "scale": scale} | _by_kind(
            batch, losses
        )

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean weighted loss (with the early-exit part) and the loss of every target [rows, length]."""
        draw = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
        states = self.model.hidden_states(batch.ids[:, :-1], self.dtype, self._run(draw))
        losses = self._token_losses(states[-1], batch)
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        if self.args.early_exit:
            exit_at = int(torch.randint(len(states) - 1, (1,), generator=draw))
            early = (self._token_losses(states[exit_at], batch) * batch.weights).sum() / batch.weights.sum()
            loss = loss + self.args.early_exit * (exit_at + 1) / len(states) * early
        return loss, losses.detach()

    def _token_losses(self, x: Tensor, batch: Batch) -> Tensor:
        logits = self.model.logits(x).float()
        return F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none").view_as(
            batch.weights
        )

    def _run(self, draw: torch.Generator) -> list[bool] | None:
        """Which layers run in this step: the rate of dropping grows with depth, from 0 to `--layer-dropout`."""
        if not self.args.layer_dropout:
            return None
        depth = torch.arange(self.model.shape.layers) / (self.model.shape.layers - 1)
        rate = self.args.layer_dropout * (2**depth - 1)
        return (torch.rand(len(rate), generator=draw) >= rate).tolist()


def _start_from(source: Path, model: Model) -> None:
    if source.is_dir():
        restore(model, source)
    else:
        model.load_state_dict(torch.load(source, weights_only=False)["model"])


def _optimizers(model: Model, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    stacks = [(model.qkv, 3), (model.o, 1), (model.up, 2), (model.down, 1)]
    groups: list[dict[str, object]] = [{"params": [parameter], "blocks": blocks} for parameter, blocks in stacks]
    rest = torch.optim.AdamW(
        [model.embed, model.norms, model.final], lr=args.lr_rest, betas=(0.9, 0.95), weight_decay=0.0
    )
    out: list[torch.optim.Optimizer] = [Muon(groups, args.lr, decay=0.01), rest]
    for optimizer in out:
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
    return out


def _by_kind(batch: Batch, losses: Tensor) -> dict[str, float]:
    """Mean loss of the answer tokens of each kind of text in the batch."""
    out = {}
    for number, name in enumerate(KINDS):
        chosen = (batch.kinds == number)[:, None] & (batch.weights == 1)
        if chosen.any():
            out[name] = float(losses[chosen].mean())
    return out


def main() -> None:
    """Train, or continue."""
    args = options().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run.train()
    print(
        f"{'stopped' if run.stop else 'finished'} at step {run.step}, {run.tokens} tokens, {run.spent / 60:.1f} minutes"
    )


if __name__ == "__main__":
    main()
