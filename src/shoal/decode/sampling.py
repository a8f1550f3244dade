"""From one node's logits to one token: scores, probabilities, draw.

Everything here is a pure function. *Scores* are logits after bias, penalties, logits processors and the mask of a
constraint: greedy decoding and log-probabilities read them. The *probs* are what temperature and truncation make of
the scores: probabilities [V] that sampling and the acceptance rules read. Uniform numbers are keyed by what they are
for, so neither batch-mates nor block splits change a sample. Knows nothing about sequences, trees or stopping.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.model.runner import greedy as greedy
from shoal.types import Sampling, TokenLogprob

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""As in transformers: `(input_ids [1, T], scores [1, V]) -> scores [1, V]`."""
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
IMPOSSIBLE = "no token has a positive probability: the scores hold NaN, or every token was banned"
_BLOCK = 128
"""Block size of a draw: it sums blocks of this many tokens first, then searches within one block."""
_COLDEST = 1e-30  # a lower temperature gives the same distribution, but overflows float32


class NotYet(Exception):
    """The mask depends on an answer from outside, a future that is not done yet; ask the mask again once it is."""

    def __init__(self, mask: Allowed, answer: Future[Any]) -> None:
        super().__init__("somebody else is asked which tokens may follow, and has not answered yet")
        self.mask, self.answer = mask, answer


class Allowed(ABC):
    """The mask of a constraint: which tokens may follow those that a sequence has generated."""

    @abstractmethod
    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Bool [V] on the CPU, at least one of them true."""

    def awaited(self, tokens: Sequence[int]) -> Future[Any] | None:
        """An answer from outside that must come before anything can follow `tokens`; None if all is known."""
        return None

    def lets(self, tokens: Sequence[int], token: int) -> bool:
        """Whether `token` may follow. A mask with a quicker way than the whole mask overrides this."""
        return bool(self(tokens)[token])

    def sole(self, tokens: Sequence[int]) -> int | None:
        """The only token that may follow; None if there are more, or if finding out is expensive."""
        mask = self(tokens).numpy()
        return int(mask.argmax()) if np.count_nonzero(mask) == 1 else None


def uniform(seed: int, seq: int, index: int, purpose: str) -> float:
    """A uniform number in [0, 1) of 53 bits that depends on its arguments alone.

    The key goes word by word through the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014), so that machine, process and order of calls play no part.

    Args:
        seed: the request's seed, taken modulo 2**64.
        seq: index of the sequence in its request.
        index: index of the emitted token that the number decides about.
        purpose: short name such as "sample", "accept" or "draft"; different names give independent numbers.
    """
    state = 0
    for chunk in (seed, seq, index, *_chunks(purpose)):
        state = _mix(state ^ (chunk & _WORD))
    return float((state >> 11) * 2.0**-53)


def _mix(chunk: int) -> int:
    chunk = (chunk + _GOLDEN) & _WORD
    chunk = ((chunk ^ (chunk >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    chunk = ((chunk ^ (chunk >> 27)) * 0x94D049BB133111EB) & _WORD
    return chunk ^ (chunk >> 31)


@lru_cache(maxsize=64)
def _chunks(purpose: str) -> tuple[int, ...]:
    """The name as 64-bit words, its length first so that no name continues another."""
    data = purpose.encode()
    return (len(data), *(int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)))


def needs_history(sampling: Sampling, processors: Sequence[LogitsProcessor] = ()) -> bool:
    """Whether the scores of a node depend on the tokens before it.

    If not, `biased` and `probs_of` treat the nodes [N, V] of a whole batch in one call.
    """
    return bool(processors or sampling.repetition_penalty != 1 or sampling.presence_penalty
                or sampling.frequency_penalty)


def scores(
    logits: Tensor, history: Sequence[int] | Tensor, prompt_len: int, sampling: Sampling,
    processors: Sequence[LogitsProcessor] = (), allowed: Allowed | None = None,
) -> Tensor:
    """Scores [V]: raw logits after bias, penalties, processors and mask, for greedy decoding and log-probabilities.

    The order is logit bias, repetition penalty (over prompt and generated tokens, as in transformers), presence and
    frequency penalty (over generated tokens only, as in vLLM and the OpenAI interface), `processors`, `allowed`.

    Args:
        logits: [V] of one node, never written to; half types are computed in float32. Returned if nothing applies.
        history: ids of every token before the one to be chosen, along the node's own path, prompt first.
        prompt_len: number of leading ids in `history` that belong to the prompt.
        sampling: what to apply.
        processors: further transforms, called in turn with ids [1, T] and scores [1, V].
        allowed: leaves every other token no chance.

    Raises:
        ValueError: if a `logit_bias` names a token outside the vocabulary.
    """
    result = biased(logits, sampling)
    if needs_history(sampling, processors):
        ids = torch.as_tensor(history, dtype=torch.long, device=logits.device)
        result = _penalised(_upcast(result), ids, prompt_len, sampling)
        result = _processed(result, ids, processors) if processors else result
    return result if allowed is None else _masked(result, allowed(list(history[prompt_len:])))


def _masked(result: Tensor, mask: Tensor) -> Tensor:
    """Apply a mask, in numpy on a CPU: torch splits it among threads, which wait for each other on a busy machine."""
    result = _upcast(result)
    if result.device.type != "cpu":
        return result.where(mask.to(result.device), -torch.inf)
    values = result.detach().numpy()
    return torch.from_numpy(np.where(mask.numpy(), values, values.dtype.type(-np.inf)))


def biased(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., V] with `sampling.logit_bias` added, as in `scores`; ValueError for a token that there is not."""
    if not sampling.logit_bias:
        return logits
    wrong = next((token for token in sampling.logit_bias if not 0 <= token < logits.shape[-1]), None)
    if wrong is not None:
        raise ValueError(f"logit_bias names token {wrong}; the model's logits have tokens 0..{logits.shape[-1] - 1}. "
                         "Remove the entry")
    result = _upcast(logits)
    ids = torch.tensor(list(sampling.logit_bias), device=result.device)
    values = torch.tensor(list(sampling.logit_bias.values()), dtype=result.dtype, device=result.device)
    return result.index_add(-1, ids, values.expand(*result.shape[:-1], -1))


