"""A checkpoint on disk or on the Hub: its config, tokenizer and weights, and how it is changed as it is loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from shoal.engine.loading.form import FileForm, of_tensors
from shoal.engine.loading.generation_config import DRAWING, of_file, recommended
from shoal.engine.loading.gguf_checkpoint import GgufCheckpoint, Spoken, spoken_by
from shoal.engine.loading.voxtral import TEKKEN, voxtral_tokenizer
from shoal.errors import LAB_INSTALL, Unsupported, told_by_transformers
from shoal.hub.names import entry_of
from shoal.hub.places import find
from shoal.model.config import WIDTHS, check_sizes
from shoal.model.encoders.encoder import ENCODERS
from shoal.model.gguf.encoder_decoders import ENCODER_DECODERS
from shoal.model.gguf.header import is_gguf
from shoal.model.gguf.mmproj import Sight
from shoal.model.gguf.splits import further_beside, only_model
from shoal.model.lora.adapter import Place, place_in_layers
from shoal.model.modules import check_loading_info, check_quantised, class_of, loaded, quantised_by
from shoal.model.mtp import MtpLayer, mtp_of
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import BY_COLUMNS, FileSource, Source, has_safetensors
from shoal.model.packed.weights import check_names
from shoal.model.sambay import OWN_CONFIGS
from shoal.model.transform import Transform

NOTE = "shoal_prune"
"""Name, without its `.json`, of what `shoal prune` writes beside the weights; in a GGUF file a key of the metadata."""
ADAPTER = "adapter_config.json"
"""What peft writes beside an adapter."""

GROUP = "shoal.checkpoints"
"""Entry points of `Foreign` classes, by model type."""
OF_LAB = ("llada", "Dream")
"""Model types that shoal-lab brings."""


class Foreign(Protocol):
    """Reads the checkpoints of a model type that transformers does not know as those of one that it knows."""

    def config(self, info: Mapping[str, Any]) -> Any:
        """The transformers config for what is written in `config.json`; Unsupported if there is none."""

    def weights(self, source: Source) -> Source:
        """The weights under transformers' names; by default they have them."""
        return source


