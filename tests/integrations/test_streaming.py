from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StopStringCriteria, TextIteratorStreamer

from families import fingerprint, tiny
from generate_calls import PROMPTS, a_word, an_eos, batch, both, generate, single
from shoal import D3, Unsupported
from shoal.integrations.transformers import BoundMethod
from shoal.methods.best_of import BestOf
from shoal.methods.full import Full
from toy_tokenizers import tokenizer


class Recorder:
    """A streamer that records what it gets, and may interrupt."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0
        self.interrupt_at = interrupt_at

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.puts.append(value.flatten().tolist())
        if len(self.puts) == self.interrupt_at:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.ended += 1


def test_a_bound_streamer_gets_what_transformers_would_give_it(llama: PreTrainedModel) -> None:
    theirs, ours = Recorder(), Recorder()
    eos = an_eos(llama, 0, 6)
    a = generate(llama, **single(), streamer=theirs, eos_token_id=eos)
    b = generate(llama, **single(), custom_generate=Full().bind(streamer=ours), eos_token_id=eos)
    assert torch.equal(a, b) and 2 < len(ours.puts) < 12
    assert (ours.puts, ours.ended) == (theirs.puts, theirs.ended)


def test_tokens_come_while_decoding_goes_on(llama: PreTrainedModel) -> None:
    streamer = Recorder()
    seen: list[int] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(len(streamer.puts))
        return scores

    generate(llama, **single(), logits_processor=[note], custom_generate=Full().bind(streamer=streamer))
    assert seen == list(range(1, 13))


def test_a_text_iterator_streamer_ends() -> None:
    words = tokenizer("byte_level")
    model = tiny("llama", vocab_size=len(words))
    streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=60)
    ids = torch.tensor([words("a fish").input_ids])
    expected = generate(model, input_ids=ids, custom_generate=D3(alpha=0.9))[0, ids.shape[1] :]
    options = {"input_ids": ids, "custom_generate": D3(alpha=0.9).bind(streamer=streamer)}
    thread = threading.Thread(target=generate, args=(model,), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == words.decode(expected)


def test_an_interruption_ends_the_stream_and_changes_nothing(llama: PreTrainedModel) -> None:
    before = fingerprint(llama)
    streamer = Recorder(interrupt_at=4)
    with pytest.raises(KeyboardInterrupt):
        generate(llama, **single(), custom_generate=D3(alpha=0.8).bind(streamer=streamer))
    assert streamer.ended == 1 and len(streamer.puts) == 4
    assert fingerprint(llama) == before
    theirs, ours = both(llama, **single())
    assert torch.equal(theirs, ours)


def test_a_refusal_ends_the_stream_too(llama: PreTrainedModel) -> None:
    streamer = Recorder()
    with pytest.raises(Unsupported, match="3 rows"):
        generate(llama, **batch(), custom_generate=Full().bind(streamer=streamer))
    assert streamer.puts == [] and streamer.ended == 1


def test_a_search_that_is_refused_puts_nothing(llama: PreTrainedModel) -> None:
    streamer = Recorder()
    wanted = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True}
    with pytest.raises(Unsupported, match="Leave output_scores"):
        generate(llama, **single(), **wanted, custom_generate=BestOf(2).bind(streamer=streamer))
    assert streamer.puts == [] and streamer.ended == 1


def test_a_streamer_given_to_generate_gets_the_prompt_alone(llama: PreTrainedModel) -> None:
    streamer = Recorder()
    generate(llama, **single(), streamer=streamer, custom_generate=Full())
    assert streamer.puts == [list(PROMPTS[0])] and streamer.ended == 0


def test_binding_again_keeps_what_is_not_given() -> None:
    first, second = Recorder(), Recorder()
    bound = Full().bind(streamer=first)
    assert isinstance(bound, BoundMethod) and bound.tokenizer is None
    words = object()
    again = bound.bind(tokenizer=words)
    assert (again.method, again.streamer, again.tokenizer) == (Full(), first, words)
    assert again.bind(streamer=second, stop_strings="x") == BoundMethod(Full(), second, words, ("x",))
    assert again.bind(stop_strings=["x", "y"]).bind(tokenizer=1).stop_strings == ("x", "y")


def _worded() -> tuple[Any, PreTrainedModel, torch.Tensor]:
    words = tokenizer("byte_level")
    return words, tiny("llama", vocab_size=len(words)), torch.tensor([words("a fish").input_ids])


def test_bound_stop_strings_end_where_transformers_ends() -> None:
    words, model, ids = _worded()
    answer = generate(model, input_ids=ids, max_new_tokens=20)[0, ids.shape[1] :]
    stop = a_word(words, answer)
    theirs = generate(model, input_ids=ids, max_new_tokens=20, stop_strings=[stop], tokenizer=words)
    ours = generate(
        model, input_ids=ids, max_new_tokens=20, custom_generate=Full().bind(tokenizer=words, stop_strings=stop)
    )
    own = StopStringCriteria(words, [stop])
    also = generate(model, input_ids=ids, max_new_tokens=20, stopping_criteria=[own], custom_generate=Full())
    assert torch.equal(theirs, ours) and torch.equal(theirs, also)
    assert ours.shape[1] < ids.shape[1] + 20


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    _, model, ids = _worded()
    with pytest.raises(Unsupported, match="Bind"):
        generate(model, input_ids=ids, custom_generate=BoundMethod(Full(), stop_strings=("x",)))
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model, input_ids=ids, stop_strings=["x"], custom_generate=Full())
