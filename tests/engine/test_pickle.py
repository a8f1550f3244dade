"""An engine stays in its process: pickling it, or handing it to another one, says so at once."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import pytest
import torch

import shoal
from chat_tokenizer import chat_tokenizer
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for

SAID = "can be neither pickled, copied nor sent to another process.*load the model there"


def engine(backend: Any) -> Engine:
    return engine_for(tiny("llama", dtype=torch.float32), chat_tokenizer(), backend=backend)


@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_what_holds_a_model_is_not_pickled(backend: Any) -> None:
    one = engine(backend)
    for thing in (one, one.runner, one.session(), [one], {"engine": one}):
        for way in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=SAID):
                way(thing)  # type: ignore[operator]
    assert one.generate([5, 9], max_new_tokens=2, ignore_eos=True).tokens


def test_an_engine_is_not_given_to_a_process_that_is_spawned() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print, args=(engine("packed"),))
    with pytest.raises(TypeError, match=SAID):
        process.start()


def test_what_goes_in_and_comes_out_is_pickled() -> None:
    one = engine("packed")
    result = one.generate([5, 9], max_new_tokens=2, ignore_eos=True, logprobs=1)
    again = pickle.loads(pickle.dumps(result))
    assert again.tokens == result.tokens and again.stats.new_tokens == 2
    for method in (shoal.D3(alpha=0.9), shoal.Full()):
        assert pickle.loads(pickle.dumps(method)) == method
