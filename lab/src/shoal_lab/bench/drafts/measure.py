"""The suite of drafts from its options to its report."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal import catalog
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import shown_name
from shoal.engine.loading.device import as_dtype
from shoal.engine.request import Request, chat_ids, prompt_ids
from shoal.engine.scheduling.stream import Stream
from shoal.errors import unknown
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.model.kv.cache import look, restorable
from shoal_lab.bench import idle, workloads
from shoal_lab.bench.baselines import llama_drafts
from shoal_lab.bench.drafts import stories, summary
from shoal_lab.bench.drafts.decoders import HF_OPTIONS, HFDecoder, LlamaDecoder, ShoalDecoder
from shoal_lab.bench.drafts.judge import difference
from shoal_lab.bench.drafts.suite import PLAIN, Decoded, DecodingSystem, DraftTask, together
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.rounds import check_rounds, in_order
from shoal_lab.bench.system import Setting

T = TypeVar("T")
_TRIES = 3
"""Most rounds measured, as a multiple of the rounds wanted, if other processes keep the machine busy."""
_CONTEXT = 2048
"""Least context for llama.cpp, in tokens of prompt and answer: with drafts it keeps the logits of all of them."""
_FRAME = 256
"""Most tokens of a question about stories, its chat template included."""


@dataclass(frozen=True)
class DraftsConfig:
    """What to measure.

    Attributes:
        kinds: names in `workloads.KINDS`, `workloads.PROBLEMS`, or `stories.STORIES`.
        data: folder with the texts.
        items: texts per kind.
        new_tokens: most tokens per text.
        rounds: how often each system decodes each text.
        baselines: names in `HF_OPTIONS` or `llama_drafts.NAMES`.
        exit_layer: for transformers' early exit; None for a third of the layers.
        assistant: folder, Hub id or file of the smaller model that drafts for other software.
        shortest: texts with a shorter answer are replaced by others.
        tolerance: nats between two tokens that may tie.
        minutes: begin no text after that time; None for no limit.
        seed: of the choice of texts.
        context: tokens of `stories.STORIES`.
    """

    kinds: Sequence[str]
    data: Path | None
    items: int = 4
    new_tokens: int = 64
    rounds: int = 1
    baselines: Sequence[str] = ()
    exit_layer: int | None = None
    assistant: str | None = None
    shortest: int = 32
    tolerance: float = 0.25
    minutes: float | None = None
    seed: int = 0
    context: int = 8192

    def __post_init__(self) -> None:
        check_rounds(self.rounds, self.minutes)
        if self.items < 1:
            raise ValueError(f"items is {self.items}; it must be at least 1")
        if self.new_tokens < 4:
            raise ValueError(f"new_tokens is {self.new_tokens}; time per token needs at least 4")
        if self.context < 1:
            raise ValueError(f"context is {self.context}; it must be at least 1 token of the stories")
        for baseline in self.baselines:
            if baseline not in (*HF_OPTIONS, *llama_drafts.NAMES):
                raise unknown("peer of this suite", baseline, [*HF_OPTIONS, *llama_drafts.NAMES])
        if any("draft-model" in baseline for baseline in self.baselines) != (self.assistant is not None):
            raise ValueError("a peer with a draft model and --assistant, the model that drafts for it, go together")
        workloads.check(self.data, self.kinds, more=[stories.STORIES])

    def asked(self) -> dict[str, Any]:
        """The options that must be equal for two runs to be comparable, as JSON values."""
        names = ["items", "new_tokens", "rounds", "shortest", "tolerance", "seed"]
        names += ["context"] * (stories.STORIES in self.kinds)
        return {**{name: getattr(self, name) for name in names}, "kinds": list(self.kinds)}

    @property
    def room(self) -> int:
        """Tokens of the longest prompt with its answer, about."""
        return max(_CONTEXT, self.context + _FRAME + self.new_tokens if stories.STORIES in self.kinds else 0)

    def prompts(self, kind: str, tokenizer: Any) -> Iterator[str]:
        """Requests of a kind, more than are wanted, because some get answers that are too short."""
        if kind == stories.STORIES:
            return stories.prompts(self.data, tokenizer, self.context, 10 * self.items, self.seed)
        return iter(workloads.prompts(self.data, kind, 10 * self.items, self.seed))


def measure(
    model: MeasuredModel,
    setting: Setting,
    methods: Mapping[str, Method],
    wish: DraftsConfig,
    found: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Decode texts with all systems until there are enough, and write the results into the report `found`.

    Args:
        model: the model.
        setting: number formats, device, threads.
        methods: methods by label; plain decoding is always measured.
        wish: what else is wanted.
        found: a report; the `texts` that it already holds are not decoded again.
        keep: called after every text.

    Raises:
        ValueError: texts are missing, the model is a shape, or the report is of other texts or systems.
    """
    if model.shape is not None:
        raise ValueError("guesses about a shape's random weights say nothing; give a model")
    until = math.inf if wish.minutes is None else time.monotonic() + 60 * wish.minutes
    quant = FILE if model.is_file and setting.quant is None else setting.quant
    engine = model.engine(as_dtype(setting.dtype), setting.device, setting.backend, quant)
    systems: dict[str, DecodingSystem] = {PLAIN: ShoalDecoder(engine, Full())}
    systems |= {label: ShoalDecoder(engine, method) for label, method in methods.items() if label != PLAIN}
    exact = [PLAIN, *(name for name, method in methods.items() if engine.recipe(method, 9).exact_to == "full")]
    systems |= _baselines(model, setting, engine, wish)
    asked = {**wish.asked(), "model": shown_name(engine.model_name), "systems": list(systems),
             "executor": type(engine.runner).__name__, "computes_in": str(engine.runner.dtype).removeprefix("torch.")}
    if found.setdefault("asked", asked) != asked:
        raise ValueError(f"the report was measured with other settings: {found['asked']}; name another file")
    found |= {"exact": exact, "stopped_early": False, "texts": found.get("texts", [])}
    for kind, prompt in _wanted(wish, engine.tokenizer, found["texts"]):
        if time.monotonic() > until:
            found["stopped_early"] = True
            break
        found["texts"].append({"kind": kind, "prompt": _fingerprint(prompt), **_text(engine, systems, prompt, wish,
                                                                                    len(found["texts"]))})
        keep()
    _sum_up(found)
    if not found["results"]:
        raise ValueError("no text was decoded in the time given, or none had an answer that is long enough")


