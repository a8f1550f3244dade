"""Thousands of random schedules over every method: each sequence's tokens are those it gives alone."""

from __future__ import annotations

import functools
import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import RECURRENT, VOCAB, tiny
from method_matrix import MATRIX
from mtp_layer import with_layer
from schedules import Action, Job, actions, follow
from shoal.engine.cards.card import Card
from shoal.engine.engine import Engine, Stream
from shoal.engine.loading.load import engine_for
from shoal.engine.request import Request
from shoal.engine.scheduling.batching import Policy
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.packed import native
from test_matrix import SCORES

SCHEDULES = int(os.environ.get("SHOAL_SCHEDULES", "3000"))
MODELS = {"llama": "hf", "hybrid": "hf", "qwen3": "packed",
          **{family: "packed" for family in ("gemma3", "qwen3_5", "lfm2") if native.available() and RECURRENT}}
"""Families and backends; the hybrid one mixes sliding and full attention. The last three run on the kernels."""
KERNELS = ("gemma3", "qwen3_5", "lfm2")
"""In fp32, where they give the same bits whatever a sequence runs beside; the others in fp64."""
POLICIES: dict[str, Policy] = {
    "join": Policy(),
    "waves": Policy("waves"),
    "waves, no patience": Policy("waves", 0.0),
}
PLAIN = (
    Full(), D3(mean=0.7, core=2, horizon=20), D3(alpha=0.8, core=2, order="low_first"), D3(alpha=0.7, core=2, horizon=4)
)
METHODS: tuple[Method, ...] = (*MATRIX, *PLAIN * 6, PromptLookup(min_ngram=1, control="goodput"))


STEMS = [[random.Random(stem).randrange(VOCAB) for _ in range(30)] for stem in range(3)] + [[4, 8, 15, 8] * 8]
"""Beginnings that prompts share, so that some take over what others have read; the last is for those that look back."""


def _job(number: int) -> Job:
    draw = random.Random(number)
    stem = draw.choice(STEMS)[: draw.choice((0, 1, 7, 8, 20, 30))]
    ids = stem + [draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 9)))]
    options = {"max_new_tokens": draw.choice((1, 2, 5, 9, 14)), "n": draw.choice((1, 1, 1, 3))}
    drawn = {"temperature": 1.0, "seed": number} if draw.random() < 0.15 else {}
    penalised = {"repetition_penalty": 1.3, "stop_token_ids": [5, 6, 7]} if draw.random() < 0.15 else {}
    return ids, {**options, "method": METHODS[number % len(METHODS)], **drawn, **penalised}


JOBS = [_job(number) for number in range(2 * len(METHODS))]


@functools.cache
def engine(family: str) -> Engine:
    model = tiny(family, dtype=torch.float32) if family in KERNELS else tiny(family)
    made = engine_for(model, card=Card(SCORES), backend=MODELS[family])
    return made if family == "lfm2" else with_layer(made, family)


@functools.cache
def job_of(family: str, job: int) -> Job:
    """A job, without its method where a family on the kernels refuses that, or has other sizes than it is made for."""
    ids, options = JOBS[job]
    try:
        Scheduler(engine(family), start=False).submit(ids, **options)
    except (Unsupported, ValueError):
        assert family in KERNELS or options["method"].name == "dynamic_pictures"  # for layers that see the whole text
        return ids, {**options, "method": Full()}
    return JOBS[job]


@functools.cache
def alone(family: str, job: int) -> list[tuple[int, ...]]:
    """Each of a job's sequences decoded without the others, under its own number, which keys its draws."""
    ids, options = job_of(family, job)
    count = options["n"]
    request = Request.from_options({name: value for name, value in options.items() if name != "n"})
    found = []
    for number in range(count):
        row = engine(family).seqs([ids] * count, request)[number]
        row.seq_id = 0
        with Stream(engine(family), [row], engine(family).cache_for([row], request.max_new_tokens)) as stream:
            found.append(tuple(step.token for step in stream))
    return found


