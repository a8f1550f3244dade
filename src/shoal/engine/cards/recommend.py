"""Recommends a method for a model by what was measured, and says what was not measured.

Evidence lies in a model's card. Methods whose output is the full model's are judged by the time they save. The others
are also judged by what they lose: by the upper end of the 95 % interval of the drop, not by the drop that was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NO_SLOWER = 0.97
"""Lowest lower end of a speed-up's interval at which a method is recommended."""


@dataclass(frozen=True)
class Lossless:
    """The speed-up of a method that gives the full model's own output.

    Attributes:
        task: kind of text.
        label: the method, as on the command line.
        speedup: times faster than plain decoding, in time.
        low: lower end of its 95 % interval over the texts.
        texts: how many were decoded.
    """

    task: str
    label: str
    speedup: float
    low: float
    texts: int


@dataclass(frozen=True)
class Lossy:
    """The cost of a method that answers with fewer layers.

    Attributes:
        task: kind of problem.
        suite: what was asked.
        label: the method, as on the command line.
        ideal: speed-up by layers and head alone.
        time: speed-up that the model's measured step times promise.
        full: share of items that the full model gets right.
        drop: by how much fewer the method gets right.
        most: upper end of the drop's 95 % interval.
        n: items.
    """

    task: str
    suite: str
    label: str
    ideal: float
    time: float
    full: float
    drop: float
    most: float
    n: int


@dataclass(frozen=True)
class Evidence:
    """All that was measured of a model.

    Attributes:
        lossless: by kind of text and method.
        lossy: by suite and method.
        machine: where times were taken.
    """

    lossless: tuple[Lossless, ...] = ()
    lossy: tuple[Lossy, ...] = ()
    machine: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """From the `evidence` of a card.

        Raises:
            ValueError: it has another form.
        """
        try:
            return cls(tuple(Lossless(**row) for row in data.get("lossless", ())),
                       tuple(Lossy(**row) for row in data.get("lossy", ())), str(data.get("machine", "")))
        except (TypeError, AttributeError) as error:
            why = f"the card's evidence cannot be read ({error}); remove the card, or write it anew"
            raise ValueError(why) from error

    @property
    def tasks(self) -> tuple[str, ...]:
        """Kinds of text and problem of which something is known."""
        return tuple(sorted({row.task for row in self.lossless} | {row.task for row in self.lossy}))


@dataclass(frozen=True)
class Advice:
    """What to use for one kind of task.

    Attributes:
        task: the kind.
        method: the method, as on the command line; "full" where nothing measured is faster.
        why: a sentence.
        exact: whether the output is the full model's.
        speedup: in time; 1 for the full model.
    """

    task: str
    method: str
    why: str
    exact: bool
    speedup: float


def advise(evidence: Evidence, task: str, max_drop: float) -> Advice:
    """The fastest method that is shown to lose no more than `max_drop` on a task.

    Args:
        evidence: of the model.
        task: one of `evidence.tasks`.
        max_drop: share of the items that may be lost, 0.01 is one point; 0 for none.
    """
    fast = [row for row in evidence.lossless if row.task == task and row.low >= NO_SLOWER]
    safe = max(fast, key=lambda row: row.low, default=None)
    best = Advice(task, "full", _why_plain(evidence, task), True, 1.0)
    if safe is not None and safe.speedup > 1:
        best = Advice(task, safe.label, f"{safe.speedup:.2f}x faster (at least {safe.low:.2f}x, {safe.texts} texts), "
                      "with the full model's own output", True, safe.speedup)
    shown = [row for row in evidence.lossy if row.task == task and row.most <= max_drop]
    for row in shown if max_drop > 0 else ():
        if row.time > best.speedup:
            why = (f"{row.time:.2f}x faster by measured step times; loses {_points(row.drop)} of {row.suite}, "
                   f"at most {_points(row.most)} (95 %, n = {row.n})")
            best = Advice(task, row.label, why, False, row.time)
    return best


def unknown(evidence: Evidence, tasks: Sequence[str], max_drop: float) -> list[str]:
    """What the evidence does not say about some tasks, in sentences."""
    missing = ["other processors, batches and prompts than those measured: check with `shoal bench-drafts --model M`"]
    drafted, judged = ({row.task for row in rows} for rows in (evidence.lossless, evidence.lossy))
    if undrafted := [task for task in tasks if task not in drafted]:
        missing.append(f"what drafts bring on {', '.join(undrafted)}: measure with `shoal bench-drafts --model M`")
    if unjudged := [task for task in tasks if task not in judged]:
        missing.append(f"what fewer layers lose on {', '.join(unjudged)}: measure with `shoal eval --suite S --data "
                       "DIR --model M --controls 1.05,1.1`")
    for task in tasks if max_drop > 0 else ():
        lossy = [row for row in evidence.lossy if row.task == task]
        if lossy and not any(row.most <= max_drop for row in lossy):
            nearest = min(lossy, key=lambda row: row.most)
            missing.append(f"a depth schedule that loses at most {_points(max_drop)} on {task}: the gentlest measured, "
                           f"{nearest.label} at {nearest.ideal:.2f}x, may lose {_points(nearest.most)} "
                           f"(n = {nearest.n})")
    return missing


def report(evidence: Evidence, tasks: Sequence[str], max_drop: float) -> dict[str, Any]:
    """The advice for some tasks as JSON."""
    return {
        "max_drop": max_drop,
        "machine": evidence.machine,
        "advice": [asdict(advise(evidence, task, max_drop)) for task in tasks],
        "not_known": unknown(evidence, tasks, max_drop),
    }


def _why_plain(evidence: Evidence, task: str) -> str:
    tried = [row for row in evidence.lossless if row.task == task]
    if not tried:
        return "nothing faster was measured on this kind of text"
    nearest = max(tried, key=lambda row: row.low)
    return f"no draft gains here; the best, {nearest.label}, is {nearest.speedup:.2f}x (at least {nearest.low:.2f}x)"


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
