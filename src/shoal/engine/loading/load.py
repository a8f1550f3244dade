"""Loads a model from a folder, the Hub or a GGUF file, or takes one that the caller has loaded."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any, Literal

import torch

from shoal import catalog, compat
from shoal.engine.cards.card import Card, read_card
from shoal.engine.engine import Engine
from shoal.engine.loaded import LoadedModel
from shoal.engine.loading import ranks
from shoal.engine.loading.checkpoint import OF_LAB, Checkpoint
from shoal.engine.loading.device import as_dtype, default_dtype, device_of
from shoal.engine.loading.generation_config import eos_ids, generation_settings, recommended
from shoal.engine.loading.imports import import_activations
from shoal.engine.memory.amounts import naming
from shoal.engine.memory.footprint import weights_on_disk
from shoal.engine.memory.memory_limit import MemoryLimit
from shoal.errors import OutOfMemory, Unsupported
from shoal.model.config import layers_of, masked_of, parallel_token
from shoal.model.encoders.encoder import ENCODERS, encoder_of, encoding, reads_text
from shoal.model.hearing import hearing_of
from shoal.model.hf import HFRunner
from shoal.model.packed import build as packed
from shoal.model.packed.kinds import PLACED
from shoal.model.packed.linear import Quant
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import ModelSource, Source
from shoal.model.parity import OTHER_ARITHMETIC, check_parity, settle_layout
from shoal.model.probe import in_transformers
from shoal.model.runner import ModelRunner
from shoal.model.sambay import OWN_CONFIGS, check_modules
from shoal.model.transform import Transform
from shoal.model.vision import vision_of

Backend = Literal["auto", "hf", "packed"]
BACKENDS = ("auto", "hf", "packed")
_DECODER_REMEDY = "Use a decoder-only causal language model"
_SMALLER = 'Use quant="int8" or "int4", a smaller dtype, or a smaller model'

log = logging.getLogger(__name__)


def load(
    model: Any = None, tokenizer: Any = None, *, dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None, quant: Quant | None = None, backend: Backend = "auto",
    revision: str | None = None, trust_remote_code: bool = False, tensor_parallel: bool = False,
    transform: Transform | None = None, memory: int | str | MemoryLimit | None = None,
) -> Engine:
    """An engine for a decoder-only language model.

    Args:
        model: folder of a model in the Hugging Face format, a `.gguf` file, a name that `catalog.find` or `shoal.hub`
            knows, such as a Hub id, or a loaded transformers model, which is never changed. None is `catalog.DEFAULT`,
            SmolLM2-135M-Instruct.
        tokenizer: a transformers tokenizer, or where to load one from; None takes the model's own.
        dtype: weights and computation; None is bfloat16 where the device computes it natively, else float32.
        device: None is CUDA where there is one, else the CPU.
        quant: weight quantisation, "int8" or "int4"; needs a model that fits the packed backend.
        backend: who runs the layers: "packed" Shoal's own executor for Llama-shaped models, "hf" the model's own
            modules, "auto" the packed one where the model fits. Packing a model that is handed over copies it.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether Python code that comes with a model may run.
        tensor_parallel: whether the processes that torchrun has started share one model, each holding a slice of every
            matrix; all must then make the same calls. Runs the model's own modules.
        transform: changes config and weights between files and memory, such as `shoal.DropLayers`. The engine is that
            of the changed model: what is exact is exact to it.
        memory: the most that the whole process may take, in bytes or as "2GiB": what cannot fit is refused before it
            starts, prompts are decoded fewer at a time, and less is guessed ahead. None for no limit.

    Raises:
        ValueError: there is no such model, or an option is unknown.
        OutOfMemory: the weights alone do not fit into `memory`.
        Unsupported: it is no decoder, or cannot be run as asked.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    compat.tell_untested()
    import_activations()
    packed.check_quant(quant)
    if quant is not None and backend == "hf":
        what = f"quant={quant!r} with backend 'hf'"
        raise Unsupported(what, "it runs the model's own weights", 'Use backend="packed"')
    if model is None or isinstance(model, str | os.PathLike):
        model = catalog.find(None if model is None else os.fspath(model))
    if tensor_parallel:
        _check_shared(model, backend, quant, transform)
    limit = memory if isinstance(memory, MemoryLimit) or memory is None else MemoryLimit(memory)
    if limit is not None and (tensor_parallel or device_of(device).type != "cpu"):
        raise Unsupported("a limit on memory", "it is that of one process on a CPU", "Leave memory out")
    if isinstance(model, str):
        where = device_of(device)
        files = Checkpoint(model, revision, trust_remote_code)
        usual = torch.float32 if files.encodes and where.type == "cpu" else default_dtype(where)
        kind = as_dtype(dtype) if dtype is not None else usual
        if tensor_parallel:
            return _shared(files, tokenizer, kind, where)
        if transform is not None:
            _check_decoder(files.config())
            if files.encodes:
                raise Unsupported("a transform of a model with an encoder", "its files hold two stacks of layers",
                                  "Give a method that runs fewer layers, such as d3")
            files = Checkpoint(model, revision, trust_remote_code, transform)
        if limit is not None and transform is None:
            limit.check_weights(f"the model {model!r}", weights_on_disk(str(files.file or files.place), kind, quant))
        return _limited(_from_files(files, tokenizer, kind, where, quant, backend), limit)
    if transform is not None:
        remedy = "Give its folder, Hub id or GGUF file"
        raise Unsupported("a transform of a loaded model", "it is never changed, and would be held twice", remedy)
    if backend == "hf" and hasattr(model, "config") and reads_text(model.config):
        raise _on_modules(model.config)
    if dtype is not None or device is not None:
        raise ValueError("dtype and device belong to models that Shoal loads itself; a model that you hand over is "
                         "never changed. Convert it before, with model.to(...)")
    return _limited(engine_for(model, tokenizer, quant=quant, backend=backend), limit)


