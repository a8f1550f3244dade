"""Measures candidates on a suite, item by item, and keeps each outcome at once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from shoal.engine.engine import Engine
from shoal.model.packed.runner import PackedRunner
from shoal_lab.eval.decoders import Answered, Candidate, Decoder
from shoal_lab.eval.items import Item, Sample, encode
from shoal_lab.eval.judging import Judging
from shoal_lab.eval.outcomes import Outcomes, RunKey

BIN = 16
"""Tokens whose losses are summed in one number of an outcome."""
_SIBLINGS = 8
"""Prompts with a common prefix that are kept apart, such as the questions on one paragraph."""


@dataclass
class Evaluator:
    """Measures candidates on one model.

    Attributes:
        engine: the model.
        outcomes: where outcomes are kept and looked up.
        max_new_tokens: the longest answer.
        batch: items measured together; finished batches survive an interruption.
        progress: whether bars are shown on stderr; None shows them on a terminal only.
        unsafe: whether a model's code is run even if no sandbox works.
        temperature: of the answers; 0 for greedy ones.
    """

    engine: Engine
    outcomes: Outcomes = field(default_factory=Outcomes)
    max_new_tokens: int = 256
    batch: int = 64
    progress: bool | None = None
    unsafe: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.engine.tokenizer is None:
            raise ValueError("an evaluation needs a tokenizer; load the model with one")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more, and finite")
        self.decoder = Decoder(self.engine, self.batch, self.temperature)

    def samples(self, items: Sequence[Item]) -> list[Sample]:
        """Items in the model's tokens, those that fit its context, short prompts first."""
        eos = min(self.engine.eos_token_ids, default=None)
        found = encode(items, self.engine.tokenizer, eos, self.engine.runner.max_positions)
        if not found:
            raise ValueError("no item fits the model's context; give shorter ones")
        return sorted(found, key=lambda sample: (len(sample.prompt) + len(sample.reference), sample.item.id))

    def run_of(self, suite: str, kind: str, who: Candidate) -> RunKey:
        """The run under which outcomes are kept."""
        settings = precision(self.engine)
        if kind == "answers":
            settings["max_new_tokens"] = self.max_new_tokens
            settings |= {"temperature": self.temperature} if self.temperature else {}
        return RunKey(suite, kind, who.spec, self.engine.fingerprint, settings)

    def answers(self, suite: str, samples: Sequence[Sample], who: Candidate) -> dict[str, dict[str, Any]]:
        """Generate and judge the answer to every sample; outcomes by item id, each kept at once."""
        run = self.run_of(suite, "answers", who)
        known = self.outcomes.of(run)
        missing = apart([one for one in samples if known.get(one.item.id, {}).get("asked") != asked(one)], self.batch)
        with self._bar(f"{suite}: {who.label}", len(samples)) as bar, Judging[Sample](self.unsafe) as judging:
            bar.update(len(samples) - len(missing))
            found: dict[str, Answered] = {}
            for sample, answered in self._answered(missing, who):
                found[sample.item.id] = answered
                judging.put(sample, self._text(sample, answered), sample.item)
                self._keep(run, judging.ready(), found)
                bar.update()
            self._keep(run, judging.rest(), found)
        return self._chosen(run, samples)

    def _answered(self, samples: Sequence[Sample], who: Candidate) -> Iterator[tuple[Sample, Answered]]:
        for stop in dict.fromkeys(sample.item.stop for sample in samples):
            part = [sample for sample in samples if sample.item.stop == stop]
            prompts = [sample.prompt for sample in part]
            for number, answered in self.decoder.each_answer(prompts, who, self.max_new_tokens, stop):
                yield part[number], answered

    def _keep(
        self, run: RunKey, verdicts: Iterable[tuple[Sample, dict[str, Any]]], found: Mapping[str, Answered]
    ) -> None:
        for sample, verdict in verdicts:
            self.outcomes.add(run, [(sample.item.id, self._judged(sample, found[sample.item.id], verdict))])

    def _text(self, sample: Sample, found: Answered) -> str:
        """The answer up to a stop text. A few tokens before it decide whether it begins with a space."""
        ended = bool(found.tokens) and found.tokens[-1] in self.engine.eos_token_ids
        tokens = found.tokens[:-1] if ended else found.tokens
        text = str(self.engine.tokenizer.decode(tokens))
        if sample.item.stop:
            before = list(sample.prompt[-4:])
            known, both = (str(self.engine.tokenizer.decode(part)) for part in (before, [*before, *tokens]))
            text = both[len(known) :] if both.startswith(known) else text
        return text[: min((place for stop in sample.item.stop if (place := text.find(stop)) >= 0), default=None)]

    def _judged(self, sample: Sample, found: Answered, verdict: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **verdict,
            **({"cluster": sample.item.cluster} if sample.item.cluster else {}),
            "asked": asked(sample),
            "cut": found.finish_reason == "length",
            "layers": found.layer_tokens,
            **found.work,
            "tokens": found.tokens,
        }

    def losses(
        self, suite: str, samples: Sequence[Sample], candidates: Sequence[Candidate]
    ) -> list[dict[str, dict[str, Any]]]:
        """Score every sample's reference under every candidate's plan; outcomes by item id, candidate by candidate.

        Candidates share the forward of the prompts, so measure many at once.

        Raises:
            Unsupported: a candidate's plan alone does not determine how probable a reference is.
        """
        for who in candidates:
            who.check_scored()
        runs = [self.run_of(suite, "loss", who) for who in candidates]
        for batch in self._batches(samples, runs, f"{suite}: loss"):
            open_runs = [
                (run, who) for run, who in zip(runs, candidates, strict=True)
                if any(sample.item.id not in self.outcomes.of(run) for sample in batch)
            ]
            scored = self.decoder.losses(
                [sample.prompt for sample in batch], [sample.reference for sample in batch],
                [who.plan for _, who in open_runs],
            )
            for (run, who), values in zip(open_runs, scored, strict=True):
                rows = zip(batch, values, strict=True)
                self.outcomes.add(run, [(sample.item.id, _loss(who, row.tolist())) for sample, row in rows])
        return [self._chosen(run, samples) for run in runs]

    def _batches(self, samples: Sequence[Sample], runs: Sequence[RunKey], label: str) -> Iterator[Sequence[Sample]]:
        """Batches that some run still lacks. Their bounds do not depend on what is done already."""
        starts = range(0, len(samples), self.batch)
        batches = [samples[start : start + self.batch] for start in starts]
        with self._bar(label, len(samples)) as bar:
            for batch in batches:
                if any(sample.item.id not in self.outcomes.of(run) for run in runs for sample in batch):
                    yield batch
                bar.update(len(batch))

    def _bar(self, label: str, total: int) -> Any:
        hidden = None if self.progress is None else not self.progress
        return tqdm(total=total, desc=label, unit="item", disable=hidden)

    def _chosen(self, run: RunKey, samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
        found = self.outcomes.of(run)
        return {sample.item.id: found[sample.item.id] for sample in samples}


def precision(engine: Engine) -> dict[str, Any]:
    """The model's precision, as far as outcomes depend on it."""
    runner = engine.runner
    found: dict[str, Any] = {"dtype": str(runner.dtype).removeprefix("torch.")}
    if isinstance(runner, PackedRunner):
        found["weight_bytes"] = runner.weights.nbytes
    return found


def _loss(who: Candidate, values: Sequence[float]) -> dict[str, Any]:
    bins = [round(sum(values[start : start + BIN]), 4) for start in range(0, len(values), BIN)]
    return {"nll": bins, "count": len(values), "layers": who.plan.layer_tokens(len(values))}


def asked(sample: Sample) -> str:
    """A hash of what an answer depends on besides the run; an item that changes is measured again."""
    item = sample.item
    parts = (sample.prompt, item.stop, item.judge, item.answer, item.golds, item.given, item.tests)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def apart(samples: Sequence[Sample], rows: int) -> list[Sample]:
    """Order samples so that prompts with a common prefix follow each other, but not within `rows` of each other.

    Later ones then find the KV of the prefix.
    """
    ordered = sorted(samples, key=lambda sample: sample.prompt)
    width = _SIBLINGS * 2 * rows
    windows = [ordered[start : start + width] for start in range(0, len(ordered), width)]
    return [sample for window in windows for first in range(_SIBLINGS) for sample in window[first::_SIBLINGS]]
