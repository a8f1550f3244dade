"""The servers of one command: Shoal's and its baselines' on the same weights, or one that runs already."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.engine.loading.device import as_dtype
from shoal.errors import unknown
from shoal.methods import make
from shoal_lab.bench.load import folder
from shoal_lab.bench.load.http import Address
from shoal_lab.bench.load.multi import Multi
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.server import Server, free_port, llama_argv, shoal_argv, transformers_argv
from shoal_lab.bench.load.targets import Form, Http, LoadTarget, look, own_fields, warm_up
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.speed import dequantised
from shoal_lab.bench.system import NotMeasured, Setting

OURS = "shoal"
BASELINES = ("transformers", "llama.cpp", "llama-server")
_WARM = 8
"""Tokens per answer of the warm-up."""

_NO_PREFIXES = ("--prefix-gib", "0")
"""No prefix cache: prompts come again in every round, and a server that knew them would not read them."""


@dataclass(frozen=True)
class ServersConfig:
    """Which servers to measure.

    Attributes:
        methods: Shoal's methods by label.
        admissions: Shoal's policies, each with a server of its own.
        baselines: names in `BASELINES`.
        max_seqs: most requests in progress in one server.
        equal_lengths: whether every answer has its full length.
        chat: whether requests are chats.
        llama_server: llama.cpp's own server: a path, or a name on PATH.
    """

    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"full": {"method": "full"}})
    admissions: Sequence[str] = ("join",)
    baselines: Sequence[str] = ()
    max_seqs: int = 16
    equal_lengths: bool = True
    chat: bool = False
    llama_server: str = "llama-server"

    def __post_init__(self) -> None:
        for baseline in self.baselines:
            if baseline not in BASELINES:
                raise unknown("peer under load", baseline, BASELINES)
        if self.max_seqs < 1:
            raise ValueError(f"max_seqs is {self.max_seqs}; it must be at least 1")
        if self.chat and "llama.cpp" in self.baselines:
            raise ValueError("llama.cpp takes no chats here; leave out --chat")


class Servers(ExitStack):
    """Servers that run while the context lasts.

    Args:
        config: which servers.
        texts: recorded prompts, on which a shape's tokenizer is trained.

    Attributes:
        targets: what can be measured.
        absent: what cannot be measured, and why.
        notes: remarks for the reader.
    """

    def __init__(self, config: ServersConfig, texts: Sequence[str] = ()) -> None:
        super().__init__()
        self.config, self._texts = config, texts
        self.targets: list[LoadTarget] = []
        self.absent: list[dict[str, str]] = []
        self.notes: list[str] = []

    def attach(self, address: Address, model: str | None) -> None:
        """Add a server that runs already, each method as a target; ValueError if there is none."""
        face = look(address)
        for label, method in self.config.methods.items():
            plain = not face.shoal
            fields = {"stream_options": {"include_usage": True}} if plain else own_fields(method, self._equal)
            form = Form(model or face.model, self.config.chat, fields)
            self.targets.append(Http(OURS if face.shoal else address.url, "" if plain else label, address, form))
            if plain:
                break
        if self._equal and not face.shoal:
            self.notes.append("this server is not asked to go on after an end of sequence; lengths may differ")

    def start(self, model: MeasuredModel, setting: Setting, prompts: Prompts) -> None:
        """Start all servers on the same weights, and let each answer once.

        Raises:
            ValueError: Shoal's own server cannot run or answer.
        """
        path = self._folder(model, setting)
        for admission in self.config.admissions:
            self._or_absent(OURS, partial(self._shoal, path, setting, admission))
        if "transformers" in self.config.baselines:
            self._or_absent("transformers", partial(self._transformers, model, path, setting))
        if "llama.cpp" in self.config.baselines:
            self._or_absent("llama.cpp", partial(self._llama, path, setting))
        if "llama-server" in self.config.baselines:
            self._or_absent("llama-server", partial(self._llama_server, model, setting))
        self._warm_up(prompts)

    @property
    def _equal(self) -> bool:
        return self.config.equal_lengths

    def _folder(self, model: MeasuredModel, setting: Setting) -> Path:
        """The folder of the weights; a shape's weights are written first."""
        made = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-")))
        path = Path(str(model.model))
        if model.shape is not None:
            folder.write_shape(model, setting.dtype, made, self._texts)
            return made
        if self._equal and self.config.baselines and path.is_dir():
            folder.endless(path, made)
            return made
        return path

    def _or_absent(self, name: str, start: Callable[[], None]) -> None:
        try:
            start()
        except NotMeasured as reason:
            if name == OURS:
                raise ValueError(f"Shoal itself could not be measured: {reason}") from reason
            self.absent.append({"system": name, "reason": str(reason)})

    def _shoal(self, path: Path, setting: Setting, admission: str) -> None:
        config, port = self.config, free_port()
        names = (name for method in config.methods.values() for name in make(method).name.split("+"))
        allowed = ",".join(dict.fromkeys(names))
        more = ["--admission", admission, "--max-rows", str(config.max_seqs), "--methods", allowed]
        server = self._server(shoal_argv(path, port, setting, [*more, *_NO_PREFIXES]), port, setting)
        for label, method in config.methods.items():
            form = Form(str(path), config.chat, own_fields(method, config.equal_lengths))
            shown = f"{label}, {admission}" if len(config.admissions) > 1 or admission != "join" else label
            self.targets.append(Http(OURS, shown, Address(server.url), form, server))

    def _transformers(self, model: MeasuredModel, path: Path, setting: Setting) -> None:
        if setting.quant is not None:
            raise NotMeasured(f"transformers serves these weights in {setting.dtype}, not in {setting.quant}")
        if model.is_file:
            path = self._written(model, setting)
        port = free_port()
        server = self._server(transformers_argv(path, port, setting), port, setting)
        form = Form(str(path), self.config.chat)
        self.targets.append(Http("transformers", "serve, continuous batching", Address(server.url), form, server))

    def _written(self, model: MeasuredModel, setting: Setting) -> Path:
        """Write a GGUF file's weights as a folder."""
        whole, made = (Path(self.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-"))) for _ in range(2))
        dequantised.write(model, whole, as_dtype(setting.dtype))
        self.notes.append(f"transformers runs the file's weights in {setting.dtype}: its server reads no GGUF file")
        if not self._equal:
            return whole
        folder.endless(whole, made)
        return made

    def _llama_server(self, model: MeasuredModel, setting: Setting) -> None:
        binary = shutil.which(self.config.llama_server)
        if binary is None:
            raise NotMeasured(f"there is no program {self.config.llama_server!r}")
        if not model.is_file or setting.quant is not None:
            raise NotMeasured("it is given GGUF files alone, in their own numbers")
        path, port, rows = Path(str(model.model)), free_port(), self.config.max_seqs
        server = self._server(llama_argv(binary, path, port, setting, rows), port, setting)
        server.until_healthy()
        fields = {"stream_options": {"include_usage": True}, "ignore_eos": self._equal}
        form = Form(str(path), self.config.chat, fields)
        self.targets.append(Http("llama-server", "", Address(server.url), form, server))

    def _llama(self, path: Path, setting: Setting) -> None:
        from transformers import AutoTokenizer

        if path.suffix == ".gguf":
            raise NotMeasured("of a GGUF file there is llama.cpp's own server, the peer llama-server")
        tokenizer = AutoTokenizer.from_pretrained(path)
        target = Multi(MeasuredModel(model=str(path)), setting, self.config.max_seqs, tokenizer)
        self.callback(target.stop)
        self.targets.append(target)
        self.notes.append("llama.cpp's batches are driven in a process of their own, without HTTP and without text, "
                          "in its favour: its Python package serves one request at a time")

    def _server(self, argv: Sequence[str], port: int, setting: Setting) -> Server:
        server = Server(argv, port, {"OMP_NUM_THREADS": str(setting.threads)})
        self.callback(server.stop)
        return server

    def _warm_up(self, prompts: Prompts) -> None:
        short = Prompts(prompts.texts, prompts.lengths, (_WARM,), prompts.seed)
        failed = warm_up(self.targets, self.config.max_seqs, short)
        for place, why in failed.items():
            if self.targets[place].name == OURS:
                raise ValueError(f"Shoal itself could not be measured: {why}")
            self.absent.append({"system": self.targets[place].name, "reason": why})
        self.targets = [target for place, target in enumerate(self.targets) if place not in failed]
