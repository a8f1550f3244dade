"""Checks, once when a model is loaded, that a runner computes what the model itself computes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal import compat
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.probe import in_transformers
from shoal.model.runner import ModelRunner, SequenceChunk

if TYPE_CHECKING:
    from shoal.model.hf import HFRunner

log = logging.getLogger(__name__)

_LENGTH = 9
_CHUNKS = (5, 1, 3)
_NEW = 4
_REMEDY = "Use model.generate for this architecture, or report it"

OWN_MODULES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Tolerances. Half-precision logits depend on the shape of a forward; a wrong mask or position is off by far more."""
OTHER_ARITHMETIC = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Tolerances of a runner that rounds at other places than the model; the model's norms, say, are at best in float32."""
_NARROWER = 1e-5
"""Tolerance of float64 models, which may compute partly in float32."""
_CHUNKED = 1e-2
"""Tolerance of recurrent layers, whose modules compute prompts in chunks, in float32, where long decays lose digits."""
_TIMES_ITSELF = 10
_KEEPING, _STATES = ("recurrent_gemma",), ("recurrent_states", "conv1d_state")
"""Model types whose modules keep states to themselves, and the attributes: they are run without a cache."""


@torch.no_grad()
def check_parity(runner: ModelRunner, model: Any, tolerances: Mapping[torch.dtype, float] = OWN_MODULES) -> float:
    """The largest difference between the runner's full-depth logits and the model's own, over the largest logit.

    The runner gets a random prompt and its continuation in chunks, then again together with a shorter sequence and with
    a tree at the end. The model also generates with its own cache, as `generate` does. That must agree with its forward
    without a cache; the difference shows how much the model rounds.

    Args:
        tolerances: largest relative difference by dtype; more is allowed if the model differs as much from itself.

    Raises:
        Unsupported: the difference is too large, a layer cannot be run this way, or transformers cannot run the model,
            or computes other logits with its cache than without.
    """
    name, tolerance = f"{type(model).__name__} run layer by layer", tolerances[runner.dtype]
    with in_transformers(model.config), _states_kept(model):
        tokens, generated = _generated(runner, model)
        expected = model(input_ids=torch.tensor([tokens], device=runner.device), use_cache=False).logits[0]
    by_tokens = runner.routes and runner.dtype.itemsize == 2
    error_of = typical_error if by_tokens else relative_error
    own = error_of(generated, expected[-len(generated) :])
    narrow = _CHUNKED if runner.state_bytes else _NARROWER if runner.dtype == torch.float64 else 0.0
    most = max(tolerance, narrow)
    if not own <= most:
        what = f"with its cache transformers computes other logits than without, by {own:.1e} of the largest logit"
        raise Unsupported(name, what, "Use model.generate for this architecture, and report it to transformers")
    logits = torch.cat(_run(runner, tokens, name))
    error = error_of(logits, torch.cat([expected, expected, expected[:4]]))
    if tolerance < error <= most:
        own = max(own, error_of(_generated(runner, model, tokens)[1], expected))
    allowed = max(tolerance, min(_TIMES_ITSELF * own, most))
    if not error <= allowed:
        what = f"its logits differ from the model's own by {error:.1e} of the largest logit, allowed are {allowed:.0e}"
        raise Unsupported(name, f"{what}; the model differs from itself by {own:.0e}", _REMEDY)
    return error


@contextmanager
def _states_kept(model: Any) -> Iterator[None]:
    """Leave modules that keep states to themselves, even without a cache, as they were."""
    modules = model.modules() if model.config.model_type in _KEEPING else ()
    held = [(module, name, value) for module in modules for name, value in vars(module).items() if name in _STATES]
    yield
    for module, name, value in held:
        setattr(module, name, value)


