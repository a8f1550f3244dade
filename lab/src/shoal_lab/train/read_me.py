"""Trains experts and router of `methods.read_me`: neurons in groups, and a small network that predicts the groups.

Groups are found once, from the frozen model on its own answers. The most used neurons of a layer form the groups that
always run; the others are grouped by what fires together: k-means over tokens, with groups of equal size. The router is
then trained by cross-entropy to predict each group's share of its MLP's output: whatever number of groups runs, those
with the largest expected share lose least. Labels are computed once per answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from typing_extensions import override

from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.packed.runner import PackedRunner
from shoal_lab.components.experts import MOST_GROUPS, UNIT
from shoal_lab.components.router import BIAS, MIX, NEURONS, OUT, TABLE, router_scores
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.divergence import AnswerDivergence
from shoal_lab.train.part import Base, Guessed, ShippedModule, TextBatch

_WIDTH, _WINDOW, _HIDDEN = 64, 8, 512
_LOOKED_AT = 2048
"""Answer tokens by which neurons are grouped."""
_ROUNDS = 8
Opens = Callable[[TextBatch], Tensor]
"""Returns the groups that each token runs: bool [B, T, layers, groups]."""


class ReadMEModule(ShippedModule):
    """Trains the router.

    Args:
        base: the model's embedding and LM head.
        model: transformers' model in float32.
        neurons: neurons of the groups, int64 [layers, groups, n]; see `group_neurons`.
        shared: the first groups, which always run.
        experts: groups that run in all, for the costs on the card.
        seed: of the first weights and of draws.

    Raises:
        ValueError: the MLPs cannot be divided like this.
    """

    kind: ClassVar[str] = "read_me"
    guesses: ClassVar[bool] = False
    table: Tensor
    neurons: Tensor

    def __init__(
        self, base: Base, model: Any, neurons: Tensor, shared: int, experts: int, seed: int = 0
    ) -> None:
        super().__init__()
        mlps, groups = gated_mlps(model), neurons.shape[1]
        check_division([mlp.down_proj.in_features for mlp in mlps], groups, shared, experts)
        model.requires_grad_(False).train(False)
        self._model, self._mlps, self._experts, self._seed = (model,), (mlps,), experts, seed  # not trained
        self._shared, scores = shared, len(mlps) * (groups - shared)
        self.register_buffer("neurons", neurons)
        self.register_buffer("table", _table(base, model.config.vocab_size))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.mix = nn.Linear(_WINDOW * self.table.shape[1], _HIDDEN)
            self.out = nn.Linear(_HIDDEN, scores)
        self._labels: dict[bytes, Tensor] = {}
        self._rows = (base.rows(range(model.config.vocab_size)),)

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # A token is right if its most important group was predicted in most layers.
        asked, wanted = _said(batch), self.labels(batch)[..., self._shared :]
        wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-12)
        logs = self.scores(batch.tokens).float().log_softmax(-1)
        loss = -(wanted * logs).sum(-1)[asked].mean()
        right = (logs.argmax(-1) == wanted.argmax(-1)).float().mean(-1) > 0.5
        return loss, [Guessed(right, asked)]

    def scores(self, tokens: Tensor) -> Tensor:
        """Scores of the groups that are not shared [B, T, layers, groups - shared], at each of the tokens [B, T]."""
        seen = windows(self.table[tokens], _WINDOW)
        found: Tensor = router_scores(seen, self.mix.weight, self.mix.bias, self.out.weight, self.out.bias)
        return found.view(*tokens.shape, len(self.neurons), -1)

    @torch.no_grad()
    def labels(self, batch: TextBatch) -> Tensor:
        """Each group's share of its MLP's output [B, T, layers, groups], by squared norms."""
        keys = [tokens[:length].numpy().tobytes() for tokens, length in zip(batch.tokens, batch.lengths, strict=True)]
        if any(key not in self._labels for key in keys):
            found = group_energies(self._model[0], batch.tokens, self.neurons)
            found = (found / found.sum(-1, keepdim=True).clamp_min(1e-30)).half()
            self._labels |= {key: line[:length].clone() for key, line, length in zip(
                keys, found, batch.lengths, strict=True)}
        width = batch.tokens.shape[1]
        return torch.stack([pad(self._labels[key], (0, 0, 0, 0, 0, width - len(self._labels[key]))).float()
                            for key in keys])

    def routed(self, batch: TextBatch, experts: int) -> Tensor:
        """The router's choice; see `Opens`."""
        return self.chosen(self.scores(batch.tokens), experts)

    def oracle(self, batch: TextBatch, experts: int) -> Tensor:
        """The groups that matter most to each token, which only its forward can tell."""
        return self.chosen(self.labels(batch)[..., self._shared :], experts)

    def drawn(self, batch: TextBatch, experts: int) -> Tensor:
        """As many random groups."""
        generator = torch.Generator().manual_seed(self._seed)
        rest = self.neurons.shape[1] - self._shared
        return self.chosen(torch.rand(*batch.tokens.shape, len(self.neurons), rest, generator=generator), experts)

    def chosen(self, scores: Tensor, experts: int) -> Tensor:
        """Shared groups and those with the highest scores [..., groups - shared]: bool [..., groups]."""
        best = scores.topk(experts - self._shared, -1).indices
        own = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, best, True)
        return pad(own, (self._shared, 0), value=True)

    @torch.no_grad()
    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Results on held-out answers: the costs of running `experts` groups, and `kept`, the share of neurons."""
        groups = self.neurons.shape[1]
        ways = {"router": self.routed, "random": self.drawn, "oracle": self.oracle}
        told = self.costs(held_out, {name: partial(way, experts=self._experts) for name, way in ways.items()})
        return {"kept": round(self._experts / groups, 4), "experts": self._experts, **told}

    @torch.no_grad()
    def costs(
        self, held_out: Sequence[TextBatch], ways: Mapping[str, Opens], prompts: bool = True
    ) -> dict[str, dict[str, float]]:
        """Mean divergences of the model by who chooses, if tokens of answers (and of `prompts`) run some groups.

        `energy` is the mean share of those groups in the outputs of MLPs.
        """
        found, energy = {name: AnswerDivergence() for name in ways}, dict.fromkeys(ways, 0.0)
        for batch in held_out:
            said, whole, labels = _said(batch), self._read(batch), self.labels(batch)
            where = said & (torch.arange(said.shape[1]) + 1 < batch.lengths[:, None])  # the last token is not fed
            for name, opens in ways.items():
                run = opens(batch)
                part = self._read(batch, run | (prompts & ~said)[..., None, None])
                energy[name] += float((labels * run).sum(-1)[where].mean(-1).sum())
                found[name].add(batch, part, self._rows[0], whole, where)
        return {name: {**apart.means(), "energy": round(energy[name] / max(1, len(apart.nats)), 4),
                       "places": len(apart.nats)} for name, apart in found.items()}

    def _read(self, batch: TextBatch, run: Tensor | None = None) -> Tensor:
        """The LM head's inputs [B, T, D] if tokens run these groups; None for all."""
        def mask(layer: int, given: Tensor) -> Tensor:
            return given if run is None else given * run[:, :, layer, self._group_of(layer)]

        with _inside(self._mlps[0], mask):
            found: Tensor = self._model[0].model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return found.float()

    def _group_of(self, layer: int) -> Tensor:
        """The group of each neuron [neurons]."""
        groups = self.neurons[layer]
        found = torch.empty(groups.numel(), dtype=torch.long)
        found[groups.flatten()] = torch.arange(len(groups)).repeat_interleave(groups.shape[1])
        return found

    @override
    def exported(self) -> dict[str, Tensor]:
        named = {MIX: self.mix.weight, BIAS.format(MIX): self.mix.bias, OUT: self.out.weight,
                 BIAS.format(OUT): self.out.bias}
        return {TABLE: self.table, NEURONS: self.neurons.int(), **{k: one.detach() for k, one in named.items()}}

    @override
    def shape(self) -> dict[str, int]:
        layers, groups, neurons = self.neurons.shape
        return {"layers": layers, "groups": groups, "shared": self._shared, "neurons": neurons, "window": _WINDOW,
                "vocab": len(self.table), "width": self.table.shape[1], "hidden": _HIDDEN}


