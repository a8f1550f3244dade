"""transformers' own generate: sdpa attention, DynamicCache, greedy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from shoal import compat
from shoal.engine.loading.checkpoint import hush_libraries
from shoal.engine.loading.device import as_dtype
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.system import About, Expected, NotMeasured, Run, Setting, System, traffic_of
from shoal_lab.components.hf_cache import cache_name


class HFGenerate(System):
    """Measures `model.generate` of transformers."""

    detail = "generate, sdpa, DynamicCache"

    def __init__(self, model: MeasuredModel, setting: Setting) -> None:
        self.model, self.setting = model, setting
        self.dtype = as_dtype(setting.dtype)
        self.hf_model: Any = None

    @override
    def prepare(self) -> About:
        if self.setting.quant not in (None, FILE):
            raise NotMeasured(f"transformers runs these weights in {self.setting.dtype}, not in {self.setting.quant}")
        hush_libraries()
        self.hf_model = self.model.hf_model(self.dtype, self.setting.device)
        traffic = self._traffic()
        weight_bytes = traffic.layer * len(traffic.windows) + traffic.head
        detail = f"dequantised to {self.setting.dtype}, {self.detail}" if self.setting.quant == FILE else self.detail
        return About(compat.installed_version("transformers"), detail, weight_bytes)

    @override
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        stamps = Stamps()
        out = greedy(self.hf_model, prompts, new_tokens, streamer=stamps, **self.options())
        tokens = tuple(out[0, len(prompts[0]) :].tolist())
        times = tuple(moment - stamps.start for moment in stamps.times[1:])
        return Run(times, tokens, float(self.model.text.num_hidden_layers))

    def options(self) -> dict[str, Any]:
        """More arguments of `generate`."""
        return {}

    @override
    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.hf_model.config)
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
        ids = torch.tensor([list(tokens)], device=self.hf_model.device)
        given = {cache_name(self.hf_model.forward): cache}
        out = self.hf_model(ids, use_cache=True, logits_to_keep=wanted, **given)
        out.logits.argmax(-1).tolist()

    @override
    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        return Expected(self._traffic().mean_step(self.model.full_plan(), context, new_tokens, rows))

    def _traffic(self) -> Any:
        return traffic_of(self.model, self.dtype.itemsize * 8, self.dtype.itemsize)

    @override
    def close(self) -> None:
        self.hf_model = None


class HFGenerateCompiled(HFGenerate):
    """Uses a StaticCache and torch.compile on the decoding step; the first generation compiles."""

    detail = "generate, sdpa, StaticCache, torch.compile"

    @override
    def options(self) -> dict[str, Any]:
        from transformers import CompileConfig

        on_gpu = self.setting.device != "cpu"
        config = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
        # generate compiles on accelerators only, unless this private switch is set.
        config._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": config}

    @override
    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        raise NotMeasured("a forward of several positions is not compiled by generate")


class Stamps:
    """A streamer for transformers' generate that notes when tokens come and how many; the prompt comes first.

    Attributes:
        start: when the streamer was made, on `time.perf_counter`.
        times, sizes: moment and number of tokens of each call, all rows together.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Note that tokens have come."""
        self.times.append(time.perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Do nothing: no token is left over."""


def greedy(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, eos: Any = None, **options: Any) -> Any:
    """Decode greedily after prompts of one length with transformers' generate; all tokens [rows, length]."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1,
                          max_new_tokens=new_tokens, eos_token_id=eos, pad_token_id=0, **options)
