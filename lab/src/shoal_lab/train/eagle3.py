"""Trains a layer in EAGLE-3's form, which reads what enters several of the model's layers (arXiv 2503.01840).

One matrix joins these states. Attention reads the next token's embedding beside them, each normed; after the first
guess the layer's own outputs take their place (training-time test). Only its distribution is pulled towards the
model's own. Unlike the paper, the head stays the model's rows, and training starts from least squares. What is written
is a folder in SafeAILab's layout, which other servers read, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm
from typing_extensions import override

from shoal import __version__
from shoal.engine.engine import Engine
from shoal.speculative.drafter_files import CONFIG
from shoal.speculative.layer_head import LayerShape
from shoal_lab.train import files
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.eagle import RIDGE, SHARDS, LayerModule, default_shape
from shoal_lab.train.export import MODEL_CARD
from shoal_lab.train.part import Base, TextBatch

JOIN, LAYER = "fc.weight", "layers.0."
STATE_NORM, TOKEN_NORM = f"{LAYER}hidden_norm.weight", f"{LAYER}input_layernorm.weight"
TENSORS = "model.safetensors"


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The paper's: an early, a middle and a late layer.

    Raises:
        ValueError: the model has too few layers for three different ones.
    """
    found = (2, num_layers // 2, num_layers - 3)
    if not found[0] < found[1] < found[2]:
        raise ValueError(f"the model has {num_layers} layers, too few for the layers 2, L/2 and L-3; name others by "
                         "--taps")
    return found


class TappedModule(LayerModule):
    """Trains the layer.

    Args:
        base, shape, ids, rollout, seed: see `LayerModule`.
        taps: the model's layers whose inputs it reads.
        hidden: size of one of these.
    """

    def __init__(
        self, base: Base, shape: LayerShape, ids: Sequence[int], taps: Sequence[int], hidden: int, rollout: int = 3,
        seed: int = 0,
    ) -> None:
        wide = shape.heads * shape.head_dim
        beside = dict.fromkeys((f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"), (wide, 2 * shape.hidden))
        sizes = shape.sizes() | beside | {JOIN: (shape.hidden, len(taps) * hidden), STATE_NORM: (shape.hidden,)}
        super().__init__(base, shape, sizes, ids, rollout, seed)
        self.taps = (*taps,)

    @override
    @classmethod
    def fresh(cls, base: Base, corpus: Corpus, ids: Sequence[int], depths: int | None, seed: int) -> TappedModule:
        hidden = corpus.answers(0, validation=False)[0].states.shape[1]
        shape = default_shape(hidden)
        module = cls(base, shape, ids, corpus.taps, hidden, depths or 3, seed)
        matrix, sizes = linear_start(base, corpus, shape.eps)
        q, k, v, o = (module[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkvo")
        with torch.no_grad():
            module[JOIN].copy_(matrix[:, hidden:])
            module["norm.weight"].copy_(sizes)
            # Equal queries and keys of size 1 let each place see itself most: so the next token's share comes in.
            q.normal_(std=q.shape[1] ** -0.5, generator=torch.Generator().manual_seed(seed))
            k.copy_(q)
            v.copy_(pad(matrix[:, :hidden], (0, shape.hidden)))
            o.copy_(torch.eye(len(o)))
            module[f"{LAYER}mlp.down_proj.weight"].zero_()
        return module

    @override
    def outputs(self, batch: TextBatch) -> list[Tensor]:
        assert batch.tapped is not None
        embedded = self._normed(self._base.embed(batch.tokens[:, 1:]), TOKEN_NORM)
        states, found = linear(batch.tapped[:, :-1], self[JOIN]).float(), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(self._rollout):
            x = states + self._attention(torch.cat([embedded, self._normed(states, STATE_NORM)], -1), keys, values)
            x = x + self._mlp(self._normed(x, f"{LAYER}post_attention_layernorm.weight"))
            found.append(self._normed(x, "norm.weight"))
            states = pad(x, (0, 0, 1, 0))[:, :-1].float()
        return found

    @override
    def exported(self) -> dict[str, Tensor]:
        held = {name.replace(LAYER, "midlayer."): self[name].detach() for name in self._names}
        return {**held, "lm_head.weight": self.head.rows}

    @override
    def shape(self) -> dict[str, int]:
        sizes = {name: getattr(self._shape, name) for name in ("hidden", "ffn", "heads", "head_dim")}
        return sizes | {f"tap{number}": tap for number, tap in enumerate(self.taps)}

    def config(self, vocabulary: int) -> dict[str, Any]:
        """The config of the files, for a model of that many tokens."""
        shape = self._shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn, "num_hidden_layers": 1, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads, "head_dim": shape.head_dim, "hidden_act": "silu",
            "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "max_position_embeddings": 1 << 20,
            "vocab_size": vocabulary, "draft_vocab_size": len(self.head.ids), "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": [*self.taps],
        }


@torch.no_grad()
def linear_start(base: Base, corpus: Corpus, eps: float) -> tuple[Tensor, Tensor]:
    """The best linear guess of a state from the normed embedding of its token and what entered the taps before it.

    Returns:
        A matrix [D, D + k D] with outputs of mean square 1, and the root mean squares of the states [D], float32.
    """
    squares = products = sizes = torch.zeros((), dtype=torch.float64)
    count = 0
    for shard in range(min(SHARDS, len(corpus.shards))):
        for one in corpus.answers(shard, validation=False):
            assert one.tapped is not None
            first = max(0, one.prompt - 1)
            embedded, states = base.embed(one.tokens[first + 1 :]), one.states[first + 1 :].double()
            known = torch.cat([rms_norm(embedded, embedded.shape[-1:], eps=eps), one.tapped[first:-1]], -1).double()
            squares = squares + known.T @ known
            products = products + known.T @ states
            sizes = sizes + states.square().sum(0)
            count += len(known)
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
    matrix: Tensor = torch.linalg.solve(squares + ridge, products).T
    roots = (sizes / count).sqrt().clamp(min=1e-6)
    return (matrix / roots[:, None]).float(), roots.float()


def export(folder: Path, engine: Engine, module: TappedModule, half: bool = True, **facts: Any) -> dict[str, Any]:
    """Write tensors, in bfloat16 where `half`, config and card; returns the card."""
    vocabulary, ids = engine.runner.vocab_size, module.head.ids
    dtype = torch.bfloat16 if half else torch.float32
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in module.exported().items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.isin(torch.arange(vocabulary), ids)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / TENSORS, lambda part: save_file(tensors, part, {"format": "pt"}))
    files.write_json(folder / CONFIG, module.config(vocabulary))
    card = {"part": module.kind, "shape": module.shape(), "fingerprints": [engine.fingerprint],
            "layers": engine.runner.num_layers, "model": Path(engine.model_name).name, "shoal": __version__,
            "bytes": (folder / TENSORS).stat().st_size, **facts}
    files.write_json(folder / MODEL_CARD, card)
    return card