def windows(lines: Tensor, window: int) -> Tensor:
    """The rows [B, T, width] of each place and those before it, the oldest first: [B, T, window * width]."""
    return pad(lines, (0, 0, window - 1, 0)).unfold(1, window, 1).transpose(-1, -2).flatten(-2)


def gated_mlps(model: Any) -> list[Any]:
    """The MLPs of all layers.

    Raises:
        Unsupported: a layer has no gated MLP.
    """
    mlps: list[Any] = [getattr(layer, "mlp", None) for layer in model.model.layers]
    if not all(hasattr(mlp, "down_proj") and isinstance(mlp.down_proj, nn.Linear) for mlp in mlps):
        raise Unsupported(f"experts of model type {model.config.model_type!r}", "its layers have no gated MLP of their "
                          "own, with matrices gate, up and down", "Leave out layers instead, as d3 does")
    return mlps


def mlp_widths(engine: Engine) -> Sequence[int]:
    """Neurons of each MLP.

    Raises:
        Unsupported: a layer has no gated MLP.
    """
    if isinstance(engine.runner, PackedRunner):
        return engine.runner.shape.ffns
    return [mlp.down_proj.in_features for mlp in gated_mlps(engine.model)]


def check_division(widths: Sequence[int], groups: int, shared: int, experts: int) -> None:
    """Refuse numbers of groups into which the MLPs cannot be divided.

    Raises:
        ValueError: names the number, what is allowed and the remedy.
    """
    if len({*widths}) > 1:
        raise ValueError(f"the MLPs have {min(widths)} to {max(widths)} neurons; experts need as many in every layer, "
                         "as after shoal prune --uniform")
    fit = [count for count in range(2, MOST_GROUPS + 1) if widths[0] % (count * UNIT) == 0]
    if groups not in fit:
        known = ", ".join(map(str, fit)) or "none"
        raise ValueError(f"--groups is {groups}; {widths[0]} neurons can be divided into these numbers of groups, each "
                         f"of a multiple of {UNIT}: {known}")
    if not 0 <= shared < groups:
        raise ValueError(f"--shared is {shared}; it must be in [0, {groups - 1}], below --groups")
    if not max(1, shared) <= experts <= groups:
        raise ValueError(f"--experts is {experts}; it must be in [{max(1, shared)}, {groups}], from --shared to "
                         "--groups")