def _sum_up(found: dict[str, Any]) -> None:
    asked = found["asked"]
    found["results"] = summary.rows(found["texts"], asked["kinds"], asked["systems"])
    found["lossless"] = _lossless(found)


def _lossless(found: Mapping[str, Any]) -> dict[str, int]:
    """How many answers of lossless methods equal plain decoding's, differ by a tie, or differ otherwise."""
    rows = [row for row in found["results"] if row["system"] in found["exact"] and row["system"] != PLAIN]
    count = {name: sum(row[key] for row in rows) for name, key in
             (("answers", "texts"), ("equal", "equal"), ("ties", "ties"))}
    return {**count, "wrong": count["answers"] - count["equal"] - count["ties"]}


def _wanted(wish: DraftsConfig, tokenizer: Any, done: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Texts of all kinds in turn until each kind has enough usable texts: a run cut short has seen every kind."""
    waiting = {kind: wish.prompts(kind, tokenizer) for kind in wish.kinds}
    known = {(text["kind"], text["prompt"]) for text in done}
    while waiting:
        for kind in sorted(waiting, key=lambda kind: len(summary.usable(done, kind))):
            prompt = next((one for one in waiting[kind] if (kind, _fingerprint(one)) not in known), None)
            if prompt is None or len(summary.usable(done, kind)) >= wish.items:
                del waiting[kind]
            else:
                yield kind, prompt


def _fingerprint(prompt: str) -> str:
    """A short hash that tells prompts apart."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def _text(
    engine: Engine, systems: Mapping[str, DecodingSystem], prompt: str, wish: DraftsConfig, number: int
) -> dict[str, Any]:
    """Decode one text with all systems, as JSON values; the first system decodes it once more before, to warm up."""
    task, plain = _begun(engine, prompt, wish.new_tokens)
    about = {"prompt_tokens": len(task.prompt), "new_tokens": len(plain)}
    if len(plain) < min(wish.shortest, wish.new_tokens):
        return {**about, "too_short": True}
    if not number:
        together(task, systems)
    spare = max(0, (os.cpu_count() or 1) - torch.get_num_threads()) if engine.runner.device.type == "cpu" else 0
    rounds = _quietest(lambda again: together(task, {name: systems[name] for name in
                                                     in_order(list(systems), number + again)}), wish.rounds, spare)
    return {**about, "busy": [busy for busy, _ in rounds],
            "systems": {name: _system(engine, task, plain, [runs[name] for _, runs in rounds], wish.tolerance)
                        for name in systems}}


