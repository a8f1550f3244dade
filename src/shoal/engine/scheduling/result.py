"""From a row that has been decoded to the result that the caller gets."""

from __future__ import annotations

from shoal.decode.ledger import Clock, RowLedger
from shoal.decode.row import Row
from shoal.model.kv.cache import KVBytes
from shoal.types import ModelInfo, Result, Stats, TokenLogprob


def result_of(row: Row, info: ModelInfo, clock: Clock, seconds: float) -> Result:
    """The row's outcome so far."""
    return Result(
        text="".join(step.text for step in row.steps),
        tokens=tuple(step.token for step in row.steps),
        finish_reason=row.finish_reason or "cancelled",
        stats=_stats(row, info, clock, seconds),
        depths=tuple(step.depth for step in row.steps),
        seed=row.seed,
        sampling=row.sampling,
        logprobs=_logprobs(row),
        changes=info.changes,
        alternatives=row.alternatives,
    )


def _logprobs(row: Row) -> tuple[TokenLogprob, ...] | None:
    if row.sampling.logprobs is None:
        return None
    return tuple(step.logprob for step in row.steps if step.logprob is not None)


def _stats(row: Row, info: ModelInfo, clock: Clock, seconds: float) -> Stats:
    new, ledger = len(row.steps), row.ledger
    layer_tokens = sum(step.depth for step in row.steps)
    mean = layer_tokens / new if new else float(info.num_layers)
    forwards = ledger.target_forwards - ledger.prefill_forwards
    kv = row.bytes or KVBytes(0, 0, 0)
    return Stats(
        prompt_tokens=row.prompt_length,
        new_tokens=new,
        num_layers=info.num_layers,
        mean_layers=mean,
        layer_tokens=layer_tokens,
        layers_read=info.num_layers + ledger.layers_read,
        ideal_speedup=_ideal_speedup(ledger, info, new),
        target_forwards=ledger.target_forwards,
        draft_forwards=ledger.draft_forwards,
        draft_layer_tokens=ledger.draft_layer_tokens,
        drafted=ledger.drafted,
        accepted=ledger.accepted,
        acceptance=tuple(ledger.accepted_at[at] / count for at, count in sorted(ledger.drafted_at.items())),
        tokens_per_forward=(new - 1) / forwards if new > 1 and forwards else 0.0,
        horizon=row.recipe.horizon or new,
        seconds=seconds,
        prefill_seconds=clock.prefill_seconds,
        decode_seconds=clock.decode_seconds,
        draft_seconds=clock.draft_seconds,
        tokens_per_second=(new - 1) / clock.decode_seconds if new > 1 and clock.decode_seconds else 0.0,
        kv_bytes_allocated=kv.allocated,
        kv_bytes_used=kv.used,
        kv_bytes_saved=kv.saved,
        extras={
            "second_tokens": ledger.second_tokens,
            "second_layer_tokens": ledger.second_layer_tokens,
            "switches": ledger.switches,
            "branches": ledger.branches,
            "thrown_away": max(0, ledger.searched - new) if ledger.branches else 0,
            "judge_calls": ledger.judged,
            "put_tokens": ledger.put,
        },
        records={"draft_rounds": tuple(ledger.draft_rounds)},
    )


def _ideal_speedup(ledger: RowLedger, info: ModelInfo, new_tokens: int) -> float:
    """By reads of layers and heads alone; the prefill counts as one token."""
    read = info.num_layers + ledger.layers_read + (1 + ledger.heads_read) * info.head_layers
    return max(new_tokens, 1) * (info.num_layers + info.head_layers) / read
