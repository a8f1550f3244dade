"""Finds the parts of a Hugging Face decoder by watching one forward pass of its own.

Hooks record which modules run before, between and after the decoder layers, and what each layer is given. The parts are
read off that recording, so no table of architectures is needed. The hooks are always removed when the probe returns.
What the probe concludes is a hypothesis: `check_parity` compares logits before the runner is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal import compat
from shoal.errors import Unsupported
from shoal.model.kv.form import KVSizes
from shoal.model.own_inputs import AltUp, OwnInputs, SideBySide, altup, joined, own_inputs
from shoal.model.state import modules
from shoal.model.state.modules import ModuleState

_MASKS = ("attention_mask", "causal_mask")
_FAILS = "transformers itself cannot run it as configured, and says"
_REMEDY = "Use a decoder-only model whose layers run one after another, or report this model"


@dataclass(frozen=True)
class Head:
    """The functions from the last layer's output to logits.

    Attributes:
        chain: functions in order: norms, perhaps a factor, then the LM head's module.
        finish: what follows the LM head: identity, a factor or a soft cap.
    """

    chain: Sequence[Callable[[Tensor], Tensor]]
    finish: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] to logits [N, V]."""
        return self.finish(through(self.chain, hidden))

    def cut(self, ids: Sequence[int]) -> Head:
        """The head for the tokens `ids` alone; copies their rows, unless they are all."""
        full = self.chain[-1]
        if type(full) is not nn.Linear:
            raise Unsupported(f"cutting a head that is a {type(full).__name__}", "it is no plain matrix",
                              "Use a model whose LM head is one linear map")
        if ids == range(full.out_features):
            return self
        part = nn.Linear(full.in_features, len(ids), full.bias is not None, device="meta")
        index = torch.tensor(ids, device=full.weight.device)
        part.weight = nn.Parameter(full.weight.detach()[index], requires_grad=False)
        if full.bias is not None:
            part.bias = nn.Parameter(full.bias.detach()[index], requires_grad=False)
        return Head([*self.chain[:-1], part], self.finish)


def through(chain: Sequence[Callable[[Tensor], Tensor]], value: Tensor) -> Tensor:
    """Apply the functions of `chain` in order."""
    for step in chain:
        value = step(value)
    return value


@dataclass(slots=True)
class Call:
    """One call of a module: its arguments by name and what it returned."""

    module: nn.Module
    arguments: dict[str, Any]
    output: Any = None


