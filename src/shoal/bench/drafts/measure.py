"""The suite of drafts from its options to its report: which texts, which systems, replayed or free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import catalog
from shoal.bench import words, workloads
from shoal.bench.drafts import suite
from shoal.bench.drafts.speakers import HF_OPTIONS, HFSpeaker, ShoalSpeaker
from shoal.bench.drafts.suite import DecodingSystem, DraftTask
from shoal.bench.rounds import check_rounds
from shoal.bench.subject import MeasuredModel
from shoal.bench.system import Setting
from shoal.engine.device import as_dtype
from shoal.engine.engine import Engine
from shoal.errors import unknown
from shoal.methods.base import Method
from shoal.methods.full import Full


@dataclass(frozen=True)
class DraftsConfig:
    """What is to be measured.

    Attributes:
        workloads: names in `workloads.WORKLOADS`, or `workloads.PROBLEMS`.
        data: folder with the recorded texts.
        items: texts of each workload.
        new_tokens: most tokens per text.
        rounds: how often each text is decoded by each system.
        peers: names in `HF_OPTIONS`.
        exit_layer: of transformers' early exit; None for a third of the layers.
        assistant: folder, Hub id or name of the smaller model that transformers' drafts come from.
    """

    workloads: Sequence[str]
    data: Path | None
    items: int = 4
    new_tokens: int = 128
    rounds: int = 1
    peers: Sequence[str] = ()
    exit_layer: int | None = None
    assistant: str | None = None

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        if self.items < 1:
            raise ValueError(f"items is {self.items}; it must be at least 1")
        if self.new_tokens < 2:
            raise ValueError(f"new_tokens is {self.new_tokens}; time per token needs at least 2")
        for peer in self.peers:
            if peer not in HF_OPTIONS:
                raise unknown("peer of this suite", peer, list(HF_OPTIONS))
        if ("hf-draft-model" in self.peers) != (self.assistant is not None):
            raise ValueError("the peer hf-draft-model and --assistant, the model that drafts for it, go together")
        workloads.check(self.data, self.workloads)


def measure(
    subject: MeasuredModel, setting: Setting, methods: Mapping[str, Method], wish: DraftsConfig
) -> dict[str, Any]:
    """Decode all texts by all systems; JSON values.

    Raises:
        ValueError: texts that are not there, or methods and peers that cannot follow a recorded answer.
    """
    texts = workloads.load(wish.data, wish.workloads, wish.items)
    engine = subject.engine(as_dtype(setting.dtype), setting.device, setting.backend, setting.quant)
    replay = subject.shape is not None
    if replay and wish.peers:
        raise ValueError("transformers cannot be held to a recorded answer; give a model, or leave the peers out")
    tasks = {name: _tasks(engine, found, wish.new_tokens, replay) for name, found in texts.items()}
    speakers: dict[str, DecodingSystem] = {suite.PLAIN: ShoalSpeaker(engine, Full())}
    speakers |= {label: ShoalSpeaker(engine, method) for label, method in methods.items() if label != suite.PLAIN}
    speakers |= _peers(subject, setting, engine, wish)
    return {
        "way": "replay" if replay else "free",
        "workloads": {name: {"texts": len(found)} for name, found in tasks.items()},
        "rounds": wish.rounds,
        "results": suite.run(tasks, speakers, wish.rounds),
    }


def _tasks(engine: Engine, texts: Sequence[workloads.Text], new_tokens: int, replay: bool) -> list[DraftTask]:
    if not replay:
        encode = engine.tokenizer
        room = (engine.stack.max_positions or 1 << 30) - new_tokens
        return [DraftTask(tuple(encode(one.prompt)["input_ids"][-room:]), None, new_tokens) for one in texts]
    tokenizer = words.train(part for one in texts for part in (one.prompt, one.answer))
    tasks = []
    for one in texts:
        answer = tuple(tokenizer.encode(one.answer).ids[:new_tokens])
        if len(answer) > 1:
            tasks.append(DraftTask(tuple(tokenizer.encode(one.prompt).ids), answer, len(answer)))
    return tasks


def _peers(subject: MeasuredModel, setting: Setting, engine: Engine, wish: DraftsConfig) -> dict[str, DecodingSystem]:
    if not wish.peers:
        return {}
    model = subject.hf_model(as_dtype(setting.dtype), setting.device)
    layer = wish.exit_layer or max(1, engine.stack.num_layers // 3)
    filled: dict[str, Any] = {"assistant_early_exit": layer}
    if wish.assistant is not None:
        small = MeasuredModel(model=catalog.find(wish.assistant))
        filled["assistant_model"] = small.hf_model(as_dtype(setting.dtype), setting.device)
    speakers: dict[str, DecodingSystem] = {}
    for peer in wish.peers:
        options = {key: filled[key] if value is None else value for key, value in HF_OPTIONS[peer].items()}
        speakers[peer] = HFSpeaker(model, options, sorted(engine.eos_token_ids))
    return speakers
