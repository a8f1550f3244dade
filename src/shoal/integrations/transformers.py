"""Shoal as a `custom_generate` of transformers.

`model.generate(**inputs, custom_generate=shoal.D3(alpha=0.99))` prepares processors, criteria and lengths as always.
Then the method decodes with its own engine around the model, which is not changed. Every field of the generation
configuration is honoured or refused (`shoal.integrations.generation_config`).

Sampling draws one number from torch's global generator per call, so `torch.manual_seed` makes it repeatable. The tokens
differ from those that transformers draws from the same seed; their distribution is the same.

`generate` passes no `streamer`, `tokenizer`, `assistant_model` or `synced_gpus` on to a callable. Bind the first two to
the method. A streamer given to `generate` gets the prompt and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.decode.running_sequence import RunningSequence
from shoal.decode.text.stop import StopRules, StopState
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.stream import Stream
from shoal.errors import Unsupported
from shoal.integrations import _sequences
from shoal.integrations._sequences import Ending, Record, SequenceProcessors
from shoal.integrations.generation_config import check
from shoal.methods import make
from shoal.methods.base import Method
from shoal.model.encoders.encoder import reads_text
from shoal.model.layers.cross_attention import Encoded
from shoal.types import Sampling

KEY = "shoal"
"""The entry of a GenerationConfig that holds a method."""
_ENGINES: WeakKeyDictionary[Any, tuple[object, Engine]] = WeakKeyDictionary()
"""One engine per model, made on first use and dropped with the model."""
_LOCK = threading.Lock()


def run_custom_generate(
    method: Method, model: Any, input_ids: Tensor, *, logits_processor: Iterable[Any] | None = None,
    stopping_criteria: Iterable[Any] | None = None, generation_config: Any = None, streamer: Any = None,
    tokenizer: Any = None, stop_strings: Sequence[str] = (), **model_kwargs: Any,
) -> Any:
    """Decode what `generate` has prepared for a callable.

    Args:
        model: the model whose `generate` calls; not changed.
        input_ids: [B, T], padded on the left.
        logits_processor: processors for a batch; each is called with one sequence at a time.
        stopping_criteria: criteria for a batch; each is called with one sequence at a time.
        streamer: gets the prompt, every token as it comes, and `end()`, even after an error.
        stop_strings: text that ends a sequence; the ids returned include it, as in `generate`.
        **model_kwargs: what `generate` would pass to the model's forward.

    Returns:
        Ids [B, T + longest answer] as `generate` returns them, or a GenerateDecoderOnlyOutput.

    Raises:
        Unsupported: the configuration, an argument or the model asks for something that Shoal cannot do.
        ValueError: there is no generation_config, the ids are not [B, T], or a prompt is empty.
    """
    _sequences.check_shape(input_ids)
    if generation_config is None:
        raise ValueError("there is no generation_config; call model.generate(..., custom_generate=method)")
    criteria = [*(stopping_criteria or ()), *_stop_strings(generation_config, stop_strings, tokenizer)]
    call = _GenerateCall(method, model, input_ids, list(logits_processor or ()), criteria, generation_config)
    try:
        return call.run(streamer, model_kwargs)
    finally:
        if streamer is not None:
            streamer.end()


@dataclass(frozen=True)
class BoundMethod:
    """A method with the arguments that `generate` does not pass on to a callable.

    Attributes:
        streamer: gets the prompt and the tokens; do not also give it to `generate`.
        stop_strings: text that ends a sequence; `generate` itself refuses stop strings for callables.
    """

    method: Method
    streamer: Any = None
    tokenizer: Any = None
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_strings", _as_tuple(self.stop_strings))

    def bind(self, *, streamer: Any = None, tokenizer: Any = None, stop_strings: Any = ()) -> BoundMethod:
        """The same method with the given arguments replaced."""
        given = {"streamer": streamer, "tokenizer": tokenizer, "stop_strings": _as_tuple(stop_strings) or None}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def __call__(self, model: Any, input_ids: Any, **model_kwargs: Any) -> Any:
        """Decode, called by `generate` as its `custom_generate`."""
        return run_custom_generate(self.method, model, input_ids, streamer=self.streamer, tokenizer=self.tokenizer,
                                   stop_strings=self.stop_strings, **model_kwargs)


def attach(generation_config: Any, method: Method | str | Mapping[str, Any] | Sequence[Any]) -> Any:
    """Store a method in a GenerationConfig, to be saved, published and loaded with it; returns the configuration."""
    setattr(generation_config, KEY, make(method).to_dict())
    # From a configuration marked as derived from the model's, transformers would not load custom entries again.
    generation_config._from_model_config = False
    return generation_config


def method_from(generation_config: Any) -> Method:
    """The method that `attach` stored; ValueError if there is none."""
    spec = getattr(generation_config, KEY, None)
    if spec is None:
        raise ValueError(f"the generation_config names no method under {KEY!r}; use shoal.integrations.transformers."
                         "attach(generation_config, method), or name a method in the call")
    return make(spec)


def generate(
    model: Any, input_ids: Any, generation_config: Any = None, method: Any = None,
    method_args: Mapping[str, Any] | None = None, **model_kwargs: Any,
) -> Any:
    """A `custom_generate` that takes its method from the call or from the generation configuration.

    `model.generate(**inputs, custom_generate=generate)` uses the method that `attach` stored in the model's generation
    configuration; `method="d3", method_args={"alpha": 0.99}` in the same call takes precedence.
    """
    chosen = named(method, method_args) or method_from(generation_config)
    return run_custom_generate(chosen, model, input_ids, generation_config=generation_config, **model_kwargs)


def named(method: Any, method_args: Mapping[str, Any] | None) -> Method | None:
    """The method that a call names, if it does; ValueError for `method_args` beside what is no name."""
    if method_args is None:
        return None if method is None else make(method)
    if not isinstance(method, str):
        raise ValueError(f"method_args is {dict(method_args)} beside method={method!r}; name the method as a string")
    return make({"method": method, "method_args": method_args})


def _as_tuple(strings: str | Iterable[str]) -> tuple[str, ...]:
    return (strings,) if isinstance(strings, str) else tuple(strings)


def _stop_strings(config: Any, strings: Sequence[str], tokenizer: Any) -> list[Any]:
    """The criterion for stop strings, which `generate` cannot prepare for a callable."""
    strings = strings or _as_tuple(config.stop_strings or ())
    if not strings:
        return []
    if tokenizer is None:
        raise Unsupported(f"stop_strings {tuple(strings)!r}", "text is only known with a tokenizer",
                          "Bind one: method.bind(tokenizer=t, stop_strings=...)")
    from transformers import StopStringCriteria

    return [StopStringCriteria(tokenizer, list(strings))]


@dataclass(frozen=True)
class _GenerateCall:
    """One call of `generate`: from tensors to sequences and back."""

    method: Method
    model: Any
    input_ids: Tensor
    processors: list[Any]
    criteria: list[Any]
    config: Any

    @torch.no_grad()
    def run(self, streamer: Any, model_kwargs: Mapping[str, Any]) -> Any:
        """Decode. Everything is checked before the streamer gets anything."""
        check(self.config)
        ending = Ending.of(self.criteria, self.config.max_length, self.input_ids.shape[1])
        self._check_batch(streamer, ending)
        given, sources, engine = dict(model_kwargs), None, None
        if reads_text(self.model.config):
            engine = engine_of(self.model)
            assert engine.encoder is not None
            sources = _sequences.sources(given, engine.encoder)
        padding = _sequences.left_padding(self.input_ids, given)
        engine = engine or engine_of(self.model)
        keeps_scores = self.config.return_dict_in_generate and (self.config.output_scores or self.config.output_logits)
        records = [Record() for _ in padding] if keeps_scores else None
        seqs = self._seqs(engine, ending, padding, records, sources or [None] * len(padding))
        cache = engine.cache_for(seqs, ending.limit)
        with Stream(engine, seqs, cache, prefill_chunk=self.config.prefill_chunk_size) as stream:
            if streamer is not None:
                streamer.put(self.input_ids.cpu())
            for step in stream:
                if streamer is not None:
                    streamer.put(torch.tensor([step.token]))
        ids = _sequences.sequences(self.input_ids, seqs, self._pad() or 0)
        return _sequences.output(ids, seqs, records or (), self.config) if self.config.return_dict_in_generate else ids

    def _seqs(
        self, engine: Engine, ending: Ending, padding: Sequence[int], records: Sequence[Record] | None,
        sources: Sequence[Encoded | None],
    ) -> list[RunningSequence]:
        sampled = bool(self.config.do_sample)
        recipe = engine.recipe(self.method, ending.limit)
        _sequences.check_processors(self.processors, repeats=recipe.scratch > 0 or recipe.search is not None)
        seed = int(torch.randint(2**63 - 1, ())) if sampled else 0
        seqs = []
        for number, skip in enumerate(padding):
            ids: list[int] = self.input_ids[number].tolist()
            record = records[number] if records else None
            criteria = ending.criteria_for(len(ids), self.input_ids.device, record)
            rules = StopRules(eos_token_ids=ending.eos, max_new_tokens=ending.limit, criteria=criteria)
            seqs.append(RunningSequence(
                number=number, seq_id=number, tokens=ids[skip:], prompt_length=len(ids) - skip,
                stop=StopState(rules, None, ids), plan=recipe.plan, recipe=recipe,
                sampling=Sampling(temperature=1.0 if sampled else 0.0),
                processors=self._processors_for(number, skip), seed=seed, record=record, source=sources[number],
            ))  # fmt: skip
        return seqs

    def _processors_for(self, seq: int, skip: int) -> tuple[SequenceProcessors, ...]:
        """The sequence's processors as one; empty without any, so that the loop can treat all sequences at once."""
        if not self.processors:
            return ()
        own = tuple(_sequences.for_seq(processor, seq, len(self.input_ids)) for processor in self.processors)
        return (SequenceProcessors(self.input_ids[seq : seq + 1, :skip], own),)

    def _pad(self) -> int | None:
        token = getattr(self.config, "_pad_token_tensor", None)
        token = self.config.pad_token_id if token is None else token
        return None if token is None else int(token)

    def _check_batch(self, streamer: Any, ending: Ending) -> None:
        if len(self.input_ids) == 1:
            return
        if streamer is not None:
            raise Unsupported(f"a streamer for {len(self.input_ids)} rows", "its interface has no place for the row "
                              "that a token belongs to", "Give one prompt, or iterate over shoal.load(model, "
                              "tokenizer).stream(prompts)")
        if self._pad() is None and ending.criteria:
            raise Unsupported(f"stopping criteria for {len(self.input_ids)} rows without a pad_token_id",
                              "rows that end early must be filled up", "Set pad_token_id")


def engine_of(model: Any) -> Engine:
    """The engine around `model`, which is not changed. A new engine is checked to compute what the model computes.

    A model whose modules, dtypes, devices or attention have changed since then gets a new engine.

    Raises:
        Unsupported: the model cannot be run layer by layer, or is in training mode.
    """
    if getattr(model, "training", False):
        raise Unsupported("a model in training mode", "its dropout would change the output", "Call model.eval() before")
    shape = _shape(model)
    with _LOCK:
        known = _ENGINES.get(model)
        if known is None or known[0] != shape:
            engine = engine_for(model, name=getattr(model.config, "_name_or_path", "") or type(model).__name__)
            engine.model = None  # an entry that refers to its own key would never be dropped
            known = _ENGINES[model] = (shape, engine)
        return known[1]


def _shape(model: Any) -> object:
    """The facts about the model that its engine relies on."""
    modules = tuple(map(id, model.modules()))
    tensors = tuple((parameter.dtype, parameter.device) for parameter in model.parameters())
    copied = model.parameters() if reads_text(model.config) else ()
    sums = tuple(float(parameter.detach().sum()) for parameter in copied)  # of a decoder that is packed
    return modules, tensors, sums, getattr(model.config, "_attn_implementation", None)
