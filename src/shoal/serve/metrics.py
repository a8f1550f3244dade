"""The server's metrics, under vLLM's names with the prefix `shoal:`, so that its dashboards work."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from typing_extensions import override

from shoal.decode.running_sequence import RunningSequence
from shoal.engine.scheduling.request_handle import ScheduledSequence
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.types import Result, Stats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
_COUNTERS = {
    "prompt_tokens": "Prompt tokens.",
    "prefix_cache_queries": "Prompt tokens looked up among earlier ones.",
    "prefix_cache_hits": "Prompt tokens whose KV was taken from an earlier prompt or answer.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Drafts.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "layers_executed": "Decoder layers run for generated tokens.",
    "layers_skipped": "Decoder layers skipped for generated tokens.",
}
_TIMES = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "request_time_per_output_token_seconds": "Mean time per token of a sequence after its first.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to admission.",
    "request_prefill_time_seconds": "From admission to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From admission to the last token.",
}
_REASONS = {"cancelled": "abort"}


class Metrics:
    """The metrics of one model, labelled with its name; every sequence counts as a request.

    Args:
        process: whether to tell of the process, too.
    """

    def __init__(self, model_name: str, scheduler: Scheduler, num_layers: int, *, process: bool = True) -> None:
        self.registry = CollectorRegistry()
        if process:
            ProcessCollector(registry=self.registry)
        self._label, self._layers = model_name, num_layers
        self.watch(scheduler)
        self._recurrent = bool(scheduler.engine.runner.state_bytes)
        self._counters = {name: self._counter(name, text) for name, text in _COUNTERS.items()}
        self._times = {name: self._histogram(name, text, _SECONDS) for name, text in _TIMES.items()}
        self._gaps = self._histogram("inter_token_latency_seconds", "Between a sequence's chunks of tokens.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens per prompt.", _TOKENS)
        self._made = self._histogram("request_generation_tokens", "Tokens per answer.", _TOKENS)
        self._depth = self._histogram("decode_depth", "Layers per generated token.", range(1, num_layers + 1))
        self._success = self._counter("request_success", "Rows that ended, by reason.", "finished_reason")
        self._missed = self._counter("prefix_cache_misses", "Prompt tokens looked up and read, by reason.", "reason")
        self._kept = self._counter("spec_decode_num_accepted_tokens_per_pos", "Accepted, by position.", "position")
        self._gauge("num_requests_running", "Running sequences.", lambda one: one.running)
        self._gauge("num_requests_waiting", "Rows in the queue.", lambda one: one.waiting)
        self._gauge("kv_cache_usage_perc", "Share of the KV memory in use, 0 to 1.", lambda one: one.kv_use)
        self._gauge("prefix_cache_bytes", "Bytes kept of prompts and answers.", lambda one: one.prefixes.bytes)

    def watch(self, scheduler: Scheduler | None) -> None:
        """Tell of that scheduler from now on; None while the model is not in memory."""
        self._scheduler = scheduler
        if scheduler is not None:
            self._keeps = scheduler.prefixes.limit > 0

    def finished(self, entry: ScheduledSequence, result: Result) -> None:
        """Count a sequence that has ended."""
        stats, executed = result.stats, result.stats.layer_tokens
        counts = {
            "prompt_tokens": stats.prompt_tokens,
            "prefix_cache_queries": stats.prompt_tokens if self._keeps else 0,
            "prefix_cache_hits": entry.seq.cached,
            "generation_tokens": stats.new_tokens,
            "spec_decode_num_drafts": entry.seq.ledger.drafted_at[1],
            "spec_decode_num_draft_tokens": stats.drafted,
            "spec_decode_num_accepted_tokens": stats.accepted,
            "layers_executed": executed,
            "layers_skipped": self._layers * stats.new_tokens - executed,
        }
        for name, amount in counts.items():
            self._counters[name].labels(self._label).inc(amount)
        for reason, count in self._misses(entry.seq).items():
            self._missed.labels(self._label, reason).inc(count)
        for distance in entry.seq.ledger.drafted_at:
            self._kept.labels(self._label, str(distance - 1)).inc(entry.seq.ledger.accepted_at[distance])
        self._success.labels(self._label, _REASONS.get(result.finish_reason, result.finish_reason)).inc()
        self._prompt.labels(self._label).observe(stats.prompt_tokens)
        self._made.labels(self._label).observe(stats.new_tokens)
        for step in entry.seq.steps:
            self._depth.labels(self._label).observe(step.depth)
        self._observe_times(entry, stats)

    def _misses(self, seq: RunningSequence) -> dict[str, int]:
        """Prompt tokens that were read although they were looked up, by reason.

        "new": nothing alike is kept; the last token, whose logits are needed, among them. "no_state": they are kept,
        without the states of recurrent layers that far. "window": a sliding window has moved on. "method": they ran,
        or are stored, otherwise than the model itself does it.
        """
        looked_up = seq.prompt_length if self._keeps else 0
        if not looked_up or seq.recipe.alters_kv:
            return {"method": looked_up}
        return {"new": looked_up - seq.known, "no_state" if self._recurrent else "window": seq.known - seq.cached}

    def _observe_times(self, entry: ScheduledSequence, stats: Stats) -> None:
        for gap in entry.gaps:
            self._gaps.labels(self._label).observe(gap)
        times = {"request_queue_time_seconds": entry.queue_seconds, "e2e_request_latency_seconds": stats.seconds}
        if entry.first is not None:
            times["time_to_first_token_seconds"] = entry.first - entry.arrived
            times["request_prefill_time_seconds"] = stats.prefill_seconds
            times["request_decode_time_seconds"] = stats.decode_seconds
            times["request_inference_time_seconds"] = stats.prefill_seconds + stats.decode_seconds
            if stats.new_tokens > 1:
                times["request_time_per_output_token_seconds"] = stats.decode_seconds / (stats.new_tokens - 1)
        for name, seconds in times.items():
            self._times[name].labels(self._label).observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"shoal:{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Any) -> Histogram:
        return Histogram(f"shoal:{name}", text, ["model_name"], buckets=[*buckets], registry=self.registry)

    def _gauge(self, name: str, text: str, read: Callable[[Scheduler], float]) -> None:
        def now() -> float:
            return 0 if self._scheduler is None else read(self._scheduler)

        Gauge(f"shoal:{name}", text, ["model_name"], registry=self.registry).labels(self._label).set_function(now)


class Together(CollectorRegistry):
    """The metrics of several registries as one.

    Args:
        families: those of each, by its name.
        label: the label that tells the name of a sample's registry; empty for none, where other labels tell them apart.
    """

    def __init__(self, families: Mapping[str, Iterable[Metric]], label: str = "") -> None:
        super().__init__()
        self._families, self._label = families, label

    @override
    def collect(self) -> Iterable[Metric]:
        whole: dict[str, Metric] = {}
        for name, families in sorted(self._families.items()):
            added = {self._label: name} if self._label else {}
            for one in families:
                family = whole.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                family.samples += [sample._replace(labels={**sample.labels, **added}) for sample in one.samples]
        return whole.values()


def report(entries: list[ScheduledSequence], results: list[Result]) -> dict[str, Any]:
    """The cost of one answer, for clients that ask for `metrics`: sums and means over its choices."""
    stats = [result.stats for result in results]
    made = sum(one.new_tokens for one in stats)
    drafted, accepted = sum(one.drafted for one in stats), sum(one.accepted for one in stats)
    drafts = sum(entry.seq.ledger.drafted_at[1] for entry in entries)
    gaps = [gap for entry in entries for gap in entry.gaps]
    firsts = [entry.first - entry.arrived for entry in entries if entry.first is not None]
    return {
        "depth": {"mean_layers": sum(one.layer_tokens for one in stats) / made if made else None,
                  "full_layers": stats[0].num_layers,
                  "layers_histogram": _histogram([depth for result in results for depth in result.depths])},
        "speculative_decoding": {"num_spec_steps": drafts,
                                 "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
                                 "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted,
                                 "draft_acceptance_rate": accepted / drafted if drafted else None},
        "seed": results[0].seed,
        "sampling": results[0].sampling.shown(),
        "beside": extra_counts(results),
        "queue_time_ms": 1e3 * max(entry.queue_seconds for entry in entries),
        "time_to_first_token_ms": 1e3 * max(firsts) if firsts else None,
        "generation_time_ms": 1e3 * max(one.decode_seconds for one in stats),
        "mean_itl_ms": 1e3 * sum(gaps) / len(gaps) if gaps else None,
        "tokens_per_second": sum(one.tokens_per_second for one in stats),
    }


def extra_counts(results: list[Result]) -> dict[str, int]:
    """`Stats.extra_counts`, the counts of searches and of second models, summed over results."""
    return dict(sum((Tally(result.stats.extra) for result in results), Tally[str]()))


def _histogram(depths: list[float]) -> dict[str, int]:
    return {f"{depth:g}": depths.count(depth) for depth in sorted(set(depths))}