class Checkpoint:
    """A checkpoint by its name. Nothing is read before it is needed, be it by a transform.

    Args:
        name: folder, `.gguf` file, or a name of the Hub, of which files that are here are read without the network.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether Python code that comes with it may run.
        transform: changes config and weights of a decoder as they are loaded; None for no change.

    Attributes:
        place: the folder or Hub id to load from.
        file: the GGUF file, else None.
        changed: the weights by name where they are not those of the files, else None.

    Raises:
        ValueError: there is no such file or folder, or it holds no model.
        Unsupported: it holds an adapter for one, or cannot be changed like that.
    """

    def __init__(
        self, name: str, revision: str | None, trust_remote_code: bool, transform: Transform | None = None
    ) -> None:
        self.name, self.revision = name, revision
        self.place, self.file = _place(name, revision)
        self._options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        self._gguf = None if self.file is None else GgufCheckpoint(self.file)
        if revision is not None:
            self._options["revision"] = revision
        self.changed: Source | None = None
        self._words = ""
        if transform is not None:
            before, source = self.config(), named(self.weights(), name)
            _check(before, source)
            config, weights = transform(before, source)
            if config is not before or weights is not source:
                self._config, self.changed = config, weights
                self._words = getattr(transform, "__qualname__", "") or repr(transform)

    @property
    def changes(self) -> str:
        """What was done to another model to make this one, in words; empty where nothing says so."""
        return "; ".join(filter(None, (self._noted, self._words)))

    @property
    def _noted(self) -> str:
        """What its files say of that."""
        try:
            note = json.loads(self._gguf.entry(NOTE) if self._gguf is not None else
                              (Path(self.place) / f"{NOTE}.json").read_text(encoding="utf-8"))
            gone = f"layers {', '.join(map(str, note['dropped']))}" if "dropped" in note else (
                f"{1 - sum(note['widths']) / len(note['widths']) / note['of']:.0%} of the neurons")
            return f"{gone} of {note['source']} were left out"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def config(self) -> Any:
        """The transformers config."""
        if self.changed is not None:
            return self._config
        if self._gguf is not None:
            return self._gguf.config()
        from transformers import AutoConfig

        with told_by_transformers(f"the config of {str(self.place)!r}"):
            if self._foreign is not None:
                return self._foreign.config(self._config_json)
            if self._own is not None:
                return self._own.from_dict(self._config_json)
            config = AutoConfig.from_pretrained(self.place, **self._options)
        check_sizes(config)
        if "quantization_config" in vars(config) and config.quantization_config is None:
            del config.quantization_config  # transformers 5.0 takes one that is null for one that is there
        if config.model_type == "umt5":  # whose class forgets, unlike T5's, that files may say so
            config.scale_decoder_outputs = self._config_json.get("tie_word_embeddings") is not False
        return config

    @cached_property  # on the Hub every read of the file is a request
    def _config_json(self) -> dict[str, Any]:
        """The config as it is written."""
        from transformers import PreTrainedConfig

        return dict(PreTrainedConfig.get_config_dict(self.place, **self._options)[0])

    @cached_property
    def _foreign(self) -> Foreign | None:
        """What reads a checkpoint whose own code is not needed, since its blocks come with transformers."""
        if self._gguf is not None or not (kind := self._model_type):
            return None
        from importlib.metadata import entry_points

        for entry in entry_points(group=GROUP, name=kind):
            found: Foreign = entry.load()()
            return found
        if kind in OF_LAB:
            raise Unsupported(f"model type {kind!r}", "what reads it comes with shoal-lab", LAB_INSTALL)
        return None

    @property
    def _own(self) -> Any | None:
        """The class of its config where transformers has none."""
        return None if self._gguf is not None else OWN_CONFIGS.get(self._model_type)

    @property
    def encodes(self) -> bool:
        """Whether the model has an encoder, beside which Shoal runs its decoder. Its usual dtype is float32."""
        if self._gguf is not None:
            return self._gguf.entry("general.architecture") in ENCODER_DECODERS
        return self._model_type in ENCODERS and bool(self._config_json.get("is_encoder_decoder", True))

    @property
    def _model_type(self) -> str:
        """As the config says it; empty where it says nothing."""
        kind = self._config_json.get("model_type") or ""
        if not isinstance(kind, str):
            raise ValueError(f"the config says model_type {kind!r:.80}; it must be a name. Fetch the model again")
        return kind

    def generation_config(self) -> Any | None:
        """The generation config, or None where the checkpoint has none."""
        if self._gguf is not None:
            return None
        from transformers import GenerationConfig

        try:
            return GenerationConfig.from_pretrained(self.place, revision=self.revision or "main")
        except OSError:
            return None

    def sampling(self, generation_config: Any) -> tuple[dict[str, float], str]:
        """What the makers recommend for `Sampling`, and where it stands: "files", an address, or nowhere.

        The files are a GGUF file's metadata, else the generation config. Where they do not say how to draw, the table
        of short names may.
        """
        said = recommended(generation_config) if self._gguf is None else of_file(self._gguf.entry)
        entry = None if any(name in said for name in DRAWING) else entry_of(self.name)
        if entry is None or not entry.sampling:
            return said, "files" if said else ""
        return {**entry.sampling, **said}, entry.sampling_source

    def ends(self) -> dict[str, Any]:
        """What the files themselves say of where an answer ends: options of `eos_ids`."""
        if self._gguf is not None:
            return self._gguf.ends()
        parts = [self._config_json, *(part for part in self._config_json.values() if isinstance(part, dict))]
        return {"written": any(part.get("eos_token_id") is not None for part in parts)}

    def form(self) -> FileForm:
        """How its weights lie in its files."""
        if self._gguf is not None:
            return self._gguf.form()
        folder = self._folder()
        return of_tensors(FileSource(folder), quantised_by(self.config())) if has_safetensors(folder) else FileForm()

    def sizes(self) -> dict[Place, tuple[int, int]]:
        """Rows and columns of the matrices of layers, by the names of the files; empty where they say none."""
        if self._gguf is not None:
            return self._gguf.sizes()
        folder = self._folder()
        outlines = FileSource(folder).outlines() if has_safetensors(folder) else {}
        turned, found = BY_COLUMNS.get(self._model_type, ()), dict[Place, tuple[int, int]]()
        for name, (_, shape) in outlines.items():
            place = place_in_layers(name.removesuffix(".weight"))
            if place is not None and len(shape) == 2:
                rows, columns = shape[::-1] if name.endswith(turned) else shape
                found[place] = rows, columns
        return found

    def spoken(self) -> Spoken:
        """What it says of text."""
        return spoken_by(self.tokenizer()) if self._gguf is None else self._gguf.spoken()

    def model(self, dtype: Any, **options: Any) -> Any:
        """The model with its own modules; `options` are those of `from_pretrained`."""
        if self.changed is not None:
            model = loaded(self._config, {name: self.changed[name] for name in self.changed.names()}, dtype)
            if (said := self.generation_config()) is not None:
                model.generation_config = said
            return model
        if self._gguf is not None:
            return self._gguf.model(dtype)
        from transformers import AutoModelForCausalLM

        config = self.config()
        if self._foreign is not None and (source := self.weights()) is not None:
            return loaded(config, {name: source[name] for name in source.names()}, dtype)
        if quantised_by(config) is not None and isinstance(source := self.weights(), FileSource):
            check_quantised(config, source.types())
        kind = AutoModelForCausalLM if getattr(config, WIDTHS, None) is None else class_of(config)
        with _no_bars_into_pipes(), told_by_transformers(f"the model {shown_name(self.name)!r}"):
            options = {**self._options, **options, "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = kind.from_pretrained(self.place, config=config, dtype=dtype, **options)
        check_loading_info(info, f"the checkpoint {shown_name(self.name)!r}", self._read)
        return model

    def _read(self, name: str) -> Tensor:
        """A tensor by its name in the files, or by transformers' name, which may begin differently."""
        source = self.weights()
        if source is None or not source.has(name):
            import torch

            return torch.ones(1)  # it cannot be read, so it counts as weights
        return source[name]

    def weights(self) -> Source | None:
        """The weights by name, or None where they lie neither in safetensors nor in a GGUF file that Shoal reads."""
        if self.changed is not None:
            return self.changed
        if self._gguf is not None:
            return self._gguf.weights()
        folder = self._folder()
        if not has_safetensors(folder):
            return None
        source = FileSource(folder)
        return source if self._foreign is None else self._foreign.weights(source)

    def mtp(self) -> MtpLayer | None:
        """The layer for further tokens, in the files or beside them; None without one, or where they were changed."""
        if self.changed is not None or self._foreign is not None:
            return None
        places = (self.weights, *(() if self._gguf is None else (self._gguf.beside,)))
        sources = (source for place in places if (source := place()) is not None)
        return next((layer for source in sources if (layer := mtp_of(self.config(), source)) is not None), None)

    def files_beside(self) -> list[Path]:
        """Files beside its own that predict further tokens and may be drafters for it; none where it was changed."""
        return [] if self._gguf is None or self.changed is not None else further_beside(self._gguf.path.parent)

    def sight(self, tokens: Callable[[], Mapping[str, int]]) -> tuple[Sight | None, str]:
        """What reads pictures for a GGUF file of that vocabulary; see `GgufCheckpoint.sight`."""
        return (None, "") if self._gguf is None else self._gguf.sight(self.config(), tokens)

    def _folder(self) -> Path:
        if Path(self.place).is_dir():
            return Path(self.place)
        from huggingface_hub import snapshot_download

        wanted = ["model*.safetensors", "*.json"]  # not the second copy that some keep in the original format
        return Path(snapshot_download(self.place, revision=self.revision, allow_patterns=wanted))

    def tokenizer(self, given: Any = None) -> Any:
        """The tokenizer: `given` itself, one loaded from where it names, or the checkpoint's own if it has one."""
        if given is not None and not isinstance(given, str | os.PathLike):
            return given
        from transformers import AutoTokenizer

        if given is not None:
            return AutoTokenizer.from_pretrained(given)
        if self._gguf is not None:
            return self._gguf.tokenizer()
        folder = Path(self.place)
        if folder.is_dir() and not any(folder.glob("*token*")) and not (folder / TEKKEN).is_file():
            return None
        if self.config().model_type == "voxtral":
            return voxtral_tokenizer(self.place, self.revision)
        if self._own is not None:  # the class that its files name would cut text at other places than these say
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(self.place, revision=self.revision or "main")
        return AutoTokenizer.from_pretrained(self.place, **self._options)


@contextmanager
def _no_bars_into_pipes() -> Iterator[None]:
    """Show transformers' bar for GGUF files on a terminal only; its own settings do not reach that bar."""
    from transformers import modeling_gguf_pytorch_utils as converter

    bar = getattr(converter, "tqdm", None)
    if bar is None or sys.stderr.isatty():
        yield
        return
    vars(converter)["tqdm"] = partial(bar, disable=True)
    try:
        yield
    finally:
        vars(converter)["tqdm"] = bar


def shown_name(model: str) -> str:
    """A model's name for reports: a Hub id, or the last part of a folder's path."""
    path = Path(model)
    return path.name if path.is_absolute() or path.exists() else model


def _place(name: str, revision: str | None = None) -> tuple[str, Path | None]:
    """The folder or Hub id to load from and None, or the folder of a GGUF file and that file."""
    path = Path(name)
    if not path.exists() and (held := find(name, revision)) is not None:
        return (os.fspath(held), None) if held.is_dir() else (os.fspath(held.parent), held)
    if path.is_dir():
        if path.suffix.lower() == ".gguf":
            raise ValueError(f"{name!r} is a folder; give the .gguf file in it")
        if (path / ADAPTER).is_file():
            what, why = f"the adapter in the folder {name!r}", "Shoal runs whole models, and would leave it out"
            raise Unsupported(what, why, "Give its model, and the adapter by --lora or Engine.add_adapter")
        if not (path / "config.json").is_file():
            if file := only_model(path):
                return name, file
            raise ValueError(f"the folder {name!r} holds no config.json, so it is no model in the Hugging Face format")
    elif path.suffix.lower() == ".gguf" or (path.is_file() and is_gguf(path)):
        if not path.is_file():
            raise ValueError(f"there is no file {name!r}")
        return os.fspath(path.parent), path
    elif path.exists():
        raise ValueError(f"{name!r} is a file; give the model's folder, its Hub id, or a .gguf file")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no folder {name!r}")
    return name, None


def hush_libraries() -> None:
    """Keep loading bars out of logs, and advice that does not concern the user's command out of stderr."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _check(config: Any, source: Source) -> None:
    """Refuses missing and surplus weights before the change, since a change to fewer layers drops the others."""
    try:
        shape = shape_of(config)
    except Unsupported:  # its modules are checked when they are made
        return
    check_names(config, shape, source)


def named(source: Source | None, name: str) -> Source:
    """The weights of a checkpoint by their names; Unsupported where they have none."""
    if source is None:
        remedy = "Use its safetensors, or a GGUF file that Shoal reads itself"
        raise Unsupported(f"a transform of {name!r}", "its weights cannot be read by their names", remedy)
    return source
