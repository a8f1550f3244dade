"""The worker that runs a model under depth plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from shoal.depth.plan import DepthPlan
from shoal_vllm.layers import Current, install, write_nothing
from shoal_vllm.rows import Counts, Span, StepRows
from shoal_vllm.settings import Settings

log = init_logger("vllm.plugins.shoal")


class DepthWorker(CPUWorker):
    """vLLM's worker for CPUs; once the model is loaded, its layers run for the rows whose plans contain them."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and put gates before its layers."""
        super().load_model(*args, **kwargs)
        settings = Settings.of(self.vllm_config)
        assert settings is not None
        self.depth = DepthForward(self.model_runner, settings)

    def shoal_counts(self) -> dict[str, Any]:
        """What ran: `shoal_vllm.rows.Counts` as a dict. For `LLM.collective_rpc`."""
        return asdict(self.depth.counts)


class DepthForward:
    """Stands for the runner's `_model_forward`: says which rows run which layers, and counts them.

    Args:
        runner: of vLLM's first generation, whose state of a batch lies in numpy arrays on the host.
        settings: of the engine.
    """

    def __init__(self, runner: CPUModelRunner, settings: Settings) -> None:
        self._runner, self._settings, self._current = runner, settings, Current()
        self._names = install(runner.get_model(), self._current)
        if len(self._names) != settings.num_layers:
            raise RuntimeError(f"{len(self._names)} layers were found, and the model's config says "
                               f"{settings.num_layers}")
        self._plans: dict[str, tuple[SamplingParams, DepthPlan]] = {}
        self.counts = Counts.none(settings.num_layers)
        self._forward: Callable[..., Any] = runner._model_forward
        runner._model_forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the rows that were prepared, under vLLM's forward context."""
        rows = StepRows.of(self._spans())
        self.counts.add(rows)
        if not rows.runs.all():
            write_nothing(get_forward_context(), rows, self._names)
            self._current.rows = rows
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._current.rows = None

    def _spans(self) -> list[Span]:
        runner, batch = self._runner, self._runner.input_batch
        count = batch.num_reqs
        starts = runner.query_start_loc.np[: count + 1].tolist()
        prompts, computed = batch.num_prompt_tokens[:count].tolist(), batch.num_computed_tokens_cpu[:count].tolist()
        plans = self._plans_of({request: runner.requests[request].sampling_params for request in batch.req_ids})
        sizes = (end - start for start, end in zip(starts, starts[1:], strict=False))
        return [Span(*each) for each in zip(plans, prompts, computed, sizes, strict=True)]

    def _plans_of(self, asked: dict[str, SamplingParams]) -> list[DepthPlan]:
        """The plan of each request, kept from step to step."""
        before, self._plans = self._plans, {}
        for request, params in asked.items():
            known = before.get(request)
            plan = known[1] if known is not None and known[0] is params else self._settings.plan(params)
            self._plans[request] = params, plan
        return [plan for _, plan in self._plans.values()]
