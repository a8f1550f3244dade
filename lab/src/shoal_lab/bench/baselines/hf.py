"""transformers' own generate: sdpa attention, DynamicCache, greedy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal import compat
from shoal.engine.loading.checkpoint import hush_libraries
from shoal.engine.loading.device import as_dtype
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.system import About, Expected, NotMeasured, Run, Setting, traffic_of


class HFGenerate:
    """See `shoal_lab.bench.system.System`."""

    detail = "generate, sdpa, DynamicCache"

    def __init__(self, subject: MeasuredModel, setting: Setting) -> None:
        self.subject, self.setting = subject, setting
        self.dtype = as_dtype(setting.dtype)
        self.model: Any = None

    def prepare(self) -> About:
        """Load the model."""
        if self.setting.quant not in (None, FILE):
            raise NotMeasured(f"transformers runs these weights in {self.setting.dtype}, not in {self.setting.quant}")
        hush_libraries()
        self.model = self.subject.hf_model(self.dtype, self.setting.device)
        traffic = self._traffic()
        weight_bytes = traffic.layer * len(traffic.windows) + traffic.head
        detail = f"dequantised to {self.setting.dtype}, {self.detail}" if self.setting.quant == FILE else self.detail
        return About(compat.installed_version("transformers"), detail, weight_bytes)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        """Decode through `model.generate`; a streamer takes the times."""
        stamps = Stamps()
        out = greedy(self.model, prompts, new_tokens, streamer=stamps, **self.options())
        tokens = tuple(out[0, len(prompts[0]) :].tolist())
        times = tuple(moment - stamps.start for moment in stamps.times[1:])
        return Run(times, tokens, float(self.subject.text.num_hidden_layers))

    def options(self) -> dict[str, Any]:
        """More arguments of `generate`."""
        return {}

    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        """Time single forwards after a prefill."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        tokens = [prompt[i % len(prompt)] for i in range(positions)]
        with torch.inference_mode():
            self._step(prompt, cache, wanted=1)
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                self._step(tokens, cache, wanted=positions)
                times.append(time.perf_counter() - start)
                cache.crop(-positions)
        return times

    def _step(self, tokens: Sequence[int], cache: Any, wanted: int) -> None:
        ids = torch.tensor([list(tokens)], device=self.model.device)
        given = {compat.cache_name(self.model.forward): cache}
        out = self.model(ids, use_cache=True, logits_to_keep=wanted, **given)
        out.logits.argmax(-1).tolist()

    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        """Bytes of a full step."""
        return Expected(self._traffic().mean_step(self.subject.full_plan(), context, new_tokens, rows))

    def _traffic(self) -> Any:
        return traffic_of(self.subject, self.dtype.itemsize * 8, self.dtype.itemsize)

    def close(self) -> None:
        """Let the model go."""
        self.model = None


class HFGenerateCompiled(HFGenerate):
    """With a StaticCache and torch.compile on the decoding step; the first generation compiles."""

    detail = "generate, sdpa, StaticCache, torch.compile"

    def options(self) -> dict[str, Any]:
        """Static cache, and compilation on any device."""
        from transformers import CompileConfig

        on_gpu = self.setting.device != "cpu"
        config = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
        # By itself generate compiles on accelerators only; this switch is the one that lifts that.
        config._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": config}

    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        """Refused: generate compiles a step of one token and nothing else."""
        raise NotMeasured("a forward of several positions is not compiled by generate")


class Stamps:
    """A streamer of transformers' generate that notes when it is given how many tokens: the prompt first.

    Attributes:
        start: when it was made, on `time.perf_counter`.
        times, sizes: moments, and tokens of all rows.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """More tokens."""
        self.times.append(time.perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Nothing is left over."""


def greedy(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, eos: Any = None, **options: Any) -> Any:
    """The likeliest tokens after prompts of one length by transformers' generate."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1,
                          max_new_tokens=new_tokens, eos_token_id=eos, pad_token_id=0, **options)