@torch.no_grad()
def group_neurons(
    model: Any, texts: Sequence[tuple[Tensor, int]], groups: int, shared: int, seed: int = 0
) -> Tensor:
    """Neurons of each layer's groups, int64 [layers, groups, n], ascending within a group.

    Args:
        model: the model with transformers' modules.
        texts: int64 [n] each, with the index at which the answer begins.
        groups, shared: number of groups, and of those with the most used neurons.
        seed: of the first centres.
    """
    found = []
    for number, fired in enumerate(_firing(model, texts)):
        order = fired.square().mean(0).sort(descending=True, stable=True).indices
        size = len(order) // groups
        rest = order[shared * size :].sort().values
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        label = together(fired.T[rest], groups - shared, generator)
        made = [*order[: shared * size].view(shared, size), *(rest[label == group] for group in range(groups - shared))]
        found.append(torch.stack([one.sort().values for one in made]))
    return torch.stack(found)


def together(fired: Tensor, groups: int, generator: torch.Generator) -> Tensor:
    """Cluster neurons by how they fire into clusters of equal size; returns each one's group, int64 [neurons].

    k-means over centred rows of length 1; in each round the most similar pairs of neuron and centre are matched first.

    Args:
        fired: activation of each neuron at each token [neurons, tokens].
        groups: a divisor of the number of neurons.
        generator: draws the first centres.
    """
    lines = fired - fired.mean(1, keepdim=True)
    lines = lines / lines.norm(dim=1, keepdim=True).clamp_min(1e-12)
    centres = lines[torch.randperm(len(lines), generator=generator)[:groups]]
    label = torch.zeros(len(lines), dtype=torch.long)
    for _ in range(_ROUNDS):
        label = _shared_out(lines @ centres.T)
        centres = torch.stack([lines[label == group].mean(0) for group in range(groups)])
        centres = centres / centres.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return label


