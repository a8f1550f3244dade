"""Distance to the full model: how far next-token distributions move when tokens of an answer run fewer layers.

Texts are given, or the full model's own answers, made once. Every candidate reads the same tokens after the same
prompts, which run every layer. Each text keeps sums over bins of positions, so that any set of texts can be combined
later. The first token of an answer comes from the prompt and is not judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shoal.decode.worker import Experts
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.companions import same_tokens
from shoal.errors import Unsupported
from shoal.model.runner import ModelRunner
from shoal_lab.eval.decoders import Candidate
from shoal_lab.eval.evaluate import BIN, precision
from shoal_lab.eval.outcomes import Outcomes, RunKey
from shoal_lab.eval.reread import BLOCK, Reread, Take
from shoal_lab.eval.rising import Executor, executor

LONGEST = 192
"""Default number of tokens of an answer."""
_TRUTH_BYTES = 400_000_000
_TOGETHER = 16


@dataclass(frozen=True)
class Told:
    """A text that is read again.

    Attributes:
        suite: the suite of its prompt.
        id: its name there.
        prompt, answer: token ids; at least one and two.
        greedy: whether the answer is the full model's greedy one.
    """

    suite: str
    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    greedy: bool = False


@dataclass
class Readings:
    """Readings of one text under one plan, token by token from the answer's second one.

    Attributes:
        kl: KL(full || plan) in nats.
        nll: negative log-likelihoods of the tokens, in nats.
        kept: whether the argmax is the full model's.
        own: whether the argmax is the text's token.
    """

    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)

    def outcome(self, layers: float, greedy: bool) -> dict[str, Any]:
        """Sums by position, as they are kept; the first bin lacks the token that is not judged.

        Args:
            layers: layers that the answer ran, its first token included.
            greedy: whether the text is the full model's greedy answer. Until the argmax differs, the text is then also
                what the plan would have answered: their common prefix.
        """
        prefix = {"prefix": 1 + len(list(takewhile(bool, self.own)))} if greedy else {}
        return {
            "kl": binned(self.kl),
            "nll": binned(self.nll),
            "kept": [round(value) for value in binned(self.kept)],
            "count": len(self.kl),
            "layers": layers,
            **prefix,
        }


def binned(values: Sequence[float]) -> list[float]:
    """Sums over tokens 1, 2, ... of an answer; token i goes to bin i // BIN."""
    starts = range(-1, len(values), BIN)
    return [round(float(sum(values[max(start, 0) : start + BIN])), 5) for start in starts]


def bin_sizes(count: int) -> list[int]:
    """Number of judged tokens in each bin, of `count`."""
    return [int(n) for n in binned([1] * count)]


class FullReading:
    """Texts read at full depth, ready to be read again under other plans.

    Args:
        engine: the model.
        texts: see `Told`.
    """

    def __init__(self, engine: Engine, texts: Sequence[Told]) -> None:
        self._texts = texts
        self._reread = Reread(engine.runner, [(text.prompt, text.answer) for text in texts])
        self._truth = [_Truth.room(len(text.answer) - 1, engine.runner) for text in texts]
        self.full = [Readings() for _ in texts]
        self._rows = 1 if engine.runner.device.type == "cpu" else BLOCK
        self._reread.under(executor(engine.runner, engine.recipe("full", 1).plan), self._by_rows(self._learn))

    def under(self, how: Executor, experts: Experts | None = None) -> list[Readings]:
        """Readings of every text under a plan, with the neurons that a recipe's component chooses."""
        return self._found(lambda take: self._reread.under(how, take, experts))

    def another(self, runner: ModelRunner) -> list[Readings]:
        """Readings of every text by another model with all its layers, prompts included."""
        reread = Reread(runner, [(text.prompt, text.answer) for text in self._texts])
        how = executor(runner, DepthPlan.full(runner.num_layers))
        return self._found(lambda take: reread.under(how, take))

    def apart(self, how: Executor) -> list[Readings]:
        """Readings of every text if step 1 of a plan computes what later tokens see, and step 2 what is judged."""
        return self._found(lambda take: self._reread.apart(how, take))

    def _found(self, read: Callable[[Take], None]) -> list[Readings]:
        found = [Readings() for _ in self._texts]

        def compare(seq: int, first: int, logits: Tensor) -> None:
            truth, here = self._truth[seq], slice(first - 1, first - 1 + len(logits))
            said, best = _log_probs(logits)
            found[seq].kl += (truth.certainty[here] - _dot(truth.probs[here], said)).tolist()
            found[seq].kept += (best == truth.best[here]).tolist()
            self._add_own(found[seq], seq, first, said, best)

        read(self._by_rows(compare))
        return found

    def _by_rows(self, take: Take) -> Take:
        """Call `take` for a few tokens at a time, on one thread.

        150,000 logits of one token fit a processor's cache, and small operations on several threads stall whenever
        another process runs.
        """
        def taken(seq: int, first: int, logits: Tensor) -> None:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                for at in range(0, len(logits), self._rows):
                    take(seq, first + at, logits[at : at + self._rows])
            finally:
                torch.set_num_threads(threads)

        return taken

    def _learn(self, seq: int, first: int, logits: Tensor) -> None:
        truth, here = self._truth[seq], slice(first - 1, first - 1 + len(logits))
        said, best = _log_probs(logits)
        torch.exp(said, out=truth.probs[here])
        truth.certainty[here], truth.best[here] = _dot(truth.probs[here], said), best
        self.full[seq].kl += [0.0] * len(logits)
        self.full[seq].kept += [True] * len(logits)
        self._add_own(self.full[seq], seq, first, said, best)

    def _add_own(self, reading: Readings, seq: int, first: int, said: Tensor, best: Tensor) -> None:
        tokens = torch.tensor(self._texts[seq].answer[first : first + len(said)], device=said.device)
        reading.nll += (-said.gather(1, tokens[:, None])[:, 0]).tolist()
        reading.own += (best == tokens).tolist()


