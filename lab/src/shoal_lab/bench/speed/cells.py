"""The grid of a benchmark: which system runs which job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from shoal_lab.bench.model import MeasuredModel

Kind = Literal["generate", "prefill", "forward"]
OURS = "shoal"
FULL: Mapping[str, Any] = {"method": "full", "method_args": {}}


@dataclass(frozen=True)
class Job:
    """What one measurement does.

    Attributes:
        kind: decode after a prompt, run a prompt alone, or time single forwards after a prompt.
        context: tokens of the prompt.
        rows: prompts at once.
        new_tokens: tokens to decode (1 in a prefill).
        positions: tokens of a single forward.
    """

    kind: Kind
    context: int
    rows: int = 1
    new_tokens: int = 1
    positions: int = 1


@dataclass(frozen=True)
class SpeedJob:
    """A job of one system.

    Attributes:
        system: "shoal" or a baseline's name.
        quant: "int8", "int4", "file" or None.
        job: the job.
        method: Shoal's method as `Method.to_dict` gives it; None for a baseline.
        label: the method's name in tables.
    """

    system: str
    quant: str | None
    job: Job
    method: Mapping[str, Any] | None = field(default=None, hash=False)
    label: str = ""


@dataclass(frozen=True)
class Grid:
    """Everything to measure.

    Attributes:
        methods: Shoal's methods by label; the plain loop, "full", is always measured.
        baselines: names of other software.
        quants: number formats of the weights; None for unquantised.
        batches, contexts: rows and prompt tokens of the generations.
        new_tokens: tokens per generation.
        positions: sizes of single forwards, measured at the first context.
        prefills: prompt lengths that are run alone.
    """

    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    baselines: Sequence[str] = ()
    quants: Sequence[str | None] = (None,)
    batches: Sequence[int] = (1,)
    contexts: Sequence[int] = (64,)
    new_tokens: int = 64
    positions: Sequence[int] = ()
    prefills: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("batches", "contexts", "positions", "prefills"):
            wrong = [value for value in getattr(self, name) if value < 1]
            if wrong:
                raise ValueError(f"{name} holds {wrong[0]}; every one must be at least 1")
        if self.new_tokens < 2:
            raise ValueError(f"new_tokens is {self.new_tokens}; time per output token needs at least 2")
        if not self.batches or not self.contexts or not self.quants:
            raise ValueError("there is nothing to measure; give at least one batch, one context and one weight format")

    def cells(self) -> list[SpeedJob]:
        """One cell per measurement of a round; the systems of a job stand side by side."""
        return [cell for quant, job in product(self.quants, self._jobs()) for cell in self._side_by_side(quant, job)]

    def _jobs(self) -> Iterator[Job]:
        for context, rows in product(self.contexts, self.batches):
            yield Job("generate", context, rows, self.new_tokens)
        for context in self.prefills:
            yield Job("prefill", context)
        for positions in self.positions:
            yield Job("forward", self.contexts[0], positions=positions)

    def _side_by_side(self, quant: str | None, job: Job) -> Iterator[SpeedJob]:
        methods = {"full": FULL, **self.methods} if job.kind == "generate" else {"full": FULL}
        for label, method in methods.items():
            yield SpeedJob(OURS, quant, job, method, label)
        for baseline in self.baselines:
            yield SpeedJob(baseline, quant, job)

    def longest(self) -> int:
        """Most positions that a row needs."""
        sizes = (self.new_tokens, *self.positions)
        return max(max(self.contexts) + max(sizes), *(length + 1 for length in self.prefills), 0)

    def check(self, model: MeasuredModel) -> None:
        """Refuse a grid that does not fit the model's context."""
        limit = getattr(model.text, "max_position_embeddings", None)
        if limit is not None and self.longest() > limit:
            raise ValueError(
                f"the longest measurement needs {self.longest()} positions, and {model.name} has {limit}; "
                "ask for a shorter context"
            )