def _shared_out(likeness: Tensor) -> Tensor:
    """A column for each row [rows, columns], each column equally often: the largest entries choose first."""
    rows, columns = likeness.shape
    room, label, left = [rows // columns] * columns, [-1] * rows, rows
    for entry in likeness.flatten().sort(descending=True, stable=True).indices.tolist():
        row, column = divmod(entry, columns)
        if label[row] < 0 and room[column]:
            label[row], room[column], left = column, room[column] - 1, left - 1
        if not left:
            break
    return torch.tensor(label)


@torch.no_grad()
def group_energies(model: Any, tokens: Tensor, neurons: Tensor) -> Tensor:
    """Squared norms of each group's contribution to the hidden states, float32 [B, T, layers, groups].

    Args:
        model: the model with transformers' modules.
        tokens: int64 [B, T].
        neurons: neurons of the groups, see `group_neurons`.
    """
    mlps, found = gated_mlps(model), []

    def look(layer: int, given: Tensor) -> None:
        down = mlps[layer].down_proj.weight
        found.append(torch.stack([linear(given[..., some], down[:, some]).float().square().sum(-1)
                                  for some in neurons[layer]], -1))

    with _inside(mlps, look):
        model.model(input_ids=tokens, use_cache=False)
    return torch.stack(found, 2)


def _firing(model: Any, texts: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """Contribution of every neuron at tokens of answers by layer, [tokens, neurons], weighted by its column's norm."""
    mlps = gated_mlps(model)
    found: list[list[Tensor]] = [[] for _ in mlps]
    columns = [mlp.down_proj.weight.norm(dim=0) for mlp in mlps]
    count = sum(len(text) - begin for text, begin in texts)
    step = max(1, count // _LOOKED_AT)
    for text, begin in texts:

        def look(layer: int, given: Tensor, begin: int = begin) -> None:
            found[layer].append((given[0, begin::step].abs() * columns[layer]).float())

        with _inside(mlps, look):
            model.model(input_ids=text[None], use_cache=False)
    return [torch.cat(layer) for layer in found]


@contextmanager
def _inside(mlps: Sequence[Any], look: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """Show the inputs of each MLP's last matrix [B, T, neurons], or replace them."""
    hooks = [mlp.down_proj.register_forward_pre_hook(lambda _, given, layer=layer: look(layer, given[0]))
             for layer, mlp in enumerate(mlps)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _said(batch: TextBatch) -> Tensor:
    """Bool [B, T], tokens of answers."""
    place = torch.arange(batch.tokens.shape[1])
    return (place >= batch.prompts[:, None]) & (place < batch.lengths[:, None])


def some_answers(answers: Corpus) -> list[tuple[Tensor, int]]:
    """Training answers spread over the shards, with about as many tokens as the grouping uses, or more."""
    per = max(1, _LOOKED_AT // 32 // len(answers.shards))
    return [(one.tokens, one.prompt) for shard in range(len(answers.shards))
            for one in answers.answers(shard, validation=False)[:per]]


def _table(base: Base, vocab: int) -> Tensor:
    """The tokens' embeddings reduced to their main directions: [vocab, width], of mean square 1."""
    rows = base.embed(torch.arange(vocab))
    rows = rows - rows.mean(0)
    width = min(_WIDTH, rows.shape[1])
    axes = torch.linalg.eigh((rows.T @ rows).double()).eigenvectors[:, -width:].float()
    fewer: Tensor = rows @ axes
    return fewer / fewer.square().mean().sqrt().clamp_min(1e-12)