@dataclass(frozen=True)
class _Truth:
    """The full model's distributions [n, V], float32, their negative entropies [n], and argmaxes [n]."""

    probs: Tensor
    certainty: Tensor
    best: Tensor

    @classmethod
    def room(cls, count: int, runner: ModelRunner) -> _Truth:
        """Allocate room for that many tokens."""
        device = runner.device
        return cls(torch.empty(count, runner.vocab_size, device=device), torch.empty(count, device=device),
                   torch.empty(count, dtype=torch.long, device=device))


def _log_probs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, V] float32 and argmaxes [n]."""
    return logits.float().log_softmax(-1), logits.argmax(-1)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Dot product by row [n]; several times as fast as `vecdot` here."""
    return torch.bmm(one[:, None], other[:, :, None])[:, 0, 0]


@dataclass(frozen=True)
class Variant:
    """A model variant whose distance to the full model is measured.

    Attributes:
        spec: its JSON; outcomes are kept under it.
        read: reads texts.
        layers: layers summed over that many tokens of an answer.
    """

    spec: Mapping[str, Any]
    read: Callable[[FullReading], list[Readings]]
    layers: Callable[[int], float]


def variant(runner: ModelRunner, who: Candidate) -> Variant:
    """The variant of a candidate.

    Raises:
        Unsupported: plan and experts do not determine how probable a token is, or it needs a packed model.
    """
    who.check_scored("experts")
    how, experts = executor(runner, who.plan), None if who.recipe is None else who.recipe.experts
    whole = who.spec["method"] == "full"
    return Variant(who.spec, lambda judge: judge.full if whole else judge.under(how, experts), who.plan.layer_tokens)


def other_model(engine: Engine, base: Engine) -> Variant:
    """The variant that is another model with the same tokens.

    Args:
        engine: the other model, such as a smaller one made of `base`.
        base: the model that it is compared with.

    Raises:
        Unsupported: the models have different tokens.
    """
    if not same_tokens(base, engine) or engine.runner.vocab_size != base.runner.vocab_size:
        raise Unsupported(f"the distance of {engine.model_name!r} from {base.model_name!r}",
                          "they have different tokens", "Name models with the tokenizer of --model")
    spec = {"method": "full", "method_args": {}, "of": engine.fingerprint, **precision(engine)}
    runner = engine.runner
    return Variant(spec, lambda judge: judge.another(runner), lambda count: float(count * runner.num_layers))