def _upcast(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _penalised(result: Tensor, ids: Tensor, prompt_len: int, sampling: Sampling) -> Tensor:
    if (penalty := sampling.repetition_penalty) != 1:
        seen = _counts(ids[-sampling.repetition_window :], result) > 0  # a window of 0 is all tokens
        most = torch.finfo(result.dtype).max * _COLDEST  # beyond it, a temperature would make NaN of it
        turned = torch.where(result < 0, result * penalty, result / penalty).clamp(-most, most)
        result = torch.where(seen & result.isfinite(), turned, result)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = _counts(ids[prompt_len:], result)
        result = result - sampling.frequency_penalty * counts - sampling.presence_penalty * counts.clamp(max=1)
    return result


def _counts(ids: Tensor, like: Tensor) -> Tensor:
    """How often each token [V] occurs; ids beyond the logits (a padded embedding) are not counted."""
    counts = like.new_zeros(like.shape[-1] + 1)
    counts.index_add_(0, ids.clamp(max=like.shape[-1]), torch.ones_like(ids, dtype=like.dtype))
    return counts[:-1]


def _processed(result: Tensor, ids: Tensor, processors: Sequence[LogitsProcessor]) -> Tensor:
    batch = result[None].clone()  # a processor may write in place
    for processor in processors:
        made = processor(ids[None], batch)
        if not isinstance(made, Tensor) or made.shape != batch.shape:
            found = f"a tensor {list(made.shape)}" if isinstance(made, Tensor) else reprlib.repr(made)
            raise ValueError(f"the logits processor {reprlib.repr(processor)} returned {found}; it must be the scores, "
                             f"a tensor {list(batch.shape)}")
        batch = made
    return batch[0]


def probs_of(scores: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., V] after temperature, top-k, top-p, min-p, typical-p, in this order, by transformers' rules.

    Top-k keeps every token that ties with the k-th; top-p keeps the fewest likely tokens that reach `top_p`; min-p
    keeps tokens of at least `min_p` times the largest probability; typical-p keeps the fewest tokens that reach
    `typical_p`, beginning with those whose information is nearest to the entropy. Each keeps at least one token.
    Temperature 0 puts all probability on the first most likely token. float64 scores give float64, others float32.
    """
    result = _upcast(scores)
    if sampling.greedy:
        return torch.zeros_like(result).scatter_(-1, result.argmax(-1)[..., None], 1.0)
    result = _divided(result, max(sampling.temperature, _COLDEST))
    if sampling.top_k:
        least = result.topk(min(sampling.top_k, result.shape[-1])).values[..., -1:]
        result = result.masked_fill(result < least, -torch.inf)
    if sampling.top_p < 1:
        result = _top_p(result, sampling.top_p)
    probs = _softmax(result)
    if sampling.min_p:
        probs = _min_p(result, probs, sampling.min_p)
    return probs if sampling.typical_p == 1 else _typical(probs, sampling.typical_p)


def _divided(values: Tensor, by: float) -> Tensor:
    """In numpy on a CPU: see `_masked`."""
    if values.device.type != "cpu":
        return values / by
    given = values.detach().numpy()
    with np.errstate(over="ignore"):
        return torch.from_numpy(given / given.dtype.type(by))


def _softmax(values: Tensor) -> Tensor:
    """Along the last dimension; in numpy on a CPU: see `_masked`."""
    if values.device.type != "cpu":
        return values.softmax(-1)
    given = values.detach().numpy()
    with np.errstate(invalid="ignore"):  # NaN is reported when a token is chosen
        powers = np.exp(given - given.max(-1, keepdims=True))
        powers /= powers.sum(-1, keepdims=True)
    return torch.from_numpy(powers)


def _top_p(result: Tensor, p: float) -> Tensor:
    ascending = _sorted(result)
    few = ascending.softmax(-1).cumsum(-1) <= 1 - p
    few[..., -1] = False
    count = few.sum(-1, keepdim=True)
    least = ascending.gather(-1, count)
    drop = result < least
    tied = count - (ascending < least).sum(-1, keepdim=True)
    if tied.any():  # the first of equal ones are dropped, as in a stable sort
        equal = result == least
        drop |= equal & (equal.cumsum(-1) <= tied)
    return result.masked_fill(drop, -torch.inf)


def _sorted(values: Tensor) -> Tensor:
    """Ascending along the last dimension; on a CPU by numpy, whose vector instructions are ten times as fast."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    return torch.from_numpy(np.sort(values.detach().numpy(), -1))


def _min_p(result: Tensor, probs: Tensor, p: float) -> Tensor:
    if result.device.type != "cpu":
        return result.masked_fill(probs < p * probs.amax(-1, keepdim=True), -torch.inf).softmax(-1)
    given, shares = result.detach().numpy(), probs.numpy()
    low = shares < p * shares.max(-1, keepdims=True)
    return _softmax(torch.from_numpy(np.where(low, given.dtype.type(-np.inf), given)))


def _typical(probs: Tensor, p: float) -> Tensor:
    """Locally typical sampling (arXiv 2202.00666)."""
    information = -probs.log()
    entropy = (probs * information).nan_to_num(0.0).sum(-1, keepdim=True)
    away = (information - entropy).abs()
    order = away.sort(-1)
    short = probs.gather(-1, order.indices).cumsum(-1) < p
    short[..., -1] = False
    kept = probs.where(away <= order.values.gather(-1, short.sum(-1, keepdim=True)), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def argmax(scores: Tensor) -> int:
    """The token that `greedy` takes of scores [V]; ValueError if no token is possible."""
    token = greedy(scores[None])[0]
    if not scores[token] > -torch.inf:
        raise ValueError(IMPOSSIBLE)
    return token


def draw(probs: Tensor, u: float) -> int:
    """The token at `u` by `draws` from `probs` [V]."""
    return draws(probs[None], [u])[0]


def draws(probs: Tensor, us: Sequence[float]) -> list[int]:
    """Per distribution [N, V] the token at its number in [0, 1), by inverse CDF in float64; never one of probability 0.

    Raises:
        ValueError: if a distribution has no token of positive probability.
    """
    if probs.device.type == "cpu":
        return _draws(probs.detach().numpy(), np.asarray(us, np.float64)[:, None])
    short = -probs.shape[-1] % _BLOCK
    blocks = (pad(probs, (0, short)) if short else probs).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = ends.new_tensor(us)[:, None] * ends[:, -1:]
    block = _first_above(target, ends, sums)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0].double()
    before = ends.gather(1, block) - sums.gather(1, block)
    place = _first_above(target, before + inside.cumsum(-1), inside)
    result: list[list[int]] = torch.cat([block * _BLOCK + place, inside.gather(1, place) > 0], -1).tolist()
    if any(not possible for _, possible in result):
        raise ValueError(IMPOSSIBLE)
    return [token for token, _ in result]


def _draws(probs: Any, us: Any) -> list[int]:
    """The same in numpy: see `_masked`. Probs [N, V], numbers [N, 1]."""
    blocks = np.pad(probs, ((0, 0), (0, -probs.shape[-1] % _BLOCK))).reshape(len(probs), -1, _BLOCK)
    sums, seqs = blocks.sum(-1, dtype=np.float64), np.arange(len(probs))
    ends = sums.cumsum(-1)
    target = us * ends[:, -1:]
    block = _first(target, ends, sums)
    inside = blocks[seqs, block].astype(np.float64)
    place = _first(target, (ends - sums)[seqs, block][:, None] + inside.cumsum(-1), inside)
    if not (inside[seqs, place] > 0).all():
        raise ValueError(IMPOSSIBLE)
    return [int(token) for token in block * _BLOCK + place]


def _first(target: Any, ends: Any, weights: Any) -> Any:
    """`_first_above` in numpy: places [N]."""
    return (((ends > target) | (ends == ends[:, -1:])) & (weights > 0)).argmax(-1)


def _first_above(target: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """The first place [N, 1] of positive weight [N, M] whose end is above the target [N, 1].

    If rounding puts the target at or beyond the last end, the place is the first that reaches that end.
    """
    reached = (ends > target) | (ends == ends[:, -1:])
    return (reached & (weights > 0)).to(torch.int8).argmax(-1, keepdim=True)


def logprob(scores: Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probability (nats) of `token` and of the `top` best possible tokens under scores [V] (`top` 0: none)."""
    logs = _upcast(scores).log_softmax(-1)
    best = logs.topk(min(top, logs.shape[-1]))
    own, *values = torch.cat([logs[token : token + 1], best.values]).tolist()
    found = zip(best.indices.tolist(), values, strict=True)
    return TokenLogprob(token, own, tuple(pair for pair in found if pair[1] > -torch.inf))
