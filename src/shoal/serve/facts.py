"""What a server tells of a model, in memory or only in its files: `/props`, Ollama's `/api/show` and its lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal import __version__
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.engine.loading.form import FileForm
from shoal.engine.loading.generation_config import eos_ids, filled
from shoal.engine.loading.gguf_checkpoint import spoken_by
from shoal.model.config import context_of, layers_of
from shoal.model.hearing import HEARING
from shoal.model.vision import VISION
from shoal.serve.protocol.infill import marks_in
from shoal.serve.protocol.thoughts import tags_of
from shoal.serve.protocol.wire import Json


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without its weights.

    Attributes:
        family: the type of its config.
        layers: number of decoder layers.
        positions: the context length; None for no limit.
        vocabulary: number of tokens.
        template: of chats; None without one.
        fills: whether it has tokens around a gap.
        sees: whether it reads pictures.
        hears: whether it reads sounds in chats.
        sampling: what its makers recommend.
        sampling_from: where that stands.
        ends: ids that end an answer.
        changes: what was done to another model to make this one, in words.
        form: how its weights lie in its files.
    """

    family: str
    layers: int
    positions: int | None
    vocabulary: int
    template: str | None
    fills: bool
    sees: bool
    hears: bool
    sampling: Mapping[str, float]
    sampling_from: str
    ends: tuple[int, ...]
    changes: str
    form: FileForm

    @classmethod
    def of_engine(cls, engine: Engine) -> ModelFacts:
        """Of a model in memory."""
        runner, spoken = engine.runner, spoken_by(engine.tokenizer)
        return cls(engine.family, runner.num_layers, runner.max_positions, runner.vocab_size, spoken.template,
                   marks_in(spoken.tokens) is not None, engine.vision is not None, engine.hearing is not None,
                   engine.sampling, engine.sampling_from, tuple(sorted(engine.eos_token_ids)), engine.changes,
                   engine.form())

    @classmethod
    def of_files(cls, files: Checkpoint) -> ModelFacts:
        """Of a model's files; ValueError where they cannot be read."""
        config, generation, spoken = files.config(), files.generation_config(), files.spoken()
        text, (sampling, origin) = config.get_text_config(), files.sampling(generation)
        ends = eos_ids(generation, config, spoken.tokenizer, **files.ends())
        sees = config.model_type in VISION or files.sight(lambda: dict.fromkeys(spoken.tokens, 0))[0] is not None
        return cls(str(config.model_type), layers_of(text), context_of(text), text.vocab_size, spoken.template,
                   marks_in(spoken.tokens) is not None, sees, config.model_type in HEARING, sampling,
                   origin, tuple(sorted(ends)), files.changes, files.form())

    def props(self, name: str) -> Json:
        """What `/props` says; what only a model in memory has is null."""
        return {
            "model_alias": name, "build_info": f"shoal {__version__}", "total_slots": None,
            "chat_template": self.template, "modalities": {"vision": self.sees, "audio": self.hears},
            "default_generation_settings": {"n_ctx": self.positions, "params": filled({}, self.sampling),
                                            "params_from": self.sampling_from or "default"},
            "num_layers": self.layers, "vocab_size": self.vocabulary, "eos_token_ids": [*self.ends],
            "changes": self.changes, "card": None,
        }

    def show(self, name: str, made: str, parent: str = "") -> Json:
        """What `/api/show` says, in the names of Ollama; `made` is when, `parent` an adapter's model."""
        template, family = str(self.template or ""), self.family
        able = {"completion": True, "tools": "tools" in template, "insert": self.fills, "vision": self.sees,
                "thinking": tags_of(template) is not None}
        parameters = [f"{name} {value}" for name, value in filled({}, self.sampling).items()]
        return {
            "modelfile": f"FROM {name}", "parameters": "\n".join(parameters), "template": template,
            "details": self.details(parent), "modified_at": made,
            "model_info": {"general.architecture": family, "general.parameter_count": self.form.parameters or None,
                           f"{family}.block_count": self.layers, f"{family}.context_length": self.positions,
                           f"{family}.vocab_size": self.vocabulary},
            "capabilities": [name for name, can in able.items() if can],
        }

    def details(self, parent: str = "") -> Json:
        """What lists say beside a model's name."""
        return {"parent_model": parent, "format": self.form.format, "family": self.family, "families": [self.family],
                "parameter_size": self.form.size, "quantization_level": self.form.rounding}


def model_line(name: str, made: str, size: int, facts: ModelFacts | None, parent: str = "") -> Json:
    """A model as Ollama's lists have it: when it was made, its bytes, its facts where they are known."""
    details = {"parent_model": parent} if facts is None else facts.details(parent)
    return {"name": name, "model": name, "modified_at": made, "digest": "", "size": size, "details": details}