@dataclass
class Distances:
    """Measures variants on texts, and keeps each outcome at once.

    Attributes:
        engine: the model.
        outcomes: where outcomes are kept and looked up.
        max_new_tokens: the longest answer.
        progress: whether bars are shown on stderr; None shows them on a terminal only.
        until: `time.monotonic()` after which no more texts are begun; None for never.
    """

    engine: Engine
    outcomes: Outcomes = field(default_factory=Outcomes)
    max_new_tokens: int = LONGEST
    progress: bool | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        self._settings = {**precision(self.engine), "max_new_tokens": self.max_new_tokens}

    @property
    def late(self) -> bool:
        """Whether no more work is begun."""
        return self.until is not None and time.monotonic() > self.until

    def run_of(self, suite: str, kind: str, spec: Mapping[str, Any]) -> RunKey:
        """The run under which outcomes are kept."""
        return RunKey(suite, kind, spec, self.engine.fingerprint, self._settings)

    def answered(self, suite: str, prompts: Mapping[str, Sequence[int]], sampled: bool) -> list[Told]:
        """The full model's answers to prompts by item id; answers shorter than two tokens are left out.

        Args:
            suite: the prompts' suite.
            prompts: token ids.
            sampled: draw at temperature 1, because base models go round in circles greedily.

        Raises:
            TimeoutError: after `until`; finished answers are kept.
        """
        run = self.run_of(suite, "sampled" if sampled else "greedy", {"method": "full"})
        missing = [item for item in prompts if item not in self.outcomes.of(run)]
        for first in tqdm(range(0, len(missing), _TOGETHER), desc=f"{suite}: answers", disable=self._hidden):
            if self.late:
                raise TimeoutError("no time is left for answers; the same command goes on from here")
            part = missing[first : first + _TOGETHER]
            found = self._answers([prompts[item] for item in part], sampled, part)
            self.outcomes.add(run, [(item, {"tokens": tokens}) for item, tokens in zip(part, found, strict=True)])
        done = self.outcomes.of(run)
        told = [Told(suite, item, tuple(prompt), tuple(done[item]["tokens"]), not sampled)
                for item, prompt in prompts.items()]
        return [text for text in told if len(text.answer) > 1]

    def _answers(self, prompts: Sequence[Sequence[int]], sampled: bool, items: Sequence[str]) -> list[list[int]]:
        seed = sum(map(ord, "".join(items)))
        with self.engine.stream([list(prompt) for prompt in prompts], method="full", seed=seed,
                                max_new_tokens=self.max_new_tokens, temperature=1.0 if sampled else 0.0) as stream:
            for _ in stream:
                pass
            return [list(result.tokens) for result in stream.results]

    def measure(self, texts: Sequence[Told], variants: Sequence[Variant]) -> list[dict[str, dict[str, Any]]]:
        """Read every text with every variant; outcomes by suite/item, variant by variant.

        After `until`, texts that are not read yet are left out for all variants alike. Measure many variants at once:
        they share the reading at full depth.
        """
        for batch in self._batches(texts):
            open_ones = [who for who in variants if self._missing(batch, who)]
            if not open_ones:
                continue
            if self.late:
                break
            judge = FullReading(self.engine, batch)
            for who in open_ones:
                self._keep(batch, who, who.read(judge))
        done = [text for text in texts if not any(self._missing([text], who) for who in variants)]
        return [{f"{text.suite}/{text.id}": self.outcomes.of(self._run(text.suite, who))[text.id] for text in done}
                for who in variants]

    def _run(self, suite: str, who: Variant) -> RunKey:
        return self.run_of(suite, "distance", who.spec)

    def _missing(self, texts: Sequence[Told], who: Variant) -> list[Told]:
        return [text for text in texts if text.id not in self.outcomes.of(self._run(text.suite, who))]

    def _keep(self, texts: Sequence[Told], who: Variant, readings: Sequence[Readings]) -> None:
        for suite in dict.fromkeys(text.suite for text in texts):
            run = self._run(suite, who)
            seqs = zip(texts, readings, strict=True)
            known = self.outcomes.of(run)
            self.outcomes.add(run, [(text.id, reading.outcome(who.layers(len(text.answer)), text.greedy))
                                    for text, reading in seqs if text.suite == suite and text.id not in known])

    def _batches(self, texts: Sequence[Told]) -> Iterator[Sequence[Told]]:
        """Texts read together, as many as the full model's distributions fit memory; independent of what is known."""
        most = max(1, _TRUTH_BYTES // (4 * self.engine.runner.vocab_size))
        batch: list[Told] = []
        with tqdm(total=len(texts), desc="distance", unit="text", disable=self._hidden) as bar:
            for text in [*texts, None]:
                if text is None or (batch and sum(len(one.answer) for one in [*batch, text]) > most):
                    yield batch
                    bar.update(len(batch))
                    batch = []
                if text is not None:
                    batch.append(text)

    @property
    def _hidden(self) -> bool | None:
        return None if self.progress is None else not self.progress
