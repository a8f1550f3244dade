"""What is measured: systems behind one protocol, and the runs they return.

A system holds one set of weights in one number format and decodes greedily, never stopping before the asked length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal_lab.bench.model import MeasuredModel
from shoal_lab.components.cost import Traffic


class NotMeasured(Exception):
    """A system that cannot run here; the message says why, and what would help."""


@dataclass(frozen=True)
class Setting:
    """How the weights are held and where.

    Attributes:
        dtype: of unquantised weights and of the computation.
        quant: "int8", "int4", "file" (a GGUF file's own numbers) or None.
        backend: Shoal's own choice of executor.
        device: such as "cpu" or "cuda:0".
        threads: CPU threads.
        compile_minutes: most time that a peer's warm-up may take.
        card_seconds: time that each step measurement of Shoal's cost card takes.
    """

    dtype: str
    quant: str | None = None
    backend: str = "auto"
    device: str = "cpu"
    threads: int = 1
    compile_minutes: float = 5.0
    card_seconds: float = 0.5

    @property
    def weights(self) -> str:
        """What the weights are held in."""
        return self.quant or self.dtype


@dataclass(frozen=True)
class Run:
    """One measured generation.

    Attributes:
        times: seconds from the call until token i of every row was there.
        tokens: the first row's.
        mean_layers: decoder layers per token, token 0 at L, as realised.
        ideal_speedup: by layers alone; 1 at full depth.
    """

    times: tuple[float, ...]
    tokens: tuple[int, ...]
    mean_layers: float
    ideal_speedup: float = 1.0


@dataclass(frozen=True)
class Expected:
    """What is to be expected of a generation.

    Attributes:
        step_bytes: mean bytes read per decoding step.
        seconds, tpot: the cost card's prediction; None where a system has none.
    """

    step_bytes: float
    seconds: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class About:
    """A system that is ready.

    Attributes:
        version: of the software.
        detail: what ran, in a few words, such as "packed" or "Q8_0, flash attention auto".
        weight_bytes: of all weights that a full step reads.
        extra: anything else worth a place in the report.
    """

    version: str | None
    detail: str
    weight_bytes: float
    extra: Mapping[str, Any] = field(default_factory=dict)


class System(Protocol):
    """One way of running the subject's weights. Methods are called in a process of the system's own."""

    def __init__(self, subject: MeasuredModel, setting: Setting) -> None: ...

    def prepare(self) -> About:
        """Load the weights.

        Raises:
            NotMeasured: it cannot be done here.
        """
        ...

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        """Decode `new_tokens` for every prompt; `method` is for Shoal alone."""
        ...

    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        """Seconds of `repeats` forwards of `positions` tokens after `prompt`, logits of all of them wanted."""
        ...

    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        """What a generation should read and take."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def traffic_of(subject: MeasuredModel, bits: float, kv_bytes: int) -> Traffic:
    """Bytes by arithmetic: every matrix at `bits` per weight, KV entries of `kv_bytes` each."""
    layer, head = subject.layer_weights(), subject.head_weights()
    kv = subject.kv_entries() * kv_bytes
    return Traffic(layer * bits / 8, head * bits / 8, kv, subject.windows(), layer_weights=layer)


def file_traffic(subject: MeasuredModel, kv_bytes: int) -> Traffic:
    """Bytes of a GGUF file's tensors as they lie in it, KV entries of `kv_bytes` each."""
    plain, facts = traffic_of(subject, 0.0, kv_bytes), subject.file
    layer = facts.layer_bytes / subject.text.num_hidden_layers
    return Traffic(layer, facts.head_bytes, plain.kv, plain.windows, plain.layer_weights)
