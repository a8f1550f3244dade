"""Turns attention layers of a Llama model into gated delta layers, trained to say what the model says.

Two stages, as in MOHAWK (arXiv 2408.10189): first each new layer learns what its attention gives for the inputs that
the model itself gives it, all layers at once; then the new layers learn together, by the divergence of the hybrid's
distributions from the model's. All else stays, so a hybrid is stored as its new layers alone (`hybrid_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from shoal.errors import Unsupported
from shoal_lab.train.corpus import AnsweredText, Corpus, Tell
from shoal_lab.train.delta_mixer import DeltaMixer
from shoal_lab.train.divergence import AnswerDivergence
from shoal_lab.train.hybrid_files import delta_layers, gated_eps
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, CutHead, Guessed, TextBatch, TrainedModule

Stage = Literal["layers", "whole"]
_SAMPLE = 24
"""Texts from which first weights are computed."""
_HELD = 24
"""Held-out texts, about: a look at them must cost little."""
_EVERY = 50
"""Steps between looks at those."""


class HybridModule(TrainedModule):
    """The new layers beside the model whose attention they replace.

    Args:
        base: the LM head of the model.
        model: the model, transformers' Llama; it is not changed.
        stage: what the loss compares: each layer with its attention, or the whole hybrid with the model.
        half: whether the model's matrices are bfloat16, so that products are computed in it.

    Raises:
        Unsupported: the model is no Llama, or has biases.
    """

    kind: ClassVar[str] = "hybrid"
    guesses: ClassVar[bool] = False

    def __init__(self, base: Base, model: Any, stage: Stage, half: bool = False) -> None:
        super().__init__()
        config = model.config
        if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
            what, why = f"a hybrid of a {config.model_type} model", "only Llama's layers without biases are known"
            raise Unsupported(what, why, "Give a Llama model, such as SmolLM2-135M-Instruct")
        self.stage, self._half = stage, half
        self._model = (model.requires_grad_(False),)  # in a tuple: it is not trained
        self.mixers = nn.ModuleDict({str(layer): DeltaMixer(config.hidden_size, config.num_attention_heads,
                                                            config.head_dim, gated_eps(config))
                                     for layer in delta_layers(config.num_hidden_layers)})
        self.head = CutHead(base, range(config.vocab_size))

    @torch.no_grad()
    def start(self, corpus: Corpus) -> list[float]:
        """Take first weights from attention; returns the share of its outputs' squares that each layer misses."""
        texts = sorted(corpus.answers(0, validation=False), key=lambda one: -len(one.tokens))[:_SAMPLE]
        length = min(len(one.tokens) for one in texts)
        tokens, found = torch.stack([one.tokens[:length] for one in texts]), []
        angles = self._angles(tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            taught = list(self._taught(tokens))
        for mixer, attention, x, wanted in taught:
            found.append(mixer.start_from(attention, x, wanted, angles))
        return found

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        if self.stage == "layers" and torch.is_grad_enabled():
            inside = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
            apart = [_missed(mixer(x)[0][inside], wanted[inside]) for mixer, _, x, wanted in self._taught(batch.tokens)]
            return torch.stack(apart).mean(), [Guessed(inside, inside)]
        asked = batch.guessed_from(0, 1)
        loss, tokens = self.head.distilled(self.read(batch.tokens)[asked], batch.states[asked])
        right = torch.zeros_like(asked)
        right[asked] = tokens == batch.tokens.roll(-1, 1)[asked]
        return loss, [Guessed(right, asked)]

    def read(self, tokens: Tensor) -> Tensor:
        """The hybrid's inputs of the LM head, float32 [B, T, hidden], for int64 tokens [B, T]."""
        model, angles = self._model[0].model, self._angles(tokens)
        x = model.embed_tokens(tokens).float()
        for number, layer in enumerate(model.layers):
            mixer = self._mixer(number) or layer.self_attn
            x = x + mixer(layer.input_layernorm(x), position_embeddings=angles, attention_mask=None)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        found: Tensor = model.norm(x).float()
        return found

    def _taught(self, tokens: Tensor) -> Iterator[tuple[DeltaMixer, Any, Tensor, Tensor]]:
        """Each new layer with its attention, that one's inputs and its outputs, in the model's own pass."""
        model, angles = self._model[0].model, self._angles(tokens)
        x = model.embed_tokens(tokens).float()
        for number, layer in enumerate(model.layers):
            with torch.no_grad():
                normed = layer.input_layernorm(x)
                out = layer.self_attn(normed, position_embeddings=angles, attention_mask=None)[0]
            if (mixer := self._mixer(number)) is not None:
                yield mixer, layer.self_attn, normed, out
            with torch.no_grad():
                x = x + out
                x = x + layer.mlp(layer.post_attention_layernorm(x))

    def _mixer(self, layer: int) -> DeltaMixer | None:
        return dict(self.mixers.items()).get(str(layer))  # type: ignore[return-value]

    def _angles(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        model, places = self._model[0].model, torch.arange(tokens.shape[1])[None]
        found: tuple[Tensor, Tensor] = model.rotary_emb(self.head.rows, places)
        return found

    @torch.no_grad()
    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Held-out texts: `nats` per token of the model and of the hybrid, and how far the hybrid is from the model."""
        apart, nats, count = AnswerDivergence(), torch.zeros(2), 0
        for batch in held_out:
            with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
                read = self.read(batch.tokens)
            apart.add(batch, read, self.head.rows)
            asked = batch.guessed_from(0, 1)
            came = batch.tokens.roll(-1, 1)[asked]
            for place, states in enumerate((batch.states[asked], read[asked])):
                for some, tokens in zip(states.split(512), came.split(512), strict=True):
                    nats[place] += cross_entropy(some @ self.head.rows.T, tokens, reduction="sum")
            count += len(came)
        model, hybrid = (round(float(one) / max(1, count), 4) for one in nats)
        return {"held_out": {"places": count, "nats": {"model": model, "hybrid": hybrid}, **apart.means()}}

    @override
    def shape(self) -> dict[str, int]:
        return {"layers": len(self.mixers), "parameters": sum(one.numel() for one in self.mixers.parameters()),
                "stage": ("layers", "whole").index(self.stage)}

    def tensors(self) -> dict[str, Tensor]:
        """The new layers' tensors by the names of transformers' `qwen3_5_text`, the last matrix as in the Llama."""
        mixers = {layer: cast("DeltaMixer", mixer) for layer, mixer in self.mixers.items()}
        return {f"model.layers.{layer}.linear_attn.{name}": tensor.detach() for layer, mixer in mixers.items()
                for name, tensor in mixer.tensors().items()}

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> None:
        """Go on from tensors as `tensors` gives them; ValueError where they are of another model."""
        mine = self.tensors()
        if {name: one.shape for name, one in mine.items()} != {name: one.shape for name, one in tensors.items()}:
            raise ValueError("the layers to start from are of another model; give the model that they were made for")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


class Corpora(Corpus):
    """Several corpora as one, of which few texts are held out."""

    def __init__(self, folders: Sequence[Path]) -> None:
        found = [Corpus(folder) for folder in folders]
        self.whole, self.facts = True, found[0].facts
        self.shards = [shard for one in found for shard in one.shards]

    @override
    def validation(self, most: int = _HELD) -> list[AnsweredText]:
        return super().validation(most)


def pieces(paths: Sequence[Path], tokenizer: Any, length: int, seed: int) -> list[list[int]]:
    """Texts cut into pieces of `length` tokens, in random order; ValueError where a file cannot be read."""
    found: list[list[int]] = []
    for path in paths:
        try:
            ids = tokenizer(path.read_text("utf-8-sig"), verbose=False)["input_ids"]
        except (OSError, UnicodeError) as error:
            raise ValueError(f"a text cannot be read from {str(path)!r}: {error}") from None
        found += [ids[first : first + length] for first in range(0, len(ids), length)]
    Random(seed).shuffle(found)
    return found


def train(
    base: Base, model: Any, corpus: Corpus, stages: Mapping[Stage, Training], out: Path,
    start: dict[str, Tensor] | None, tell: Tell, late: Callable[[], bool], half: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train the stages one after the other, or go on where a run was stopped.

    Args:
        base: the LM head of the model.
        model: transformers' model, with matrices in bfloat16 if `half`.
        corpus: texts with the model's states.
        stages: how each is trained, in order; each keeps its checkpoint in a folder of its name in `out`.
        out: the folder.
        start: layers to start from, instead of the attention's.
        tell: receives progress messages.
        late: whether to leave off.
        half: whether products are computed in bfloat16.

    Returns:
        The layers' tensors, and what a card says of the run.
    """
    tensors, facts = start, dict[str, Any]()
    for stage, how in stages.items():
        module, folder = HybridModule(base, model, stage, half), out / stage
        folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(module, corpus, how, folder, tell)
        if trainer.run.step:
            tell(f"{stage}: going on at step {trainer.run.step} of {trainer.run.steps}")
        elif tensors is not None:
            module.take(tensors)
        else:
            missed = module.start(corpus)
            tell(f"first weights miss {sum(missed) / len(missed):.3f} of what attention gives")
        run, tensors = trainer.train(late, every=_EVERY), module.tensors()
        facts[stage] = {"steps": [run.step, run.steps], "tokens": run.tokens, "minutes": round(run.seconds / 60, 1),
                        "losses": [round(loss, 4) for loss in run.losses], **asdict(how)}
        if not run.done:
            break
    assert tensors is not None
    return tensors, {"stages": facts, **module.facts(trainer.held_out())}


def _missed(found: Tensor, wanted: Tensor) -> Tensor:
    """The share of the squares of what is wanted that was missed."""
    return (found.float() - wanted.float()).square().sum() / wanted.float().square().sum()