def _limited(engine: Engine, limit: MemoryLimit | None) -> Engine:
    """Set the limit. Under one, no memory is spent on speed alone."""
    engine.limit = limit
    if limit is not None and isinstance(engine.runner, NativeRunner):
        engine.runner.bounds_logits = False
    return engine


def engine_for(
    model: Any, tokenizer: Any = None, *, name: str = "", card: Card | None = None,
    quant: Quant | None = None, backend: Backend = "hf", files: Checkpoint | None = None,
) -> Engine:
    """The engine of a loaded transformers model, which is not changed; packing copies its weights.

    Args:
        card: of the model's layers; None for the one beside its files.
        quant, backend: see `load`.
        files: where it was loaded from, if by Shoal.
    """
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise Unsupported(f"an object of type {type(model).__name__}", "it is no transformers model", _DECODER_REMEDY)
    if model.training:
        raise Unsupported("a model in training mode", "its dropout would change the output", "Call model.eval() before")
    compat.tell_untested()
    _check_decoder(model.config)
    runner: ModelRunner | str = ""
    if reads_text(model.config):
        return _beside_encoder(model, tokenizer, name, quant)
    if backend != "hf":
        embedding = model.get_input_embeddings().weight
        runner = _pack(model.config, ModelSource(model), embedding.dtype, embedding.device, quant, backend, model)
    unpacked = runner if isinstance(runner, str) else ""
    if isinstance(runner, str):
        with in_transformers(model.config, "it cannot be taken apart into layers, which ends in"):
            runner = HFRunner(model)
        settle_layout(runner, model)
    origin = getattr(model.config, "_name_or_path", "")
    if card is None and os.path.isdir(origin):
        card = read_card(origin, runner.num_layers)
    generation = getattr(model, "generation_config", None)
    name = name or origin or type(model).__name__
    made = _engine(runner, tokenizer, model.config, generation, name, card, files, model)
    made.unpacked = unpacked
    return made


def _beside_encoder(model: Any, tokenizer: Any, name: str, quant: Quant | None) -> Engine:
    """The engine of a loaded encoder-decoder, whose decoder is packed whatever the backend; its encoder is used."""
    config, embedding = model.config, model.get_input_embeddings().weight
    runner = _pack(config, ModelSource(model), embedding.dtype, embedding.device, quant, "packed")
    assert isinstance(runner, PackedRunner)
    generation, origin = getattr(model, "generation_config", None), getattr(config, "_name_or_path", "")
    made = _engine(runner, tokenizer, config, generation, name or origin or type(model).__name__, None, None)
    made.encoder = encoding(model.get_encoder(), runner, origin, config, generation)
    return _of_source(made, generation)


def _on_modules(config: Any) -> Unsupported:
    return Unsupported(f"model type {config.model_type!r} on transformers' modules", "Shoal runs its decoder packed",
                       'Use safetensors, and backend="packed"')


