"""A limit on the memory of the whole process: whether a request fits under it, and what is given up for that.

In the spirit of SpecMemo (arXiv 2506.01986), which budgets weights, KV, masks and buffers and first makes the tree of
guesses smaller. Here guesses become fewer first, then prompts decoded at a time. Both change no token under an exact
rule. Lossy forms of the KV are used only where they are allowed by name. More memory never gives less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.decode.running_sequence import RunningSequence
from shoal.engine.loaded import LoadedModel
from shoal.engine.memory.amounts import parse, shown
from shoal.engine.memory.footprint import Footprint, choosing_bytes, footprint, logits_bytes, standing, work_bytes
from shoal.engine.memory.shorter import amount, guesses, shorter
from shoal.engine.request import Request
from shoal.errors import OutOfMemory
from shoal.methods import make
from shoal.methods.base import Method

SPARE = 0.05
"""Share of the limit that no plan uses, since totals are known only so well."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a request is decoded.

    Attributes:
        seqs: prompts at a time.
        sizes: memory of the largest group of that many prompts.
        changed: what was given up for the memory, in words; empty for nothing.
    """

    method: Method
    seqs: int
    sizes: Footprint
    changed: str = ""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit in bytes.

    Attributes:
        memory: bytes, or an amount such as "2GiB".
        lossy: methods that may be added where nothing exact fits, in this order, such as ("kv_int8",).

    Raises:
        ValueError: it is no amount, or there is no such method.
    """

    memory: int | str
    lossy: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", parse(self.memory))
        object.__setattr__(self, "lossy", tuple(map(make, self.lossy)))

    @property
    def usable(self) -> int:
        """Bytes that plans may use."""
        return int(int(self.memory) * (1 - SPARE))

    def plan(self, engine: LoadedModel, ids: Sequence[list[int]], request: Request) -> MemoryPlan:
        """The first way to decode prompts that fits; the request's own is tried first.

        Raises:
            OutOfMemory: none fits; says what the request needs, part by part, and what would help.
        """
        least: Footprint | None = None
        engine.recipe(request.method, request.max_new_tokens)  # what it loads beside the model is then in the process
        process = standing()
        for method, seqs, changed in self._ways(make(request.method), len(ids)):
            if changed and not _takes(engine, method, request.max_new_tokens):
                continue
            sizes = self._largest(engine, ids, replace(request, method=method), seqs, process)
            if sizes.total <= self.usable:
                return MemoryPlan(method, seqs, sizes, changed)
            least = sizes if least is None or sizes.total < least.total else least
        assert least is not None
        raise self._refusal(engine, ids, request, least)

    def _ways(self, method: Method, prompts: int) -> Iterator[tuple[Method, int, str]]:
        """Method, prompts at a time and what was given up, from nothing to most."""
        for lossy in (None, *self.lossy):
            try:
                whole = method if lossy is None else make([method, lossy])
            except ValueError:  # the method fills that component already
                continue
            seqs = prompts
            while seqs:
                for number, less in enumerate(shorter(whole)):
                    said = [f"prompts at a time: {seqs}"] * (seqs < prompts)
                    said += [f"guesses: method {less.name} {amount(less)}"] * (number > 0)
                    said += [f"KV as {lossy.name}, which is lossy"] if lossy is not None else []
                    yield less, seqs, ", ".join(said)
                seqs //= 2

    def _largest(
        self, engine: LoadedModel, ids: Sequence[list[int]], request: Request, seqs: int, process: int
    ) -> Footprint:
        method, plain = make(request.method), replace(request, constraint=None)
        recipe = engine.recipe(method, request.max_new_tokens)
        groups = (engine.seqs(ids[first : first + seqs], plain, recipe) for first in range(0, len(ids), seqs))
        found = (footprint(engine, group, method, request.max_new_tokens, process) for group in groups)
        return max(found, key=lambda sizes: sizes.total)

    def _refusal(
        self, engine: LoadedModel, ids: Sequence[list[int]], request: Request, least: Footprint
    ) -> OutOfMemory:
        longest = max(map(len, ids))
        what = (f"memory of {shown(int(self.memory))} for {len(ids)} prompt{'s' * (len(ids) > 1)} of up to {longest} "
                f"tokens with max_new_tokens={request.max_new_tokens}")
        why = (f"the least that they need is {shown(least.total)} ({least.described()}), and {SPARE:.0%} of the limit "
               "are kept back")
        return OutOfMemory(what, why, self._remedy(engine, ids, request, least))

    def _remedy(self, engine: LoadedModel, ids: Sequence[list[int]], request: Request, least: Footprint) -> str:
        process = least.process + least.weights
        if process >= self.usable:
            return f"Use a smaller model, quant='int4', or memory of {shown(least.total / (1 - SPARE))} at least"
        longest, most = [max(ids, key=len)], request.max_new_tokens

        def total(method: Method, tokens: int) -> int:
            asked = replace(request, method=method, max_new_tokens=tokens)
            return self._largest(engine, longest, asked, 1, process).total

        ways = {method for method, _, changed in self._ways(make(request.method), 1)
                if not changed or _takes(engine, method, most)}
        smallest = min(ways, key=lambda method: total(method, most))
        short = bisect_left(range(1, most + 1), True, key=lambda tokens: total(smallest, tokens) > self.usable)
        first = f"Use max_new_tokens of {short} or less" if short else "Use a shorter prompt"
        others = "" if any(one.name == "kv_int8" for one in self.lossy) else ", allow the lossy kv_int8"
        return f"{first}{others}, or give memory of {shown(least.total / (1 - SPARE))}"

    def for_seqs(self, engine: LoadedModel, prefill_chunk: int) -> int:
        """Bytes left for a scheduler's sequences and what it keeps of earlier prompts; OutOfMemory where none are."""
        used = standing()
        left = self.usable - used - work_bytes(engine, prefill_chunk, engine.runner.max_positions or prefill_chunk)
        if left <= 0:
            raise OutOfMemory(
                f"memory of {shown(int(self.memory))}", f"the process takes {shown(used)} before it serves anything",
                f"Use a smaller model, or memory of {shown((int(self.memory) - left) / (1 - SPARE))} at least",
            )
        return left

    def check_weights(self, what: str, size: int) -> None:
        """Refuse a model, or part of one, whose `size` bytes would not fit beside the process, before they are read."""
        used = standing()
        if used + size > self.usable:
            raise OutOfMemory(
                f"memory of {shown(int(self.memory))} for {what}",
                f"its weights take {shown(size)}, the process {shown(used)}, and {SPARE:.0%} are kept back",
                f"Use quant='int4' or 'int8', a smaller model, or memory of {shown((used + size) / (1 - SPARE))} "
                "at least",
            )


def _takes(engine: LoadedModel, method: Method, tokens: int) -> bool:
    """Whether a method decodes on the model with these options, some of which may be made smaller."""
    try:
        engine.recipe(method, tokens)
    except ValueError:
        return False
    return True


def extra_kv(engine: LoadedModel, seq: RunningSequence, method: Method) -> int:
    """Bytes that a scheduler's sequence takes beside its KV: logits, probabilities if it samples, choices of slots."""
    most, _ = guesses(method, seq.recipe)
    nodes = 1 + most
    choosing = choosing_bytes(engine, seq.recipe.select, [seq.prompt_length + seq.stop.room], [nodes])
    return logits_bytes(engine.runner, [nodes]) * (1 if seq.sampling.greedy else 3) + choosing
