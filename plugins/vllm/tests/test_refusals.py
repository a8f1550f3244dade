"""What cannot be honoured is refused with a reason: at the start, or by the request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from vllm import EngineArgs, SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

import tiny
from shoal_vllm import plugin
from shoal_vllm.drafter import Auto

D3 = {"method": "d3", "mean": 0.8}


def config(asked: Any = D3, **options: Any) -> Any:
    extra = {} if asked is None else {"additional_config": {"shoal": asked}}
    return EngineArgs(str(tiny.folder("llama")), **tiny.ENGINE | extra | options).create_engine_config()


@pytest.mark.parametrize(("options", "says"), [
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
     "a depth plan beside speculative decoding: the guesses of a step would need different layers"),
    ({"asked": {"method": "schedule", "order": [3, 4], "steps": [5, 4]}}, "must be at least 1 and not descend"),
    ({"asked": {"method": "d3", "alpha": 1.5}}, "alpha"),
    ({"asked": {"method": "eagle"}}, "only a depth plan reaches vLLM's layers"),
    ({"worker_cls": "my.Worker"}, "a depth plan in the worker my.Worker"),
    ({"scheduler_cls": "my.Scheduler"}, "a depth plan under a scheduler of another kind"),
    ({"compilation_config": {"mode": 3}}, "a graph of the whole model runs every layer"),
])
def test_an_engine_says_at_its_start_what_it_cannot_do(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        config(**options)
    assert "\n" not in str(caught.value)


def test_nothing_changes_where_shoal_is_not_named() -> None:
    made = config(None)
    assert made.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert made.scheduler_config.scheduler_cls is None and not made.model_config.enforce_eager


def test_a_version_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "TESTED", ("0.1.0",))
    with pytest.raises(ValueError, match="shoal-vllm on vLLM .*: it was tested on 0.1.0"):
        config()
    with pytest.raises(ValueError, match="it was tested on 0.1.0"):
        Auto(SimpleNamespace())
    assert config({**D3, "untested": True}).model_config.enforce_eager


@pytest.mark.parametrize(("change", "says"), [
    ({"use_v2_model_runner": True}, "on vLLM's second model runner"),
    ({"kv_transfer_config": object()}, "beside a KV connector"),
    ({"parallel_config": SimpleNamespace(world_size_across_dp=2, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")},
     "in 2 processes of one model"),
    ({"model_config": SimpleNamespace(runner_type="pooling")}, "for the runner 'pooling'"),
])
def test_what_this_machine_cannot_start(change: dict[str, Any], says: str) -> None:
    fine = SimpleNamespace(
        use_v2_model_runner=False, kv_transfer_config=None, speculative_config=None, additional_config={},
        parallel_config=SimpleNamespace(world_size_across_dp=1, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker"),
        model_config=SimpleNamespace(runner_type="generate"), scheduler_config=SimpleNamespace(scheduler_cls=None),
    )
    plugin.check_config(fine)
    with pytest.raises(ValueError, match=says):
        plugin.check_config(SimpleNamespace(**vars(fine) | change))


def test_the_drafter_refuses_the_second_model_runner() -> None:
    with pytest.raises(ValueError, match="second model runner: that takes no drafter classes"):
        Auto(SimpleNamespace(use_v2_model_runner=True))


def test_a_model_whose_layers_are_not_found() -> None:
    torch.manual_seed(0)
    path = tiny.folder("llama").with_name("shoal-vllm-gpt2")
    sizes = transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=6, n_head=2, n_positions=256,
                                     bos_token_id=1, eos_token_id=2)
    transformers.GPT2LMHeadModel(sizes).save_pretrained(path)
    with pytest.raises(ValueError, match="a depth plan on GPT2LMHeadModel: it has 0 lists of decoder layers"), \
            tiny.engine(path, D3):
        pass


def test_requests_are_refused_and_the_engine_goes_on() -> None:
    with tiny.engine(tiny.folder("llama"), {}) as llm:
        wrong = {"only a depth plan": {"method": "snapkv"}, "out of reach": {"method": "d3", "mean": 0.01}}
        for says, asked in wrong.items():
            with pytest.raises(ValueError, match=says):
                tiny.answers(llm, [[5, 6, 7]], tiny.params(40, asked))
        assert len(tiny.answers(llm, [[5, 6, 7]], tiny.params(40, D3))[0]) == 40


def test_a_server_started_without_shoal_says_so() -> None:
    with tiny.engine(tiny.folder("llama")) as llm, pytest.raises(ValueError, match="this server was started without"):
        tiny.answers(llm, [[5, 6, 7]], tiny.params(4, D3))


def test_a_client_writes_options_beside_those_of_openai() -> None:
    plugin.register()
    plugin.register()  # vLLM may call it more than once
    asked = {"model": "m", "shoal": D3}
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], **asked)
    for made in (chat.to_sampling_params(8, {}), CompletionRequest(prompt="hi", **asked).to_sampling_params(8, {})):
        assert isinstance(made, SamplingParams) and made.extra_args == {"shoal": D3}
    flat = CompletionRequest(model="m", prompt="hi", vllm_xargs={"shoal": '{"method": "d3"}'})
    assert flat.to_sampling_params(8, {}).extra_args == {"shoal": '{"method": "d3"}'}
    with pytest.raises(ValueError, match="shoal beside use_beam_search"):
        CompletionRequest(prompt="hi", use_beam_search=True, n=2, **asked).to_beam_search_params(8, {})