def _generated(runner: ModelRunner, model: Any, given: list[int] | None = None) -> tuple[list[int], Tensor]:
    """Tokens, and the logits [N, V] of the last N of them, computed one by one by the model with its own cache.

    The tokens are `given`, or a random prompt and its greedy continuation.
    """
    generator, cached = torch.Generator().manual_seed(0), model.config.model_type not in _KEEPING
    prompt = torch.randint(0, runner.vocab_size, (_LENGTH - _NEW + 1,), generator=generator).tolist()
    given = given or []
    ahead, kept = given[:1] or prompt, dict[str, Any]()
    forward = model.forward if isinstance(model, torch.nn.Module) else model
    placed = "position_ids" in inspect.signature(forward).parameters  # some models do not count them themselves
    tokens: list[int] = []
    seqs: list[Tensor] = []
    while len(tokens) < _LENGTH:
        tokens += ahead
        if placed and cached:
            places = range(len(tokens) - len(ahead), len(tokens))
            kept["position_ids"] = torch.tensor([[*places]], device=runner.device)
        fed = ahead if cached else tokens
        out = model(input_ids=torch.tensor([fed], device=runner.device), use_cache=cached, **kept)
        seqs.append(out.logits[0, -1])
        ahead = given[len(tokens) : len(tokens) + 1] or [int(seqs[-1].argmax())]
        kept = {name: value for name, value in out.items() if compat.is_cache(value)}  # its argument has the same name
    return tokens, torch.stack(seqs)


def settle_layout(runner: HFRunner, model: Any) -> float:
    """Check parity of a model's own modules in several ways to lay out their inputs; the first to pass is kept.

    Sequences are prepacked, padded, or each alone. Recurrent modules that lose their state where several tokens follow
    are given these one by one.
    """
    ways = [(prepacks, alone, singly) for singly in ((False, True) if runner.state_bytes else (False,))
            for prepacks, alone in ((True, False), (False, False), (False, True)) if runner.prepacks or not prepacks]
    for way in ways:
        runner.prepacks, runner.alone, runner.singly = way
        try:
            return check_parity(runner, model)
        except Unsupported as reason:
            if way == ways[-1]:
                raise
            log.info("the next way to lay out sequences is tried: %s", reason)
    raise AssertionError("the last way returns or raises")


def _run(runner: ModelRunner, tokens: list[int], name: str) -> list[Tensor]:
    """The logits of the runner; refuses an architecture that fails when run this way."""
    try:
        return [chunked_logits(runner, tokens, _CHUNKS), ragged_logits(runner, tokens)]
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(name, f"a layer raises {error!r}", _REMEDY) from error


def chunked_logits(runner: ModelRunner, tokens: list[int], chunks: tuple[int, ...]) -> Tensor:
    """Logits [T, V] of `tokens`, run at full depth in pieces of the given sizes."""
    cache = runner.new_cache(1)
    pieces, start = [], 0
    for size in chunks:
        pieces.append(runner.forward([_chain(runner, 0, tokens[start : start + size])], cache))
        cache.commit(0, range(size))
        start += size
    return torch.cat(pieces)


def ragged_logits(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """Logits [13, V]: of 9 tokens, the last of them in a tree, and of their first 4 in a shorter second sequence."""
    cache = runner.new_cache(2)
    wrong, plan = (tokens[7] + 1) % runner.vocab_size, DepthPlan.full(runner.num_layers)
    tree = SequenceChunk(0, [tokens[6], wrong, *tokens[7:9]], [0] * 4, plan, (-1, 0, 0, 2), (0, 1, 1, 2), wanted=4)
    long = [_chain(runner, 0, tokens[:5]), _chain(runner, 0, tokens[5:6]), tree]
    short = [_chain(runner, 1, tokens[a:b]) for a, b in ((0, 1), (1, 3), (3, 4))]  # the second is longer than 0's
    pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
    for chunks in zip(long, short, strict=True):
        for chunk, logits in zip(chunks, runner.forward(chunks, cache).split([f.wanted for f in chunks]), strict=True):
            pieces[chunk.seq].append(logits)
            cache.commit(chunk.seq, range(chunk.wanted))
    first, second = map(torch.cat, pieces)
    return torch.cat([first[:7], first[8:], second])


def _chain(runner: ModelRunner, seq: int, tokens: list[int]) -> SequenceChunk:
    return SequenceChunk(seq, tokens, [0] * len(tokens), DepthPlan.full(runner.num_layers), wanted=len(tokens))


def typical_error(actual: Tensor, expected: Tensor) -> float:
    """The median over tokens of the largest difference, relative to the largest expected magnitude of all.

    In half types a token near the boundary of two experts may go to another one than in the model, far from it then.
    """
    differences = (actual.double() - expected.double()).abs().amax(-1)
    return float(differences.median() / expected.double().abs().max().clamp_min(1e-30))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected magnitude."""
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))
