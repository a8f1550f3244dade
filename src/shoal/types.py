"""Values that several folders use: how to sample, what a step produced, what a request returned.

They are plain frozen dataclasses without torch, so that every module may import them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]
Alternative = tuple[str, tuple[int, ...], float]
"""Another answer: its text, its token ids, and its score, which is higher for a better one."""
_MOST_BIAS = 1e8
"""Largest absolute value of a bias: it stays finite in float32 at the lowest temperature."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from the logits of one sequence.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1, `min_p` 0, `typical_p` 1, `repetition_penalty` 1 and the two
    additive penalties 0 are neutral. `repetition_window` is the number of last tokens, prompt included, that
    `repetition_penalty` looks at (0: all). `logit_bias` is added to the raw logits of the given token ids; minus
    infinity bans a token. `logprobs` asks for the log-probability of each emitted token and of that many alternatives
    (0: of the token alone). Log-probabilities are those before temperature and truncation.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, ">= 0 and finite (0 is greedy)")
        _check("top_k", self.top_k, self.top_k >= 0, ">= 0 (0 keeps every token)")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _check("typical_p", self.typical_p, 0 < self.typical_p <= 1, "in (0, 1] (1 keeps every token)")
        _check("repetition_window", self.repetition_window, self.repetition_window >= 0, ">= 0 (0 is the whole text)")
        finite = 0 < self.repetition_penalty < math.inf
        _check("repetition_penalty", self.repetition_penalty, finite, "> 0 and finite (1 is neutral)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= value <= 2, "in [-2, 2]")
        _check("logprobs", self.logprobs, self.logprobs is None or self.logprobs >= 0, "None or >= 0")
        for token, value in self.logit_bias.items():
            fits = _is(value, Real) and (value == -math.inf or -_MOST_BIAS <= value <= _MOST_BIAS)
            _check(f"logit_bias[{token}]", value, fits,
                   f"a number in -{_MOST_BIAS:g}..{_MOST_BIAS:g}, or minus infinity, which bans the token")

    def _check_kinds(self) -> None:
        numbers = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
                   "frequency_penalty")
        for name in numbers:
            _check(name, getattr(self, name), _is(getattr(self, name), Real), "a number")
        for name in ("top_k", "repetition_window"):
            _check(name, getattr(self, name), _is(getattr(self, name), Integral), "a whole number")
        whole = self.logprobs is None or _is(self.logprobs, Integral)
        _check("logprobs", self.logprobs, whole, "None or a whole number")
        ids = isinstance(self.logit_bias, Mapping) and all(_is(token, Integral) for token in self.logit_bias)
        _check("logit_bias", self.logit_bias, ids, "a mapping from token ids, whole numbers, to numbers")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def shown(self) -> dict[str, float]:
        """The temperature and every option that is not neutral, for reports; without bias and log-probabilities."""
        neutral = {one.name: one.default for one in fields(self)}
        found = {name: getattr(self, name) for name in neutral if name not in ("logit_bias", "logprobs")}
        return {name: value for name, value in found.items() if name == "temperature" or value != neutral[name]}


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True)
class MaskedModel:
    """What a masked-diffusion model, which decides masked tokens in any order, says of itself.

    Attributes:
        mask_token_id: stands for a token that is not decided yet.
        shift: logits at position p predict the token at p + shift: 0, or 1 as in Dream.
        window: number of last tokens that it was trained to draft from; None for all of them.
    """

    mask_token_id: int
    shift: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a method knows of the model and the request when it makes its recipe.

    Attributes:
        num_layers: L, the number of decoder layers.
        max_new_tokens: the request's limit; the default horizon of a depth schedule.
        head_layers: cost of the LM head in decoder layers, by bytes read at batch 1.
        scores: calibrated cost of dropping each layer, one tuple of L numbers per kind of score
            (`influence`, `leave_one_out`); low means cheap to drop.
        order: the removal order that the model's card recommends, if any.
        bears: the mean depth in layers that the model bears, by its card, if that is known.
        skips: layers whose attention, and layers whose MLP, drafts best leave out, by the card.
        can_split: whether attention and MLP of a layer can be dropped separately.
        windows: sliding window of each layer in positions, or None; empty if no layer has one.
        kv_sizes: KV heads, and head_dim of keys and of values, per layer; empty if unknown.
        sources: per layer, the one that it reads instead of keeping something itself, or None; empty if none does.
        shows_queries: whether a component may see the queries of attention, and choose what they read.
        turns_keys: whether stored keys can be turned to other places.
        context: most positions that the model was trained on; None if unknown.
        by_distance: whether scores depend on how far apart slots are, so that none may be left out between others.
        keeps_threads: why a forward can spare no thread (`shoal.model.runner.Meanwhile`); empty if it can.
        tokenizer: the model's tokenizer, if it has one.
        draft_engine: makes the engine of another model, given its folder, its Hub id or the loaded model. It must have
            the same tokens unless `same=False`. None if there is no engine.
        tensors: reads a safetensors file by its path: tensors by name, on the model's device; ValueError for a file
            that cannot be read. For methods with trained tensors.
        fingerprint: identifies the model; it may read files, so call it only where it matters.
        free: whether a method may decide by measured times; False if several processes must decide alike.
        memory: what methods have learned about the model on this machine; the engine keeps it between requests.
        changes: how this model was made from another one, in words; exact means equal to this model.
        masked: for a masked-diffusion model; None for one that writes from left to right.
        mtp: makes the layer for further tokens in the model's files ready to run (`shoal.speculative.layer_head`); it
            returns None where they have none.
        beside: files in the folder of the model's own that may be drafters for it.
        drafter: makes the drafter of another tool in a folder ready to run (`shoal.speculative.layer_head`); ValueError
            for one that cannot be read, Unsupported for one that does not fit the model or its memory.
    """

    num_layers: int
    max_new_tokens: int = 256
    head_layers: float = 0.0
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    order: str | tuple[int, ...] | None = None
    bears: float | None = None
    skips: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    can_split: bool = False
    windows: tuple[int | None, ...] = ()
    kv_sizes: tuple[tuple[int, int, int], ...] = ()
    sources: tuple[int | None, ...] = ()
    shows_queries: bool = True
    by_distance: bool = False
    turns_keys: bool = False
    context: int | None = None
    keeps_threads: str = ""
    tokenizer: Any = None
    draft_engine: Callable[..., Any] | None = None
    tensors: Callable[[str], Mapping[str, Any]] | None = None
    fingerprint: Callable[[], str] | None = None
    free: bool = True
    memory: dict[Any, Any] = field(default_factory=dict)
    changes: str = ""
    masked: MaskedModel | None = None
    mtp: Callable[[], Any] = lambda: None
    beside: Callable[[], Sequence[Path]] = tuple
    drafter: Callable[[str], Any] = lambda folder: None

    @property
    def core_head(self) -> int:
        """How many layers at the head schedules never drop: those up to the last one that another layer reads."""
        return 1 + max((source for source in self.sources if source is not None), default=-1)

    @property
    def attends(self) -> tuple[bool, ...]:
        """Of each layer, whether it has attention; the others are recurrent. Empty if unknown."""
        return tuple(heads > 0 for heads, *_ in self.kv_sizes)


def finite_logprob(value: float) -> float:
    """A log-probability for JSON, which has no infinity: at least -9999, as from OpenAI's servers."""
    return max(value, -9999.0)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token (nats), and of the best alternatives, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted token of one sequence.

    `text` is the text that became certain with this token. It is empty while a character is unfinished or a possible
    stop string is held back. `depth` counts the decoder layers that computed the token.
    """

    seq: int
    index: int
    token: int
    text: str
    depth: float
    from_draft: bool = False
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None

    @property
    def row(self) -> int:
        """The older name of `seq`."""
        return self.seq


@dataclass(frozen=True, slots=True)
class Stats:
    """What a generation cost. Token and layer counts are of one sequence; seconds are of the whole call.

    Attributes:
        mean_layers: decoder layers per generated token, as run; token 0, from the prefill, counts L.
        layer_tokens: sum of the layers run, over the generated tokens; token 0 counts L.
        layers_read: layers that all forwards ran, however many tokens each had, drafting with the model's own layers
            included, the prefill as one token at L. A small batch waits for reading their weights.
        ideal_speedup: `(L + e) new_tokens / (layers_read + e heads)`, where e is the LM head's cost in layers and heads
            how often it was read; `(L + e) / (mean_layers + e)` without drafts. A second model is not counted.
        target_forwards: forwards of the model, prefill included.
        draft_forwards: forwards of the drafter; draft_layer_tokens: layer-tokens of the model's own layers in them.
        drafted, accepted: drafted tokens, and how many of them were accepted.
        acceptance: share of the drafts accepted at each distance from the last certain token, nearest first.
        tokens_per_forward: generated tokens, corrections and bonus included, per forward after the prefill.
        horizon: number of tokens over which the depth schedule was laid out.
        tokens_per_second: decode only: (new_tokens - 1) / decode_seconds.
        kv_bytes_saved: bytes not stored, compared with every layer storing every position.
        extras: counts of single methods, by name; 0 for all others. For answers by two models or with a judge:
            `second_tokens`, `second_layer_tokens`, `switches`, `judge_calls`, `put_tokens`; for searches `branches` and
            `thrown_away`, decoded tokens that are not in the answer. See `shoal.decode.ledger.SequenceLedger`. For
            models whose last layers keep nothing `skipped_layer_tokens`, which the prompt did not need.
        records: what single methods note of forwards, by name, such as `draft_rounds` of `mirror_sd`.
    """

    prompt_tokens: int
    new_tokens: int
    num_layers: int
    mean_layers: float
    layer_tokens: float
    layers_read: float
    ideal_speedup: float
    target_forwards: int
    draft_forwards: int
    draft_layer_tokens: float
    drafted: int
    accepted: int
    acceptance: tuple[float, ...]
    tokens_per_forward: float
    horizon: int
    seconds: float
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float
    tokens_per_second: float
    kv_bytes_allocated: int
    kv_bytes_used: int
    kv_bytes_saved: int
    extras: Mapping[str, float] = field(default_factory=dict)
    records: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def extra(self) -> dict[str, int]:
        """The counts, where not 0, that only searches and answers of two models have."""
        names = ("branches", "thrown_away", "switches", "second_tokens")
        return {name: int(count) for name in names if (count := self.extras.get(name, 0))}

    def to_dict(self) -> dict[str, Any]:
        """All figures for JSON; extras and records stand beside the others."""
        found = asdict(self)
        extras, records = found.pop("extras"), found.pop("records")
        return {**found, **extras, **records}


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one sequence: the generated ids, a final EOS included, and the text, without a stop string.

    `changes` says how the model was made from another one; exact means equal to this model. `alternatives` are other
    answers that the method has found, best first. `sampling` and `seed` make a draw repeatable.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    depths: tuple[float, ...]
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    changes: str = ""
    alternatives: tuple[Alternative, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