@dataclass(slots=True)
class Recording:
    """One forward of the model: calls before the layers, of the layers, and after them, and the logits."""

    before: list[Call] = field(default_factory=list)
    layers: list[Call] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How the model calls one layer: names of the arguments that the engine supplies, and the constant ones.

    `embedded` names the input of the first layer, which Zamba gives to all of them, `own` an input of the layer's own,
    and `shared` what holds the keys and values of layers that later ones read.
    """

    mask: str
    cache: str | None
    positions: str | None
    cache_position: str | None
    rotary: str | None
    rotary_call: int
    embedded: str | None
    own: str | None
    shared: str | None
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """A decoder taken apart.

    Attributes:
        layers: the decoder layers.
        calls: how each layer is called.
        embed: maps token ids [R, m] and positions [R, m] to hidden states [R, m, D].
        rotary: one function per distinct call of a rotary module: hidden states and positions to its tables.
        head: maps hidden states [N, D] of the last layer to logits [N, V].
        head_module: the module whose weights the head reads.
        position_bytes: bytes of one position in the model's own KV cache, per layer.
        kv_sizes: heads, and head_dim of keys and of values, per layer; zeros without attention.
        states: the state before the first token, per recurrent layer.
        state_bytes: bytes of a sequence's state, per recurrent layer.
        inputs: makes inputs of layers' own, or None.
    """

    layers: list[nn.Module]
    calls: list[LayerCall]
    embed: Callable[[Tensor, Tensor], Tensor]
    rotary: list[Callable[[Tensor, Tensor], Any]]
    head: Head
    head_module: nn.Module
    position_bytes: tuple[int, ...]
    kv_sizes: tuple[KVSizes, ...]
    states: dict[int, ModuleState]
    state_bytes: dict[int, int]
    inputs: OwnInputs | None = None


def find_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """The module list with `num_layers` entries; if the decoder has several, the outermost."""
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)() or model
    for module in (*decoder.modules(), *model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise Unsupported(f"a model without a list of {num_layers} decoder layers", "there is nothing to skip", _REMEDY)


@torch.no_grad()
def take_apart(model: Any, layers: list[nn.Module], ids: Tensor) -> Parts:
    """Probe `model` with the token ids [1, T] and return its parts."""
    head_module = model.get_output_embeddings()
    if head_module is None:
        raise Unsupported(f"{type(model).__name__} has no LM head", "it is no causal language model", _REMEDY)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    recording = _record(model, layers, ids, positions)
    if len(recording.layers) != len(layers):
        raise Unsupported(f"a model that runs {len(recording.layers)} of its {len(layers)} layers in a forward",
                          "Shoal must run each of them once, in order", _REMEDY)
    rotary: dict[int, Call] = {}
    first = next(iter(recording.layers[0].arguments.values()))
    decoder = getattr(model, "get_decoder", lambda: model)() or model
    inputs, updates = own_inputs(decoder), altup(decoder)
    base = joined(first) if updates is not None else first
    made = None if inputs is None else inputs(ids, base)
    calls = [_layer_call(call, positions, first, recording.before, rotary, None if made is None else made[:, :, number])
             for number, call in enumerate(recording.layers)]
    stores = _stores(recording, calls)
    if updates is None:
        embed, head = _embedding(model, recording, ids, positions), _head(recording, head_module, model.config)
    else:
        layers = [SideBySide(layer, updates.states) for layer in layers]
        embed, head = _around(model, updates, recording, head_module)
    recurrent = {number: store for number, store in enumerate(stores) if modules.has_state(store)}
    return Parts(
        layers, calls, embed, list(map(_replay_rotary, rotary.values())), head, head_module,
        tuple(map(_position_bytes, stores)), tuple(map(_kv_sizes, stores)),
        states={number: modules.empty(store) for number, store in recurrent.items()},
        state_bytes={number: modules.bytes_of(store) for number, store in recurrent.items()}, inputs=inputs,
    )


def _around(
    model: Any, updates: AltUp, recording: Recording, head_module: nn.Module
) -> tuple[Callable[[Tensor, Tensor], Tensor], Head]:
    """The embedding and the head of a decoder with alternating updates."""
    embed, norm = model.get_input_embeddings(), model.get_decoder().norm
    raw = next(call.output for call in recording.after if call.module is head_module)
    finish = _explain(raw, recording.logits, model.config)
    if finish is None:
        raise Unsupported("a model that changes its logits after the LM head", "the probe does not recognise how",
                          _REMEDY)
    return lambda ids, _: updates.spread(embed(ids)), Head([updates.ended, norm, head_module], finish)


def _stores(recording: Recording, calls: list[LayerCall]) -> list[Any]:
    """The layers of the model's own cache."""
    pairs = zip(recording.layers, calls, strict=True)
    found = (call.arguments[names.cache] for call, names in pairs if names.cache is not None)
    cache: Any = next(found, None)
    cache = getattr(cache, "self_attention_cache", cache)
    if not hasattr(cache, "layers"):
        raise _no_cache(recording.layers[0])
    stores = modules.layers_of(cache, len(calls))
    for call, names, store in zip(recording.layers, calls, stores, strict=True):
        if names.cache is None and (_has_kv(store) or modules.has_state(store)):
            raise _no_cache(call)
    return stores


def _no_cache(call: Call) -> Unsupported:
    what = f"{type(call.module).__name__} is given no KV cache"
    return Unsupported(what, "Shoal keeps the KV in its own", _REMEDY)


def _has_kv(store: Any) -> bool:
    return getattr(store, "keys", None) is not None


def _kv_sizes(store: Any) -> KVSizes:
    return (store.keys.shape[1], store.keys.shape[3], store.values.shape[3]) if _has_kv(store) else (0, 0, 0)


def _position_bytes(store: Any) -> int:
    """Bytes of one position of a layer's keys and values [1, heads, positions, head_dim]."""
    return sum(t.shape[1] * t.shape[3] * t.element_size() for t in (store.keys, store.values)) if _has_kv(store) else 0


def _record(model: Any, layers: list[nn.Module], ids: Tensor, positions: Tensor) -> Recording:
    recording = Recording()
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = positions
    with _recording_hooks(model, layers, recording), in_transformers(model.config):
        recording.logits = model(**arguments).logits
    return recording


@contextmanager
def in_transformers(config: Any, why: str = _FAILS) -> Iterator[None]:
    """Turn whatever transformers' code raises inside into one line that names the model type.

    Raises:
        Unsupported: something was raised, other than for lack of memory or of a file.
    """
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError, Unsupported):
        raise
    except Exception as error:
        if "memory" in str(error):  # torch raises RuntimeError when a CPU runs out of memory
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "Correct its config or its dtype, or install what transformers asks for"
        raise Unsupported(f"model type {config.model_type!r}", f"{why} {said}", remedy) from error


