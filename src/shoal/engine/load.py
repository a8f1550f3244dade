"""Load a model: from a folder, the Hub, a GGUF file, or an object that the caller has loaded already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shoal import reference
from shoal.engine.card import Card, read_card
from shoal.engine.device import as_dtype, default_device, default_dtype
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.hf import HFStack
from shoal.model.parity import check_parity

BACKENDS = ("auto", "hf", "packed")
_DECODER_REMEDY = "Use a decoder-only causal language model"


def load(
    model: Any = None,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    quant: str | None = None,
    backend: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Engine:
    """An engine for a decoder-only language model.

    Args:
        model: folder, Hub id or `.gguf` file of a model in the Hugging Face format, or a loaded transformers model,
            which is used as it is and never changed. None is the small model that ships with Shoal.
        tokenizer: a transformers tokenizer, or where to load one from; None takes the model's own.
        dtype: weights and computation; None is bfloat16 where the device computes it natively, else float32.
        device: None is CUDA where there is one, else the CPU.
        quant: weight quantisation while loading.
        backend: who runs the layers: "hf" the model's own modules, "auto" the best that fits.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether Python code that comes with a model may run.

    Raises:
        ValueError: there is no such model, or an option is unknown.
        Unsupported: it is no decoder, or cannot be run layer by layer.
    """
    _check_backend(backend, quant)
    if isinstance(model, str | os.PathLike) or model is None:
        source = os.fspath(reference.path()) if model is None else os.fspath(model)
        return _load_files(source, tokenizer, dtype, device, revision, trust_remote_code)
    if dtype is not None or device is not None:
        raise ValueError(
            "dtype and device belong to models that Shoal loads itself; a model that you hand over is never changed. "
            "Convert it before, with model.to(...)"
        )
    return engine_for(model, tokenizer, name=getattr(model.config, "_name_or_path", "") or type(model).__name__)


def engine_for(model: Any, tokenizer: Any = None, *, name: str = "", card: Card | None = None) -> Engine:
    """The engine of a loaded transformers model, which is not changed."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise Unsupported(f"an object of type {type(model).__name__}", "it is no transformers model", _DECODER_REMEDY)
    if model.training:
        raise Unsupported("a model in training mode", "its dropout would change the output", "Call model.eval() before")
    _check_decoder(model.config)
    stack = HFStack(model)
    check_parity(stack, model)
    return Engine(
        stack, tokenizer, model_name=name, eos_token_ids=_eos(model, tokenizer), card=card, model=model
    )


def _check_backend(backend: str, quant: str | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend == "packed":
        raise Unsupported("backend 'packed'", "this version runs models through their own modules", 'Use backend="hf"')
    if quant is not None:
        raise Unsupported(f"quant={quant!r}", "this version does not quantise weights", "Load the model without it")


def _load_files(
    source: str, tokenizer: Any, dtype: Any, device: Any, revision: str | None, trust_remote_code: bool
) -> Engine:
    from transformers import AutoConfig, AutoModelForCausalLM

    where = torch.device(device) if device is not None else default_device()
    kind = as_dtype(dtype) if dtype is not None else default_dtype(where)
    place, extra = _place(source)
    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code, **extra}
    if revision is not None:
        shared["revision"] = revision
    config = AutoConfig.from_pretrained(place, **shared)
    _check_decoder(config)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=kind, **shared).to(where).eval()
    if not isinstance(tokenizer, str | os.PathLike) and tokenizer is not None:
        words = tokenizer
    else:
        words = _load_tokenizer(tokenizer or place, shared if tokenizer is None else {})
    card = read_card(place, config.get_text_config().num_hidden_layers, revision)
    return engine_for(model, words, name=source, card=card)


def _place(source: str) -> tuple[str, dict[str, str]]:
    """Folder or Hub id to load from, and the GGUF file in it."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no file {source!r}")
        return os.fspath(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder {source!r} holds no config.json, so it is no model in the Hugging Face format")
    elif path.exists():
        raise ValueError(f"{source!r} is a file; give the model's folder, its Hub id, or a .gguf file")
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"there is no folder {source!r}")
    return source, {}


def _load_tokenizer(place: Any, shared: dict[str, Any]) -> Any:
    """The tokenizer, or None where a folder has none: then prompts are token ids."""
    from transformers import AutoTokenizer

    folder = Path(place)
    if folder.is_dir() and "gguf_file" not in shared and not any(folder.glob("*token*")):
        return None
    return AutoTokenizer.from_pretrained(place, **shared)


def _check_decoder(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"model type {config.model_type!r}", "it has an encoder", _DECODER_REMEDY)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    known = {config.model_type, config.get_text_config().model_type} & set(CAUSAL)
    if not known and not getattr(config, "auto_map", None):
        raise Unsupported(f"model type {config.model_type!r}", "transformers has no causal language model of it", _DECODER_REMEDY)
    if not hasattr(config.get_text_config(), "num_hidden_layers"):
        raise Unsupported(f"model type {config.model_type!r}", "its config names no number of layers", _DECODER_REMEDY)


def _eos(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids: of the generation config, else the config, else the tokenizer."""
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
        if holder is getattr(model, "generation_config", None) and holder is not None:
            return frozenset()
    return frozenset()