def _quietest(decode: Callable[[int], T], rounds: int, spare: int = 0) -> list[tuple[float, T]]:
    """Results of `rounds` rounds, each with the cores that others kept busy: the quietest of up to `spare` more."""
    made: list[tuple[float, T]] = []
    while len(made) < _TRIES * rounds and sum(busy <= idle.BUSY + spare for busy, _ in made) < rounds:
        before = idle.snapshot()
        runs = decode(len(made))
        made.append((idle.others(before, idle.snapshot()) or 0.0, runs))
    return sorted(made, key=lambda one: one[0])[:rounds]


def _begun(engine: Engine, prompt: str, new_tokens: int) -> tuple[DraftTask, tuple[int, ...]]:
    """Tokenise a text, as a user's message if the model has a chat template, and decode it plainly."""
    chat = getattr(engine.tokenizer, "chat_template", None)
    request = chat_ids([{"role": "user", "content": prompt}], engine.tokenizer) if chat else prompt
    ids = prompt_ids(request, engine.tokenizer, engine.runner.vocab_size, engine.runner.max_positions)
    rows = engine.seqs([ids], Request.from_options({"max_new_tokens": new_tokens}))
    cache = engine.cache_for(rows, new_tokens)
    stream = Stream(engine, rows, cache)
    next(stream)
    seen = look(cache, 0) if cache.seqs and len(ids) > 1 else None
    held = None if seen is None else seen.copied()
    for _ in stream:
        pass
    task = DraftTask(tuple(ids), new_tokens, held if held and restorable([held], len(ids) - 1) else None)
    return task, stream.result.tokens


def _system(
    engine: Engine, task: DraftTask, plain: Sequence[int], runs: Sequence[Decoded], tolerance: float
) -> dict[str, Any]:
    """Figures of one system on one text."""
    apart = [found for run in runs if (found := difference(engine, task, plain, run.tokens, tolerance)) is not None]
    worst = min(apart, key=lambda found: (found.tie, -found.nats), default=None)
    last = runs[-1]
    return {
        "seconds_per_token": [run.per_token for run in runs if run.per_token is not None],
        "tokens": len(last.tokens),
        "tokens_per_forward": last.per_forward,
        "drafted": last.drafted,
        "accepted": last.accepted,
        "ideal_speedup": last.ideal,
        "difference": None if worst is None else worst.to_dict(),
    }


def _baselines(model: MeasuredModel, setting: Setting, engine: Engine, wish: DraftsConfig) -> dict[str, DecodingSystem]:
    """Baselines by name."""
    decoders: dict[str, DecodingSystem] = {}
    small = None if wish.assistant is None else MeasuredModel(model=catalog.find(wish.assistant))
    for name in (baseline for baseline in wish.baselines if baseline in llama_drafts.NAMES):
        if not model.is_file or (small is not None and not small.is_file):
            raise ValueError(f"{name} reads GGUF files; give one as --model, and as --assistant")
        assistant = None if small is None else str(small.model)
        llama = llama_drafts.LlamaDrafts(str(model.model), wish.room, setting.threads, name, assistant)
        decoders[name] = LlamaDecoder(llama, engine.eos_token_ids)
    return decoders | _transformers(model, setting, engine, wish, small)


def _transformers(
    model: MeasuredModel, setting: Setting, engine: Engine, wish: DraftsConfig, small: MeasuredModel | None
) -> dict[str, DecodingSystem]:
    """Transformers' own decoding, plain and assisted."""
    baselines = [baseline for baseline in wish.baselines if baseline in HF_OPTIONS]
    if not baselines:
        return {}
    dtype = as_dtype(setting.dtype)
    hf_model = model.hf_model(dtype, setting.device)
    filled: dict[str, Any] = {"assistant_early_exit": wish.exit_layer or max(1, engine.runner.num_layers // 3)}
    if "hf-draft-model" in baselines and small is not None:
        filled["assistant_model"] = small.hf_model(dtype, setting.device)
    eos = sorted(engine.eos_token_ids)
    options = {name: {key: filled.get(key, value) for key, value in HF_OPTIONS[name].items()} for name in baselines}
    return {name: HFDecoder(hf_model, given, eos) for name, given in options.items()}
