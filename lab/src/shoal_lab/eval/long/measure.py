"""Measures methods on one context after another: judged answers, and predictions after the full model's tokens.

Outcomes are kept as soon as a method finishes a context, so that an interrupted evaluation resumes there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shoal.decode.sequence import SequenceState
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal_lab.eval import judges
from shoal_lab.eval.evaluate import asked, precision
from shoal_lab.eval.items import Sample
from shoal_lab.eval.long.contexts import LongContext, Wanted
from shoal_lab.eval.long.shared import Forks, SharedPrompts
from shoal_lab.eval.outcomes import Outcomes, RunKey
from shoal_lab.eval.summary import Found

FULL, STRANGE = "full", "full, another context"


@dataclass
class LongEvaluator:
    """Measures methods on one model.

    Attributes:
        engine: the model.
        outcomes: where outcomes are kept and looked up.
        seqs: most answers in progress at once.
        progress: whether bars are shown on stderr; None shows them on a terminal only.
    """

    engine: Engine
    outcomes: Outcomes = field(default_factory=Outcomes)
    seqs: int = 64
    progress: bool | None = None

    def run(self, wanted: Wanted, contexts: Sequence[LongContext], methods: Mapping[str, Method]) -> dict[str, Found]:
        """Outcomes by label and item of the full model, the full model on another context (no text), and methods."""
        runs = {label: self._run_of(wanted, method) for label, method in {FULL: Full(), **methods}.items()}
        found: dict[str, dict[str, Any]] = {label: {} for label in runs}
        hidden = None if self.progress is None else not self.progress
        for context in tqdm(contexts, desc=f"{wanted.suite}, {wanted.length} tokens", unit="context", disable=hidden):
            prompts = [sample.prompt for sample in (*context.samples, *context.strange)]
            shared = SharedPrompts(self.engine, prompts, self.seqs)
            for label, run in runs.items():
                method, base = methods.get(label) or Full(), found[FULL]
                measure = partial(self._outcomes, shared, context.samples, method, base, wanted)
                found[label] |= self._kept(run, context.samples, measure)
            if context.strange:
                measure = partial(self._strange, shared, context.strange, wanted)
                found.setdefault(STRANGE, {}).update(self._kept(runs[FULL], context.strange, measure))
        return dict(found)

    def _run_of(self, wanted: Wanted, method: Method) -> RunKey:
        settings = {**precision(self.engine), "longest": wanted.longest, "seed": wanted.seed}
        return RunKey(f"{wanted.suite} at {wanted.length}", "long", method.to_dict(), self.engine.fingerprint, settings)

    def _kept(
        self, run: RunKey, samples: Sequence[Sample], measure: Callable[[], list[dict[str, Any]]]
    ) -> dict[str, Any]:
        """The outcomes of a context, measured if one is missing."""
        known = self.outcomes.of(run)
        if any(known.get(one.item.id, {}).get("asked") != _hash(one) for one in samples):
            rows = zip(samples, measure(), strict=True)
            self.outcomes.add(run, [(sample.item.id, {**row, "asked": _hash(sample), "cluster": sample.item.cluster,
                                                      "group": sample.item.group}) for sample, row in rows])
        return {sample.item.id: self.outcomes.of(run)[sample.item.id] for sample in samples}

    def _outcomes(
        self, shared: SharedPrompts, samples: Sequence[Sample], method: Method, base: Mapping[str, Any], wanted: Wanted
    ) -> list[dict[str, Any]]:
        prompts = [sample.prompt for sample in samples]
        forks = shared.under(method, wanted.longest)
        try:
            if wanted.suite == "novels":
                return self._losses(forks, prompts, [sample.reference for sample in samples])
            rows = self._answers(forks, samples, wanted)
            said = [base.get(sample.item.id, row)["tokens"]
                    for sample, row in zip(samples, rows, strict=True)]
            parted = [place for place, row in enumerate(rows) if row["tokens"] != said[place]]
            again = self._losses(forks, [prompts[place] for place in parted], [said[place] for place in parted])
            argmax = dict(zip(parted, (one["argmax"] for one in again), strict=True))
            return [{**row, "argmax": argmax.get(place, said[place])} for place, row in enumerate(rows)]
        finally:
            forks.close()

    def _strange(self, shared: SharedPrompts, samples: Sequence[Sample], wanted: Wanted) -> list[dict[str, Any]]:
        forks = shared.under(Full(), wanted.longest)
        try:
            return self._answers(forks, samples, wanted)
        finally:
            forks.close()

    def _answers(self, forks: Forks, samples: Sequence[Sample], wanted: Wanted) -> list[dict[str, Any]]:
        """Decode greedy answers, and judge them."""
        options = {"max_new_tokens": wanted.longest}
        seqs = forks.run([sample.prompt for sample in samples], [options] * len(samples))
        return [
            {**judges.get(sample.item.judge)(self._text(seq), sample.item), "tokens": _said(seq),
             "cut": seq.finish_reason == "length", "kv_bytes": 0 if seq.bytes is None else seq.bytes.used}
            for sample, seq in zip(samples, seqs, strict=True)
        ]

    def _text(self, seq: SequenceState) -> str:
        said = _said(seq)
        return str(self.engine.tokenizer.decode(said[:-1] if said and said[-1] in self.engine.eos_token_ids else said))

    def _losses(
        self, forks: Forks, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """The prediction in place of each token that is fed, and that token's negative log-likelihood in nats."""
        forced = [Forced(reference) for reference in references]
        options = [{"max_new_tokens": len(one.tokens), "ignore_eos": True, "logits_processor": [one]} for one in forced]
        seqs = forks.run(prompts, options)
        return [{"argmax": one.argmax, "nll": [round(value, 5) for value in one.nll],
                 "kv_bytes": 0 if seq.bytes is None else seq.bytes.used} for one, seq in zip(forced, seqs, strict=True)]


class Forced:
    """A logits processor that forces a sequence to emit given tokens, and notes its own predictions."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.argmax: list[int] = []
        self.nll: list[float] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Keep only the next token's score of scores [1, V]."""
        token = self.tokens[len(self.argmax)]
        self.argmax.append(int(scores[0].argmax()))
        self.nll.append(-float(scores[0].float().log_softmax(-1)[token]))
        only = torch.full_like(scores, -torch.inf)
        only[0, token] = 0.0
        return only


def _said(seq: SequenceState) -> list[int]:
    return seq.tokens[seq.prompt_length :]


def _hash(sample: Sample) -> str:
    return hashlib.sha256(repr((asked(sample), sample.reference)).encode()).hexdigest()[:12]
