"""The servers of one command: Shoal's own and its peers on the same weights, or one that runs already."""

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
from shoal_lab.bench.load.server import Server, free_port, llama_words, shoal_words, transformers_words
from shoal_lab.bench.load.targets import Form, Http, LoadTarget, look, own_fields, warm_up
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.speed import dequantised
from shoal_lab.bench.system import NotMeasured, Setting

OURS = "shoal"
PEERS = ("transformers", "llama.cpp", "llama-server")
_WARM = 8
"""Tokens of an answer before anything is measured."""

_NO_PREFIXES = ("--prefix-gib", "0")
"""Prompts come again in every round; a server that knew them would not read them."""


@dataclass(frozen=True)
class LoadTargets:
    """Who is to be measured.

    Attributes:
        methods: label -> method of Shoal.
        admissions: policies of Shoal, each a server of its own.
        peers: of `PEERS`.
        max_rows: most answers under way in one server.
        equal_lengths: whether every answer is as long as it may be.
        chat: whether requests are chats.
        llama_server: llama.cpp's own server: a path, or a name on PATH.
    """

    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"full": {"method": "full"}})
    admissions: Sequence[str] = ("join",)
    peers: Sequence[str] = ()
    max_rows: int = 16
    equal_lengths: bool = True
    chat: bool = False
    llama_server: str = "llama-server"

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise unknown("peer under load", peer, PEERS)
        if self.max_rows < 1:
            raise ValueError(f"max_rows is {self.max_rows}; it must be at least 1")
        if self.chat and "llama.cpp" in self.peers:
            raise ValueError("llama.cpp takes no chats here; leave out --chat")


