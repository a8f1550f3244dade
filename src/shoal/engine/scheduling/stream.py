"""A generation under way, step by step, and the result that the caller gets."""

from __future__ import annotations

import time
from collections.abc import Iterator

from shoal.decode.batch import begin, run
from shoal.decode.ledger import Clock, SequenceLedger
from shoal.decode.running_sequence import RunningSequence
from shoal.engine.loaded import LoadedModel
from shoal.engine.memory.amounts import naming
from shoal.model.kv.cache import KVBytes, KVCache
from shoal.types import ModelInfo, Result, Stats, Step


class Stream(Iterator[Step]):
    """The steps of a generation as they come; `result` and `results` afterwards.

    Args:
        engine: the model, whose lock each step takes.
        seqs: the sequences to decode, all of one loop.
        release: whether dropped layers free their KV at once.
        prefill_chunk: the most prompt tokens per sequence and forward; None for the loop's own choice.
    """

    def __init__(
        self, engine: LoadedModel, seqs: list[RunningSequence], cache: KVCache, *, release: bool = True,
        prefill_chunk: int | None = None,
    ) -> None:
        self._engine, self._seqs = engine, seqs
        for seq in seqs:
            seq.check()
        batch = begin(seqs[0].recipe.loop, engine.runner, cache, seqs, release=release)
        most = {} if prefill_chunk is None else {"most": prefill_chunk}
        self._steps, self._clock = run(batch, engine.runner.prefill_chunk, **most), batch.clock
        self._ready: list[Step] = []
        self._started, self._seconds = time.perf_counter(), 0.0

    def __next__(self) -> Step:
        while not self._ready:
            with self._engine.turn(), naming(self._size):
                self._ready = list(reversed(next(self._steps)))
            self._seconds = time.perf_counter() - self._started
        return self._ready.pop()

    @property
    def pending(self) -> int:
        """How many steps have come that were not taken yet: several may come at once."""
        return len(self._ready)

    def _size(self) -> tuple[str, str]:
        """What fills the memory, and what to do where it is too small."""
        prompt = max(seq.prompt_length for seq in self._seqs)
        new = max(seq.emitted + seq.stop.room for seq in self._seqs)
        what = f"a batch of {len(self._seqs)}, prompts of up to {prompt} tokens and max_new_tokens={new}"
        return what, "Use a smaller max_new_tokens, fewer prompts at once, or shorter ones"

    def close(self) -> None:
        """End the generation now: no further step comes, and its memory is free."""
        with self._engine.turn():
            self._steps.close()
        self._ready.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens of a single prompt."""
        return self._seqs[0].tokens

    @property
    def result(self) -> Result:
        """The outcome of a single prompt."""
        return self.results[0]

    @property
    def results(self) -> list[Result]:
        """The outcome of every sequence; a sequence that was ended early has the finish reason "cancelled"."""
        return [result_of(seq, self._engine.info(), self._clock, self._seconds) for seq in self._seqs]


def result_of(seq: RunningSequence, info: ModelInfo, clock: Clock, seconds: float) -> Result:
    """The sequence's outcome so far."""
    wanted = seq.sampling.logprobs is not None
    return Result(text="".join(step.text for step in seq.steps), tokens=tuple(step.token for step in seq.steps),
                  finish_reason=seq.finish_reason or "cancelled", stats=_stats(seq, info, clock, seconds),
                  depths=tuple(step.depth for step in seq.steps), seed=seq.seed, sampling=seq.sampling,
                  logprobs=tuple(step.logprob for step in seq.steps if step.logprob is not None) if wanted else None,
                  changes=info.changes, alternatives=seq.alternatives)


def _stats(seq: RunningSequence, info: ModelInfo, clock: Clock, seconds: float) -> Stats:
    new, ledger = len(seq.steps), seq.ledger
    layer_tokens = sum(step.depth for step in seq.steps)
    mean = layer_tokens / new if new else float(info.num_layers)
    forwards = ledger.target_forwards - ledger.prefill_forwards
    kv = seq.bytes or KVBytes(0, 0, 0)
    return Stats(
        prompt_tokens=seq.read, new_tokens=new, horizon=seq.recipe.horizon or new,
        num_layers=info.num_layers, mean_layers=mean, layer_tokens=layer_tokens,
        layers_read=info.num_layers + ledger.layers_read, ideal_speedup=_ideal_speedup(ledger, info, new),
        target_forwards=ledger.target_forwards, draft_forwards=ledger.draft_forwards,
        draft_layer_tokens=ledger.draft_layer_tokens, drafted=ledger.drafted, accepted=ledger.accepted,
        acceptance=tuple(ledger.accepted_at[at] / count for at, count in sorted(ledger.drafted_at.items())),
        tokens_per_forward=(new - 1) / forwards if new > 1 and forwards else 0.0,
        seconds=seconds, prefill_seconds=clock.prefill_seconds, decode_seconds=clock.decode_seconds,
        draft_seconds=clock.draft_seconds,
        tokens_per_second=(new - 1) / clock.decode_seconds if new > 1 and clock.decode_seconds else 0.0,
        kv_bytes_allocated=kv.allocated, kv_bytes_used=kv.used, kv_bytes_saved=kv.saved,
        extras={"second_tokens": ledger.second_tokens, "second_layer_tokens": ledger.second_layer_tokens,
                "switches": ledger.switches, "branches": ledger.branches,
                "thrown_away": max(0, ledger.searched - new) if ledger.branches else 0, "judge_calls": ledger.judged,
                "put_tokens": ledger.put,
                "skipped_layer_tokens": ledger.prefill_tokens * info.num_layers - ledger.prefill_layer_tokens},
        records={"draft_rounds": tuple(ledger.draft_rounds)},
    )


def _ideal_speedup(ledger: SequenceLedger, info: ModelInfo, new_tokens: int) -> float:
    """The speed-up by reads of layers and heads alone. The prefill counts as one token."""
    read = info.num_layers + ledger.layers_read + (1 + ledger.heads_read) * info.head_layers
    return max(new_tokens, 1) * (info.num_layers + info.head_layers) / read