@contextmanager
def _recording_hooks(model: nn.Module, layers: list[nn.Module], recording: Recording) -> Iterator[None]:
    """Record the calls of the layers, and of all modules that are neither inside a layer nor contain the layers."""
    inside = {id(child) for layer in layers for child in layer.modules()}
    around = {id(module) for module in model.modules() if any(child is layers[0] for child in module.modules())}
    own = {id(layer) for layer in layers}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        bucket = recording.layers if id(module) in own else recording.after if recording.layers else recording.before
        bucket.append(Call(module, _bind(module, args, kwargs)))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for call in reversed(recording.before + recording.layers + recording.after):
            if call.module is module and call.output is None:
                call.output = output
                return

    with ExitStack() as hooks:
        for module in model.modules():
            if id(module) in own or id(module) not in inside | around:
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _bind(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by parameter name, including those in `**kwargs`."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        kind = inspect.signature(module.forward).parameters[name].kind
        flat.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return flat


def _layer_call(
    call: Call, positions: Tensor, first: Tensor, before: list[Call], rotary: dict[int, Call], own: Tensor | None
) -> LayerCall:
    """Read off a layer's call which arguments the engine has to supply.

    Args:
        first: the input of the first layer.
        rotary: distinct rotary calls are added to it, by `id`.
        own: the layer's own input, or None.
    """
    found: dict[str, str] = {}
    constants: dict[str, Any] = {}
    rotary_call = -1
    for name, value in list(call.arguments.items())[1:]:
        source = _source(value, before)
        if name in _MASKS:
            found["mask"] = "causal_mask" if "causal_mask" in call.arguments else name  # the other is for padding
        elif compat.is_cache(value):
            found["cache"] = name
        elif name == "cache_position":
            found["cache_position"] = name
        elif _holds(value, positions):
            found["positions"] = name
        elif source is not None:
            found["rotary"] = name
            rotary[id(source)] = source
            rotary_call = list(rotary).index(id(source))
        elif isinstance(value, Tensor) and torch.equal(value, first):
            found["embedded"] = name
        elif isinstance(value, Tensor) and own is not None and value.shape == own.shape and torch.equal(value, own):
            found["own"] = name
        elif name == "shared_kv_states":
            found["shared"] = name
        elif isinstance(value, Tensor):
            what = f"{type(call.module).__name__} is given a tensor {name!r}"
            raise Unsupported(what, "Shoal does not know what it means", _REMEDY)
        else:
            constants[name] = value
    return LayerCall(mask=found.get("mask", "attention_mask"), cache=found.get("cache"),
                     positions=found.get("positions"), cache_position=found.get("cache_position"),
                     rotary=found.get("rotary"), rotary_call=rotary_call, embedded=found.get("embedded"),
                     own=found.get("own"), shared=found.get("shared"),
                     constants=constants)


def _source(value: Any, before: list[Call]) -> Call | None:
    """The recorded call that returned `value`, such as the (cos, sin) pair of a rotary module."""
    if value is None or isinstance(value, bool | int | float | str):
        return None
    return next((call for call in before if call.output is value or _views_of(value, call.output)), None)


def _views_of(value: Any, output: Any) -> bool:
    """Whether a pair of tensors is another one's, whole, as slices make it."""
    if not (isinstance(value, tuple) and isinstance(output, tuple) and 0 < len(value) == len(output)):
        return False
    pairs = zip(value, output, strict=True)
    return all(isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
               and one.data_ptr() == other.data_ptr() for one, other in pairs)


def _replay_rotary(call: Call) -> Callable[[Tensor, Tensor], Any]:
    """A function that repeats a rotary module's call with new hidden states and positions."""
    floats = [n for n, v in call.arguments.items() if isinstance(v, Tensor) and v.is_floating_point()]
    integers = [n for n, v in call.arguments.items() if isinstance(v, Tensor) and not v.is_floating_point()]
    others = {n: v for n, v in call.arguments.items() if not isinstance(v, Tensor)}

    def replay(hidden: Tensor, positions: Tensor) -> Any:
        return call.module(**others, **dict.fromkeys(floats, hidden), **dict.fromkeys(integers, positions))

    return replay


def _embedding(model: Any, recording: Recording, ids: Tensor, positions: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The function from token ids to the first layer's input: embedding, perhaps scaled or plus learned positions."""
    embed = model.get_input_embeddings()
    goal = next(iter(recording.layers[0].arguments.values()))
    maps = [call for call in recording.before if isinstance(call.module, nn.Linear)]
    chain = [embed, *(call.module for call in maps if call.output.shape == goal.shape)]  # to the width of the layers
    base = through(chain, ids)
    if base.shape == goal.shape:
        for table in _position_tables(recording.before, positions, goal):
            if _fits(base, table, positions, goal):
                return lambda t, p: through(chain, t) + table(p)
        change = _explain(base, goal, model.config)
        if change is not None:
            return lambda t, p: change(through(chain, t))
    raise Unsupported(f"{type(model).__name__} prepares its embeddings in a way that the probe does not recognise",
                      "Shoal must be able to feed the first layer itself", _REMEDY)


def _fits(base: Tensor, table: Callable[[Tensor], Tensor], positions: Tensor, goal: Tensor) -> bool:
    """Whether adding the table gives the first layer's input; a call that fails does not."""
    try:
        return _same(base + table(positions), goal)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False


def _position_tables(before: list[Call], positions: Tensor, goal: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """The recorded embeddings of positions, as functions of positions [R, m]."""
    for call in before:
        places = [name for name, value in call.arguments.items() if _holds(value, positions)]
        if places and isinstance(call.output, Tensor) and call.output.shape[-1] == goal.shape[-1]:
            yield _replay_table(call, places)


def _replay_table(call: Call, places: list[str]) -> Callable[[Tensor], Tensor]:
    """A function that repeats the call with other positions; other tensors, such as a mask, are left out."""
    others = {n: None if isinstance(v, Tensor) else v for n, v in call.arguments.items() if n not in places}
    name = "position_ids" if "position_ids" in places else places[0]
    return lambda positions: call.module(**others, **{name: positions})


def _holds(value: Any, positions: Tensor) -> bool:
    """Whether `value` is a tensor equal to the positions."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.numel() != positions.numel():
        return False
    return torch.equal(value.reshape(-1), positions.reshape(-1))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b.to(a.dtype), rtol=1e-6 if a.dtype == torch.float64 else 1e-5, atol=1e-6)


def _explain(before: Tensor, after: Tensor, config: Any) -> Callable[[Tensor], Tensor] | None:
    """The simple function from `before` to `after`: identity, or a factor or soft cap with a number of the config."""
    if torch.equal(before, after.to(before.dtype)) or torch.equal(before.to(after.dtype), after):
        return lambda x: x
    changes = [change for number in _numbers(config) for change in _changes(number)]
    exact = (change for change in changes if torch.equal(change(before), after.to(before.dtype)))
    close = (change for change in changes if _same(change(before), after))
    return next(exact, None) or next(close, None)


def _numbers(config: Any) -> list[float]:
    """The distinct positive numbers in a model's config."""
    text = config.get_text_config().to_dict()
    numbers = (float(v) for v in text.values() if isinstance(v, int | float) and not isinstance(v, bool))
    return [v for v in dict.fromkeys(numbers) if v > 0]


def _changes(number: float) -> list[Callable[[Tensor], Tensor]]:
    def by_root(x: Tensor) -> Tensor:
        return x * torch.tensor(number**0.5, dtype=x.dtype, device=x.device)

    return [lambda x: x * number, lambda x: x / number, by_root, lambda x: torch.tanh(x / number) * number]


def _head(recording: Recording, head_module: nn.Module, config: Any) -> Head:
    chain = _chain_to(recording, head_module, config)
    raw = next(call.output for call in recording.after if call.module is head_module)
    finish = _explain(raw, recording.logits, config)
    if finish is None:
        what = "a model that changes its logits after the LM head"
        raise Unsupported(what, "the probe does not recognise how", _REMEDY)
    return Head(chain, finish)


def _chain_to(recording: Recording, head_module: nn.Module, config: Any) -> Sequence[Callable[[Tensor], Tensor]]:
    """The functions from the last layer's output to the LM head's: modules in call order, perhaps a factor."""
    modules = [call.module for call in recording.after]
    if head_module not in modules:
        raise Unsupported("a model whose LM head does not run in its forward", "its logits cannot be rebuilt", _REMEDY)
    last = modules.index(head_module)
    left, read = recording.after[last - 1].output, next(iter(recording.after[last].arguments.values()))
    read = read[0] if isinstance(read, tuple) else read  # tensor parallelism wraps the module
    if not last or not isinstance(left, Tensor) or left.shape != read.shape or torch.equal(left, read):
        return modules[: last + 1]
    change = _explain(left, read, config)
    if change is None:
        what = "a model that changes its hidden states before the LM head"
        raise Unsupported(what, "the probe does not recognise how", _REMEDY)
    return [*modules[:last], change, head_module]