@functools.cache
def memory(family: str, job: int) -> int:
    """Bytes of KV that one sequence of a job is counted for."""
    ids, options = job_of(family, job)
    scheduler = Scheduler(engine(family), start=False)
    return scheduler._room.bytes(scheduler.submit(ids, **options).entries[0].needs)


@functools.cache
def width(family: str, job: int) -> int:
    """Sequences that one of a job takes: several where it is searched."""
    ids, options = job_of(family, job)
    return len(Scheduler(engine(family), start=False).submit(ids, **options).entries[0].needs)


@pytest.mark.slow
@settings(max_examples=SCHEDULES)
@given(
    family=st.sampled_from(sorted(MODELS)),
    todo=actions(len(JOBS), 24),
    rows=st.integers(1, 8),
    chunk=st.one_of(st.integers(1, 12), st.just(64)),
    how=st.sampled_from(sorted(POLICIES)),
    tight=st.booleans(),
    kept=st.sampled_from((0, 1 << 14, 1 << 24)),
)
def test_every_row_gives_what_it_gives_alone(
    family: str, todo: list[Action], rows: int, chunk: int, how: str, tight: bool, kept: int
) -> None:
    asked = [job for what, job in todo if what in ("submit", "desert")]
    most = max((memory(family, job) for job in asked), default=1)
    rows = max([rows, *(width(family, job) for job in asked)])
    scheduler = Scheduler(
        engine(family), max_seqs=rows, kv_bytes=2 * most if tight else 1 << 30, prefix_bytes=kept,
        prefill_chunk=chunk, policy=POLICIES[how], start=False,
    )
    follow(scheduler, [job_of(family, job) for job in range(len(JOBS))], todo, functools.partial(alone, family))


@pytest.mark.skipif(not {"lfm2"} & MODELS.keys(), reason="it takes the kernels")
def test_states_of_where_prompts_part_are_planned_for() -> None:
    """A schedule that was found by chance: a sequence took over several states and kept more of its own."""
    room = 2 * memory("lfm2", 0)
    scheduler = Scheduler(engine("lfm2"), max_seqs=2, kv_bytes=room, prefix_bytes=1 << 14, prefill_chunk=1, start=False)
    jobs = [job_of("lfm2", job) for job in range(len(JOBS))]
    follow(scheduler, jobs, [("desert", 0), ("submit", 0)], functools.partial(alone, "lfm2"))


@pytest.mark.skipif(not {"lfm2"} & MODELS.keys(), reason="it takes the kernels")
def test_a_search_whose_prompt_is_taken_over_when_it_is_to_be_read_begins() -> None:
    """Found by chance: two searches come together, and the second one finds all it needs among what the first read."""
    methods = [job["method"] for _, job in JOBS]
    searched = next(number for number, method in enumerate(methods) if isinstance(method, BestOf)
                    and isinstance(method.inner, DraftModel))
    scheduler = Scheduler(engine("lfm2"), max_seqs=4, prefix_bytes=1 << 14, prefill_chunk=4, start=False)
    jobs = [job_of("lfm2", job) for job in range(len(JOBS))]
    todo = [("submit", 0), ("submit", searched), ("submit", searched), ("cancel", 0)]
    follow(scheduler, jobs, todo, functools.partial(alone, "lfm2"))


def test_the_jobs_hold_every_method_and_all_that_sets_rows_apart() -> None:
    """A pool that had lost its variety would prove nothing."""
    assert {options["method"] for _, options in JOBS} == set(METHODS)
    for name, values in (("n", {1, 3}), ("max_new_tokens", {1, 2, 5, 9, 14}), ("temperature", {None, 1.0})):
        assert {options.get(name) for _, options in JOBS} == values


@pytest.mark.parametrize("family", sorted(MODELS))
def test_every_job_can_be_asked_for(family: str) -> None:
    assert all(memory(family, job) > 0 for job in range(len(JOBS)))