def _of_source(engine: Engine, generation: Any) -> Engine:
    """The same engine, of which answers about a text are the likeliest ones unless its files or a request say more."""
    if engine.encoder is None or engine.encoder.text is None:
        return engine
    engine.sampling = {"temperature": 0.0, **engine.sampling}
    beams = getattr(generation, "num_beams", None) or 1
    if beams > 1:
        log.warning("the generation config asks for %d beams (num_beams), which Shoal does not have: it takes the "
                    "likeliest token at each place", beams)
    return engine


def _engine(
    runner: ModelRunner, tokenizer: Any, config: Any, generation: Any, name: str, card: Card | None,
    files: Checkpoint | None, model: Any = None,
) -> Engine:
    """The engine of a runner, with what its config, its generation config and its files say of answers."""
    eos = eos_ids(generation, config, tokenizer, **({} if files is None else files.ends()))
    made = Engine(runner, tokenizer, model_name=name, eos_token_ids=eos, card=card, model=model, open_model=open_extra,
                  generation_rules=generation_settings(generation))
    made.sampling, made.masked = recommended(generation), masked_of(config)
    made.sampling_from = "files" if made.sampling else ""
    made.parallel, made.family = parallel_token(config), str(config.model_type)
    if files is not None:
        made.sampling, made.sampling_from = files.sampling(generation)
        made.changed, made.changes = files.changed, files.changes
        made.mtp, made.form, made.files_beside = files.mtp, files.form, files.files_beside
    return made


def open_extra(home: LoadedModel, model: Any) -> Engine:
    """The engine of a model that works beside that of `home`; see `shoal.engine.loading.companions`."""
    if not isinstance(model, str):
        engine = engine_for(model)
        if engine.runner.device != home.runner.device:
            raise Unsupported(f"a draft model on {engine.runner.device} for a model on {home.runner.device}",
                              "logits of both are compared", "Move the draft model there before, with draft.to(...)")
        return engine
    try:
        return load(model, dtype=home.runner.dtype, device=home.runner.device)
    except OutOfMemory:
        raise
    except (ValueError, OSError) as error:
        raise ValueError(f"the draft model {model!r} cannot be loaded: {error}") from error


def _check_shared(model: Any, backend: Backend, quant: Quant | None, transform: Transform | None) -> None:
    """Refuse what cannot be cut into slices."""
    what, remedy = "tensor parallelism", 'Use backend="hf" without quantisation'
    if quant is not None:
        raise Unsupported(f"{what} with quant={quant!r}", "transformers' plans cut plain weights", remedy)
    if backend == "packed":
        raise Unsupported(f"{what} with backend 'packed'", "packed weights are laid out for one process", remedy)
    if transform is not None:
        raise Unsupported(f"{what} with a transform", "transformers cuts files as they are", "Write the result down")
    if not isinstance(model, str):
        raise Unsupported(f"{what} of a loaded model", "it is cut while it is loaded", "Give its folder or Hub id")
    if model.endswith(".gguf"):
        raise Unsupported(f"{what} of a GGUF file", "transformers' plans cut plain weights", "Use safetensors")


def check_shared(
    model: str | None, size: int, *, quant: Quant | None, backend: Backend, revision: str | None,
    trust_remote_code: bool,
) -> None:
    """Refuse, before processes are started, a model that `size` of them cannot share; arguments as of `load`."""
    model = catalog.find(model)
    _check_shared(model, backend, quant, None)
    _check_cut(Checkpoint(model, revision, trust_remote_code), ranks.Ranks(0, size))


def _check_cut(files: Checkpoint, others: ranks.Ranks) -> None:
    """Refuse a model that cannot be cut into that many slices."""
    config = files.config()
    _check_decoder(config)
    if files.encodes:
        raise Unsupported("tensor parallelism of a model with an encoder", "its decoder is packed for one process",
                          "Use one process")
    check_modules(config, "tensor parallelism", "Use one process")
    ranks.check_model(config, others)


def _shared(files: Checkpoint, tokenizer: Any, dtype: torch.dtype, device: torch.device) -> Engine:
    """The engine of this process's slice of a model."""
    others = ranks.join(device)
    _check_cut(files, others)
    config = files.config()
    tokenizer = files.tokenizer(tokenizer)
    with naming(lambda: (f"a slice of the model {files.name!r} in {dtype}", "Use more processes or a smaller dtype")):
        model = files.model(dtype, **ranks.loading(others)).eval()
    card = read_card(files.place, config.get_text_config().num_hidden_layers, files.revision)
    engine = engine_for(model, tokenizer, name=files.name, card=card, files=files)
    engine.ranks = others
    return engine


