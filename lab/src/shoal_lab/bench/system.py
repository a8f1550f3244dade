"""What is measured: the protocol of a system, and the results it returns.

A system holds one set of weights in one number format, decodes greedily, and never stops before the asked length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal_lab.bench.model import MeasuredModel
from shoal_lab.components.cost import Traffic


class NotMeasured(Exception):
    """A system cannot run here; the message says why, and what would help."""


@dataclass(frozen=True)
class Setting:
    """How the weights are held and where.

    Attributes:
        dtype: of unquantised weights and of the computation.
        quant: "int8", "int4", "file" (a GGUF file's own numbers) or None.
        backend: executor of Shoal.
        device: such as "cpu" or "cuda:0".
        threads: CPU threads.
        compile_minutes: time limit of a baseline's warm-up.
        card_seconds: time for each step measurement of Shoal's cost card.
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
        """Format of the weights."""
        return self.quant or self.dtype


@dataclass(frozen=True)
class Run:
    """One measured generation.

    Attributes:
        times: seconds from the call until token i of every row was there.
        tokens: the first row's tokens.
        mean_layers: decoder layers per token, token 0 at L, as realised.
        ideal_speedup: by layers alone; 1 at full depth.
    """

    times: tuple[float, ...]
    tokens: tuple[int, ...]
    mean_layers: float
    ideal_speedup: float = 1.0


@dataclass(frozen=True)
class Expected:
    """What a generation should read and take.

    Attributes:
        step_bytes: mean bytes read per decoding step.
        seconds, tpot: prediction of the cost card; None if a system has none.
    """

    step_bytes: float
    seconds: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class About:
    """A system that is ready to run.

    Attributes:
        version: of the software.
        detail: what ran, such as "packed" or "Q8_0, flash attention auto".
        weight_bytes: size of all weights that a full step reads.
        extra: more fields of the report.
    """

    version: str | None
    detail: str
    weight_bytes: float
    extra: Mapping[str, Any] = field(default_factory=dict)


class System(Protocol):
    """Runs the model's weights. Its methods are called in a process of the system's own."""

    def __init__(self, model: MeasuredModel, setting: Setting) -> None: ...

    def prepare(self) -> About:
        """Load the weights.

        Raises:
            NotMeasured: the system cannot run here.
        """
        ...

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        """Decode `new_tokens` tokens for every prompt; `method` is for Shoal only."""
        ...

    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        """Seconds of each of `repeats` forwards of `positions` tokens after `prompt`, with logits for all of them."""
        ...

    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        """What a generation should read and take."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def traffic_of(model: MeasuredModel, bits: float, kv_bytes: int) -> Traffic:
    """Traffic by arithmetic: every matrix at `bits` per weight, KV entries of `kv_bytes` each."""
    layer, head = model.layer_weights(), model.head_weights()
    kv = model.kv_entries() * kv_bytes
    return Traffic(layer * bits / 8, head * bits / 8, kv, model.windows(), layer_weights=layer)


def file_traffic(model: MeasuredModel, kv_bytes: int) -> Traffic:
    """Traffic of a GGUF file: its tensors as stored, KV entries of `kv_bytes` each."""
    plain, facts = traffic_of(model, 0.0, kv_bytes), model.file
    layer = facts.layer_bytes / model.text.num_hidden_layers
    return Traffic(layer, facts.head_bytes, plain.kv, plain.windows, plain.layer_weights)
