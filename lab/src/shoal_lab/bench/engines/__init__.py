"""Other engines, each run by the Python of an environment that has it: `--peer ctranslate2=ENV/bin/python`.

They disagree about versions of torch and transformers, so none is imported here. A script beside this file, which
needs nothing of Shoal, loads the engine and is talked to in lines of JSON; see `lines.py`.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from shoal.errors import unknown
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.process import peak_memory
from shoal_lab.bench.speed import dequantised
from shoal_lab.bench.system import About, Expected, NotMeasured, Run, Setting, System, traffic_of

ENGINES: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType({
    "ctranslate2": ("on_ctranslate2.py", (8,)),
    "onnxruntime-genai": ("on_onnxruntime.py", (4,)),
    "openvino-genai": ("on_openvino.py", (4, 8)),
    "vllm": ("on_vllm.py", (16,)),
})
"""Name on the command line -> script, and the bits per weight that the engine has on CPUs."""
_MINUTES = 20.0
"""For a conversion and the load."""
_SAID = 12
"""Last lines of an engine's own output that are kept, to say why it ended."""


def parse(peer: str) -> tuple[str, str] | None:
    """Name and interpreter of `NAME=PYTHON`; None if it is no such engine.

    Raises:
        ValueError: there is no such engine, or no such interpreter.
    """
    name, sign, python = peer.partition("=")
    if not sign:
        return None
    if name not in ENGINES:
        raise unknown("engine", name, list(ENGINES))
    if not Path(python).is_file():
        raise ValueError(f"--peer {peer}: there is no interpreter {python!r}; name the python of an environment that "
                         f"has {name}, such as ENV/bin/python")
    return name, python


class Engine(System):
    """Measures one of them.

    Args:
        name, python: as `parse` gives them; bound before, by `functools.partial`.
        model: a model from files.
        setting: how it runs; `quant` "file" takes the engine's nearest number of bits.
    """

    def __init__(self, name: str, python: str, model: MeasuredModel, setting: Setting) -> None:
        self._name, self._python, self._model, self._setting = name, python, model, setting
        script, self._known_bits = ENGINES[name]
        self._script = Path(__file__).parent / script
        self._work: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._said: deque[str] = deque(maxlen=_SAID)
        self._bits = 16.0

    @override
    def prepare(self) -> About:
        if self._setting.device != "cpu":
            raise NotMeasured("its adapter here runs on the CPU only")
        self._work = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        folder = self._folder(self._work)
        told = self._ask({"do": "prepare", "folder": str(folder), "work": str(self._work / "converted"),
                          "bits": self._nearest(), "threads": self._setting.threads}, 60 * _MINUTES)
        self._bits = float(told["bits"])
        traffic = traffic_of(self._model, self._bits, 2)
        return About(told["version"], told["detail"], traffic.layer * len(traffic.windows) + traffic.head,
                     {"bits_per_weight": self._bits})

    def _nearest(self) -> int:
        """The engine's bits per weight that are nearest to the asked ones."""
        asked = {"int8": 8.0, "int4": 4.0, "file": self._model.file.bits_per_weight if self._model.is_file else 16.0}
        return min(self._known_bits, key=lambda bits: abs(bits - asked.get(self._setting.quant or "", 16.0)))

    def _folder(self, work: Path) -> Path:
        """A folder of transformers with the same numbers: of a file or of a shape a dequantised one."""
        if self._model.dequantised is not None:
            return Path(self._model.dequantised)
        if not self._model.is_file:
            if self._model.model is None or not Path(self._model.model).is_dir():
                raise NotMeasured(f"{self._name} converts a model's folder or a GGUF file; give one as --model")
            return Path(self._model.model)
        dequantised.write(replace(self._model, dequantised=None), work / "dequantised")
        return work / "dequantised"

    def apart(self) -> int:
        """Most bytes that the process which holds the engine has had; 0 before it is there."""
        return 0 if self._process is None else peak_memory(pid=self._process.pid) or 0

    @override
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        if len(prompts) > 1:
            raise NotMeasured("its adapter here decodes one prompt at a time")
        told = self._ask({"do": "generate", "prompt": list(prompts[0]), "new_tokens": new_tokens}, None)
        if len(told["times"]) != new_tokens or len(told["tokens"]) != new_tokens:
            raise NotMeasured(f"{self._name} gave {len(told['tokens'])} tokens in place of {new_tokens}")
        return Run(tuple(told["times"]), tuple(told["tokens"]), float(self._model.text.num_hidden_layers))

    @override
    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        raise NotMeasured(f"{self._name} has no forward of several positions for its users")

    @override
    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        traffic = traffic_of(self._model, self._bits, 2)
        return Expected(traffic.mean_step(self._model.full_plan(), context, new_tokens, rows))

    @override
    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            for thread in self._readers:
                thread.join()
            with self._process:  # closes its streams
                pass
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
        self._process = self._work = None

    def _ask(self, question: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """What the engine answers.

        Raises:
            NotMeasured: it says why it cannot, has ended, or takes longer.
        """
        process = self._process = self._process or self._begin()
        assert process.stdin is not None
        with suppress(OSError):  # it has ended, which its answer says too
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise NotMeasured(f"{self._name} took more than {seconds:.0f} s to {question['do']}") from None
        if line is None:
            last = self._said[-1] if self._said else "without a word"
            raise NotMeasured(f"{self._name} ended with code {process.wait()}: {last}")
        told: dict[str, Any] = json.loads(line)
        if "absent" in told:
            raise NotMeasured(f"{self._name}: {told['absent']}")
        return told

    def _begin(self) -> subprocess.Popen[str]:
        process = subprocess.Popen([self._python, str(self._script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, errors="replace")
        assert process.stdout is not None and process.stderr is not None
        self._readers = [threading.Thread(target=self._read, args=(process.stdout,), daemon=True),
                         threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)]
        for thread in self._readers:
            thread.start()
        return process

    def _read(self, lines: Any) -> None:
        for line in lines:
            self._answers.put(line)
        self._answers.put(None)

    def _listen(self, lines: Any) -> None:
        self._said.extend(line.strip() for line in lines if line.strip())