class Servers(ExitStack):
    """Servers that run while the context lasts.

    Args:
        lineup: who.
        texts: recorded prompts, from which a shape's tokenizer learns.

    Attributes:
        targets: what can be measured.
        absent: what cannot, and why.
        notes: what a reader should know.
    """

    def __init__(self, lineup: LoadTargets, texts: Sequence[str] = ()) -> None:
        super().__init__()
        self.lineup, self._texts = lineup, texts
        self.targets: list[LoadTarget] = []
        self.absent: list[dict[str, str]] = []
        self.notes: list[str] = []

    def attach(self, address: Address, model: str | None) -> None:
        """A server that runs already, with every method as a target; ValueError where there is none."""
        face = look(address)
        for label, method in self.lineup.methods.items():
            plain = not face.shoal
            fields = {"stream_options": {"include_usage": True}} if plain else own_fields(method, self._equal)
            form = Form(model or face.model, self.lineup.chat, fields)
            self.targets.append(Http(OURS if face.shoal else address.url, "" if plain else label, address, form))
            if plain:
                break
        if self._equal and not face.shoal:
            self.notes.append("this server is not asked to go on after an end of sequence; lengths may differ")

    def start(self, subject: MeasuredModel, setting: Setting, prompts: Prompts) -> None:
        """Start everything on the same weights, and let each answer once.

        Raises:
            ValueError: Shoal's own server cannot run or answer.
        """
        model = self._folder(subject, setting)
        for admission in self.lineup.admissions:
            self._or_absent(OURS, partial(self._shoal, model, setting, admission))
        if "transformers" in self.lineup.peers:
            self._or_absent("transformers", partial(self._transformers, subject, model, setting))
        if "llama.cpp" in self.lineup.peers:
            self._or_absent("llama.cpp", partial(self._llama, model, setting))
        if "llama-server" in self.lineup.peers:
            self._or_absent("llama-server", partial(self._llama_server, subject, setting))
        self._warm_up(prompts)

    @property
    def _equal(self) -> bool:
        return self.lineup.equal_lengths

    def _folder(self, subject: MeasuredModel, setting: Setting) -> Path:
        """Where the weights lie; a shape's are written down first."""
        made = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-")))
        model = Path(str(subject.model))
        if subject.shape is not None:
            folder.write_shape(subject, setting.dtype, made, self._texts)
            return made
        if self._equal and self.lineup.peers and model.is_dir():
            folder.endless(model, made)
            return made
        return model

    def _or_absent(self, name: str, start: Callable[[], None]) -> None:
        try:
            start()
        except NotMeasured as reason:
            if name == OURS:
                raise ValueError(f"Shoal itself could not be measured: {reason}") from reason
            self.absent.append({"system": name, "reason": str(reason)})

    def _shoal(self, model: Path, setting: Setting, admission: str) -> None:
        lineup, port = self.lineup, free_port()
        names = (name for method in lineup.methods.values() for name in make(method).name.split("+"))
        allowed = ",".join(dict.fromkeys(names))
        more = ["--admission", admission, "--max-rows", str(lineup.max_rows), "--methods", allowed]
        server = self._server(shoal_words(model, port, setting, [*more, *_NO_PREFIXES]), port, setting)
        for label, method in lineup.methods.items():
            form = Form(str(model), lineup.chat, own_fields(method, lineup.equal_lengths))
            shown = f"{label}, {admission}" if len(lineup.admissions) > 1 or admission != "join" else label
            self.targets.append(Http(OURS, shown, Address(server.url), form, server))

    def _transformers(self, subject: MeasuredModel, model: Path, setting: Setting) -> None:
        if setting.quant is not None:
            raise NotMeasured(f"transformers serves these weights in {setting.dtype}, not in {setting.quant}")
        if subject.is_file:
            model = self._written(subject, setting)
        port = free_port()
        server = self._server(transformers_words(model, port, setting), port, setting)
        form = Form(str(model), self.lineup.chat)
        self.targets.append(Http("transformers", "serve, continuous batching", Address(server.url), form, server))

    def _written(self, subject: MeasuredModel, setting: Setting) -> Path:
        """A GGUF file's weights as a folder."""
        whole, made = (Path(self.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-"))) for _ in range(2))
        dequantised.write(subject, whole, as_dtype(setting.dtype))
        self.notes.append(f"transformers runs the file's weights in {setting.dtype}: its server reads no GGUF file")
        if not self._equal:
            return whole
        folder.endless(whole, made)
        return made

    def _llama_server(self, subject: MeasuredModel, setting: Setting) -> None:
        binary = shutil.which(self.lineup.llama_server)
        if binary is None:
            raise NotMeasured(f"there is no program {self.lineup.llama_server!r}")
        if not subject.is_file or setting.quant is not None:
            raise NotMeasured("it is given GGUF files alone, in their own numbers")
        model, port, rows = Path(str(subject.model)), free_port(), self.lineup.max_rows
        server = self._server(llama_words(binary, model, port, setting, rows), port, setting)
        server.until_healthy()
        fields = {"stream_options": {"include_usage": True}, "ignore_eos": self._equal}
        form = Form(str(model), self.lineup.chat, fields)
        self.targets.append(Http("llama-server", "", Address(server.url), form, server))

    def _llama(self, model: Path, setting: Setting) -> None:
        from transformers import AutoTokenizer

        if model.suffix == ".gguf":
            raise NotMeasured("of a GGUF file there is llama.cpp's own server, the peer llama-server")
        words = AutoTokenizer.from_pretrained(model)
        target = Multi(MeasuredModel(model=str(model)), setting, self.lineup.max_rows, words)
        self.callback(target.stop)
        self.targets.append(target)
        self.notes.append("llama.cpp's batches are driven in a process of their own, without HTTP and without text, "
                          "in its favour: its Python package serves one request at a time")

    def _server(self, words: Sequence[str], port: int, setting: Setting) -> Server:
        server = Server(words, port, {"OMP_NUM_THREADS": str(setting.threads)})
        self.callback(server.stop)
        return server

    def _warm_up(self, prompts: Prompts) -> None:
        short = Prompts(prompts.texts, prompts.lengths, (_WARM,), prompts.seed)
        failed = warm_up(self.targets, self.lineup.max_rows, short)
        for place, why in failed.items():
            if self.targets[place].name == OURS:
                raise ValueError(f"Shoal itself could not be measured: {why}")
            self.absent.append({"system": self.targets[place].name, "reason": why})
        self.targets = [target for place, target in enumerate(self.targets) if place not in failed]