def _from_files(
    files: Checkpoint, tokenizer: Any, dtype: torch.dtype, device: torch.device, quant: Quant | None, backend: Backend
) -> Engine:
    config = files.config()
    _check_decoder(config)
    tokenizer = files.tokenizer(tokenizer)
    layers = layers_of(config.get_text_config())
    card = read_card(files.place, layers, files.revision) if files.changed is None else Card()
    source = files.weights() if backend != "hf" else None
    if source is None:
        asked = ("backend 'hf'", 'Use backend="packed"') if backend == "hf" else ("weights", "Convert to safetensors")
        check_modules(config, *asked)
    packing: Backend = "packed" if files.encodes else backend
    runner = "" if source is None else _pack(config, source, dtype, device, quant, packing)
    if not isinstance(runner, str):
        generation = files.generation_config()
        made = _engine(runner, tokenizer, config, generation, files.name, card, files)
        made.encoder = None if source is None else encoder_of(
            config, source, runner, files.place, generation, quant)
        return _of_source(_with_senses(made, config, files), generation)
    if files.encodes:
        raise _on_modules(config)
    with naming(lambda: (f"the model {files.name!r} in {dtype}", _SMALLER)):
        with in_transformers(config):
            model = files.model(dtype)
        model = model.to(device).eval()
    backend = "hf" if source else backend
    engine = engine_for(model, tokenizer, name=files.name, card=card, quant=quant, backend=backend, files=files)
    if not isinstance(engine.runner, HFRunner):
        engine.model = None  # its packed weights are a copy
    engine.unpacked = engine.unpacked or runner
    return _with_senses(engine, config, files)


def _with_senses(engine: Engine, config: Any, files: Checkpoint) -> Engine:
    """Give an engine its model's encoder of pictures or sounds, which is read when the first one comes."""
    tokenizer = engine.tokenizer
    sight, engine.blind = files.sight(lambda: {} if tokenizer is None else tokenizer.get_vocab())
    if engine.blind:
        log.info("reading no pictures: %s", engine.blind)
    check = partial(_check_encoder, engine)
    if sight is not None:
        engine.vision = vision_of(sight.config, sight.source, engine.runner, sight.prepared, check)
    elif (source := files.weights()) is not None:
        engine.vision = vision_of(config, source, engine.runner, files.place, check)
        engine.hearing = hearing_of(config, source, engine.runner, files.place, check)
    return engine


def _check_encoder(engine: Engine, what: str, size: int) -> None:
    if engine.limit is not None:
        engine.limit.check_weights(what, size)


def _pack(
    config: Any, source: Source, dtype: torch.dtype, device: torch.device, quant: Quant | None, backend: Backend,
    reference: Any = None,
) -> ModelRunner | str:
    """The packed runner; if `reference` is a model, it is checked against that.

    A masked-diffusion model's tokens see later ones, which torch computes, so its matrices are packed for torch. Under
    "auto" it is the reason, which is logged, where the model does not fit and needs no quantisation.
    """
    try:
        if backend == "auto" and quant is None:
            packed.worth_packing(config, dtype, device)
        with naming(lambda: (f"packing the model's weights as {quant or dtype}", _SMALLER)):
            runner = packed.build(config, source, dtype, device, quant, kernels=masked_of(config) is None)
        if reference is not None and quant is None:
            check_parity(runner, reference, OTHER_ARITHMETIC)
        return runner
    except OutOfMemory:
        raise
    except Unsupported as reason:
        if backend != "auto" or quant is not None or config.model_type in OWN_CONFIGS:
            raise
        log.info("running the model's own modules: %s", reason)
        return f"{reason.what}: {reason.why}"


def _check_decoder(config: Any) -> None:
    if config.model_type in OF_LAB:
        why = "Shoal runs its blocks without the code that came with it"
        raise Unsupported(f"a loaded model of type {config.model_type!r}", why, "Give its folder or Hub id")
    if getattr(config, "is_encoder_decoder", False) and config.model_type not in ENCODERS:
        raise Unsupported(f"model type {config.model_type!r}", "it has an encoder", _DECODER_REMEDY)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    known = {config.model_type, config.get_text_config().model_type} & {*CAUSAL, *OWN_CONFIGS, *PLACED, *ENCODERS}
    if not known and not getattr(config, "auto_map", None):
        raise Unsupported(f"model type {config.model_type!r}", "transformers has no causal language model of it",
                          _DECODER_REMEDY)
    if not hasattr(config.get_text_config(), "num_hidden_layers"):
        raise Unsupported(f"model type {config.model_type!r}", "its config names no number of layers", _DECODER_REMEDY)
