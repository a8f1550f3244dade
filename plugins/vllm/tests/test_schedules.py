"""Random schedules: requests of different ages, plans and prompts come and go, in too little memory for all.

Whatever vLLM preempts, computes again, cuts into chunks or takes from its prefix cache, a request's tokens are those
that Shoal's own engine generates for it alone. SCHEDULES=500 runs as many, from seed FIRST on.
"""

import os
import random
from typing import Any

import pytest
from vllm import LLM

import shoal
import tiny
from shoal_vllm.settings import _method, as_options

FIRST, SCHEDULES = int(os.environ.get("FIRST", "0")), int(os.environ.get("SCHEDULES", "12"))
DEFAULT = {"method": "d3", "mean": 0.7}
PLANS = (None, None, {"method": "d3", "alpha": 0.97}, "full", {"method": "schedule", "order": [4], "steps": [2]})
STEMS = [random.Random(seed).choices(range(3, 320), k=70) for seed in range(3)]
BLOCKS = {"llama": 10, "gemma3": 18}
"""Of 32 positions, one of them vLLM's own; Gemma's kinds of layers have their own. Five requests want seven each."""


class Schedule:
    """One of them, by its seed."""

    def __init__(self, family: str, seed: int) -> None:
        self.random, self.family, self.answered = random.Random(seed), family, []

    def prompt(self) -> list[int]:
        """A new one, one that shares a beginning with others, or one that goes on from an earlier answer."""
        new = self.random.choices(range(3, 320), k=self.random.randint(1, 20))
        kind = self.random.random()
        if kind < 0.25 and self.answered:
            return [*self.random.choice(self.answered), *new][-150:]
        return new if kind < 0.5 else self.random.choice(STEMS)[: self.random.choice((32, 64, 70))] + new

    def run(self, llm: LLM) -> list[tuple[list[int], Any, list[int]]]:
        """Run it; each request's prompt, options and tokens."""
        engine, asked, done = llm.llm_engine, {}, []
        waiting = self.random.randint(4, 9)
        while waiting or engine.has_unfinished_requests():
            while waiting and (self.random.random() < 0.3 or not engine.has_unfinished_requests()):
                waiting -= 1
                prompt, plan = self.prompt(), self.random.choice(PLANS)
                length = self.random.randint(3, min(90, 220 - len(prompt)))
                name = f"{self.family}-{waiting}"
                asked[name] = prompt, plan, length
                engine.add_request(name, {"prompt_token_ids": prompt}, tiny.params(length, plan))
            for output in engine.step():
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    prompt, plan, length = asked[output.request_id]
                    assert len(tokens) == length
                    self.answered.append([*prompt, *tokens])
                    done.append((prompt, plan, tokens))
        return done


@pytest.mark.parametrize("family", BLOCKS)
def test_any_schedule_gives_the_tokens_of_each_request_alone(family: str) -> None:
    with tiny.engine(tiny.folder(family), DEFAULT, num_gpu_blocks_override=BLOCKS[family], max_num_batched_tokens=64,
                     max_num_seqs=5, disable_log_stats=False) as llm:
        scheduler = tiny.scheduler(llm)
        preempt, preempted = scheduler._preempt_request, []
        scheduler._preempt_request = lambda request, *args, **kw: (
            preempted.append(request.num_output_tokens), preempt(request, *args, **kw))
        for seed in range(FIRST, FIRST + SCHEDULES):
            for prompt, plan, tokens in Schedule(family, seed).run(llm):
                method = shoal.methods.make(as_json(DEFAULT if plan is None else plan))
                assert tokens == tiny.reference(family, prompt, len(tokens), method), (seed, plan, len(prompt))
        hits = next(one.value for one in llm.get_metrics() if one.name == "vllm:prefix_cache_hits")
        print(f"{family}: {SCHEDULES} schedules, {len(preempted)} preemptions, {hits} positions from the prefix cache")
        assert hits > 0 and sum(age > 0 for age in preempted) >= SCHEDULES / 4


def as_json(asked: Any) -> dict[str, Any]:
    import json

    made: dict[str, Any] = json.loads(_method(as_options(asked)))
    return made


def test_waves_start_together_and_change_no_token() -> None:
    prompts = [[seed, seed + 1, seed + 2] for seed in range(5, 14)]
    wanted = [tiny.params(10 + 7 * (at % 3)) for at in range(len(prompts))]
    counts, found = [], []
    for admission in ("at once", "waves"):
        with tiny.engine(tiny.folder("llama"), {**DEFAULT, "admission": admission}, max_num_seqs=3) as llm:
            found.append(tiny.answers(llm, prompts, wanted))
            counts.append(llm.collective_rpc("shoal_counts")[0])
    assert found[0] == found[1]
    once, waves = (sum(one["layer_forwards"]) / one["forwards"] for one in counts)
    assert waves < once
