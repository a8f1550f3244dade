"""EAGLE's trained layer with random weights, beside a tiny model, and what it guesses by transformers' own Llama layer.

Any such part must leave the output as it is.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers import LlamaModel, PreTrainedModel
from typing_extensions import override

from backends import reference
from families import tiny
from shoal.decode.tree import TokenTree
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.speculative.draft_head_file import CARD, FORMAT, SCALE, TENSORS, TOKENS
from shoal.speculative.layer_head import FUSE, NORMS, LayerShape

IDS = tuple(range(3, 90))
ECHOED = (5, 8, 11)
ECHO = dict.fromkeys(ECHOED, 12.0)
"""A bias that leaves three tokens to choose from, so that even random guesses are kept now and then."""
OTHERS = (("llama", torch.float64), ("hybrid", torch.float64), ("hybrid", torch.float32), ("qwen3", torch.float64))
"""Models that the part is declared for as well: what the matrix of all methods runs on."""


@functools.cache
def target(family: str) -> Engine:
    return engine_for(reference(family))


def write_eagle(folder: Path, family: str, ids: tuple[int, ...] = IDS) -> Path:
    """Write a part for the tiny model of a family into a folder that is there."""
    prints = {engine_for(tiny(other, dtype=dtype)).fingerprint for other, dtype in OTHERS}
    return write_eagle_for(target(family), folder, ids, prints)


def write_eagle_for(engine: Engine, folder: Path, ids: tuple[int, ...], others: Collection[str] = ()) -> Path:
    """Write a part for an engine's model, and for those with other fingerprints, into a folder that is there."""
    hidden = engine.runner.head_rows([0]).shape[1]
    shape = LayerShape(hidden, 2 * hidden, 4, hidden // 4)
    generator = torch.Generator().manual_seed(1)
    sizes = shape.sizes() | {FUSE: (hidden, 2 * hidden)} | dict.fromkeys(NORMS, (hidden,))
    tensors = {name: float(len(size) == 1) + 0.3 * torch.randn(size, generator=generator)
               for name, size in sizes.items()}
    save_file({**tensors, TOKENS: torch.tensor(ids, dtype=torch.int32)}, folder / TENSORS)
    card = {
        "format": FORMAT, "part": "eagle", "fingerprints": sorted({engine.fingerprint, *others}),
        "layers": engine.runner.num_layers, "vocabulary": None,
        "shape": {"hidden": hidden, "ffn": 2 * hidden, "heads": 4, "head_dim": hidden // 4},
    }
    (folder / CARD).write_text(json.dumps(card), "utf-8")
    return folder


def in_whole_numbers(tensors: dict[str, Tensor], largest: int) -> None:
    """Let matrices be stored as whole numbers up to `largest`, with a scale for each row."""
    for name, tensor in [*tensors.items()]:
        if tensor.ndim == 2:
            tensors[name + SCALE] = tensor.abs().amax(1) / largest
            tensors[name] = (tensor / tensors[name + SCALE][:, None]).round().to(torch.int8)


@functools.cache
def eagle_part(family: str) -> str:
    """The folder of such a part, the same in every process, since tests show it."""
    fresh = write_eagle(Path(tempfile.mkdtemp(prefix="shoal-part-")), family)
    kept = Path(tempfile.gettempdir()) / f"shoal-tests-core-eagle-{family}"
    kept.mkdir(exist_ok=True)
    for file in fresh.iterdir():
        if not (kept / file.name).is_file() or (kept / file.name).read_bytes() != file.read_bytes():
            file.replace(kept / file.name)
    shutil.rmtree(fresh)
    return str(kept)


class GuessReference(ABC):
    """Says what a drafter guesses, by other means."""

    @abstractmethod
    def most_probable(
        self, tokens: list[int], guesses: Sequence[int], bias: Mapping[int, float], count: int
    ) -> list[int]:
        """The likeliest tokens after a text whose last token has no state yet, and after some guesses."""

    def agrees(self, tokens: list[int], tree: TokenTree, bias: Mapping[int, float], width: int) -> bool:
        """Whether the children of every node are the first of the `width` likeliest tokens there."""
        for node in range(len(tree)):
            children = [tree.tokens[child] for child in tree.children(node)]
            guesses = [tree.tokens[place] for place in tree.path(node)[1:]]
            if children and children != self.most_probable(tokens, guesses, bias, width)[: len(children)]:
                return False
        return True


class LayerReference(GuessReference):
    """A layer in float64 that continues a model's states, run over a whole text for each guess.

    Args:
        model: whose states and head it has.
        layer: the layer and the norm behind it.
        join: [D, 2 D], the state's columns first.
        norms: of states and of embeddings, [D] each.
        ids: the tokens that it guesses.
    """

    def __init__(
        self, model: PreTrainedModel, layer: PreTrainedModel, join: Tensor, norms: Sequence[Tensor], eps: float,
        ids: Tensor,
    ) -> None:
        self._model, self._layer, self._eps, self._ids = model, layer, eps, ids
        self._join, self._norms = join.double(), [norm.double() for norm in norms]

    @torch.no_grad()
    @override
    def most_probable(
        self, tokens: list[int], guesses: Sequence[int], bias: Mapping[int, float], count: int
    ) -> list[int]:
        states = self.states_of(tokens[:-1])
        for _ in range(len(guesses) + 1):
            states = torch.cat([states, self.says(states, [*tokens, *guesses][1:])[-1:]])
        return self.likeliest(states[-1], bias, count)

    def states_of(self, tokens: list[int]) -> Tensor:
        """The model's states behind tokens, as its head reads them."""
        return self._model.model(torch.tensor([tokens])).last_hidden_state[0].double()

    def says(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """What the layer says, as the head reads it, of states [n, D] and the tokens after them."""
        embedded = self._model.get_input_embeddings()(torch.tensor(tokens[: len(states)])).double()
        both = [rms_norm(x, x.shape[-1:], norm, self._eps)
                for x, norm in zip((states, embedded), self._norms, strict=True)]
        outputs = self._layer(inputs_embeds=linear(torch.cat(both, -1), self._join)[None])
        return outputs.last_hidden_state[0]

    def likeliest(self, said: Tensor, bias: Mapping[int, float], count: int) -> list[int]:
        """The likeliest tokens by what was said last [D]."""
        logits = self._model.get_output_embeddings().weight[self._ids].double() @ said
        for token, value in bias.items():
            logits[self._ids == token] += value
        return [int(self._ids[place]) for place in logits.topk(count).indices]


class EagleReference(LayerReference):
    """The layer of a part.

    Args:
        folder: of the part.
        family: of its model.
    """

    def __init__(self, folder: str | Path, family: str) -> None:
        tensors = load_file(Path(folder) / TENSORS)
        ids = tensors[TOKENS].long()
        sizes = json.loads((Path(folder) / CARD).read_text("utf-8"))["shape"]
        shape = LayerShape(*(sizes[name] for name in ("hidden", "ffn", "heads", "head_dim")))
        layer = LlamaModel(shape.config(len(ids))).double().eval()
        held = {name: tensor.double() for name, tensor in tensors.items() if name in layer.state_dict()}
        assert set(held) == set(shape.sizes())
        layer.load_state_dict(held, strict=False)
        super().__init__(reference(family), layer, tensors[FUSE], [tensors[name] for name in NORMS], shape.eps, ids)
