"""Decode and score many prompts in lockstep: all rows stand at the same step, so a plan's layers are the same for all.

Prompts are padded on the left, a step is a handful of large matrix products, and rows that are done leave. Meant for
evaluation, where items are many and nobody waits for the first token; it decodes what the engine decodes (equal
tokens in float32). It also runs tables of layers that are not nested, which no cache of the engine's can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm

from shoal.eval.layer_table import LayerTable
from shoal.model.packed import block
from shoal.model.packed.linear import Dense, Linear
from shoal.model.packed.native_stack import NativeMatrix
from shoal.model.packed.stack import PackedStack
from shoal.model.packed.stacked import Stacked
from shoal.model.packed.weights import Layer

_THIN_OUT = 0.8
"""Share of rows under way below which the finished ones are taken out of the cache."""


@dataclass
class _State:
    """Rows under way: keys and values per layer [rows, kv heads, columns, head_dim], padding columns per row."""

    keys: list[Tensor]
    values: list[Tensor]
    pads: Tensor
    columns: int

    def select(self, rows: Tensor) -> None:
        self.keys = [store[rows] for store in self.keys]
        self.values = [store[rows] for store in self.values]
        self.pads = self.pads[rows]


class Lockstep:
    """Greedy decoding and scoring on the weights of a packed stack.

    Args:
        stack: its matrices are unpacked once where they are stored in a kernel's own order.
    """

    def __init__(self, stack: PackedStack) -> None:
        self.shape, self.dtype, self.device, self.rotary = stack.shape, stack.dtype, stack.device, stack.rotary
        weights = stack.weights
        self._layers = [_plain_layer(layer, stack.dtype) for layer in weights.layers]
        self._embedding, self._final_norm = weights.embedding, weights.final_norm
        self._head = _plain(weights.head, stack.dtype)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], table: LayerTable, max_new_tokens: int, eos: frozenset[int],
        each_step: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Greedy tokens of each prompt, the end-of-sequence token included where one came; `each_step` may raise."""
        outputs: list[list[int]] = [[] for _ in prompts]
        state, logits = self._prefill(prompts, max_new_tokens)
        rows = list(range(len(prompts)))
        ends = torch.tensor(sorted(eos), device=self.device)
        for step in range(1, max_new_tokens + 1):
            each_step()
            tokens = logits.argmax(-1)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if row >= 0:
                    outputs[row].append(token)
            done = torch.isin(tokens, ends).tolist()
            rows = [-1 if over else row for row, over in zip(rows, done, strict=True)]
            alive = [place for place, row in enumerate(rows) if row >= 0]
            if not alive or step == max_new_tokens:
                break
            if len(alive) < _THIN_OUT * len(rows):
                keep = torch.tensor(alive, device=self.device)
                state.select(keep)
                tokens, rows = tokens[keep], [rows[place] for place in alive]
            logits = self._step(state, tokens, table, step)
        return outputs

    @torch.no_grad()
    def losses(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], tables: Sequence[LayerTable]
    ) -> list[list[Tensor]]:
        """Negative log-likelihood in nats of every answer token, under each table: [table][item] -> [tokens] float32.

        The prompt runs every layer and is run once for all tables; answer token j is decided at step j.
        """
        widest = max(map(len, answers))
        state, first = self._prefill(prompts, 0)
        target = torch.zeros(len(answers), widest, dtype=torch.long)
        for row, answer in enumerate(answers):
            target[row, : len(answer)] = torch.tensor(answer)
        target = target.to(self.device)
        scored = []
        for table in tables:
            logits = [first[:, None].float()]
            if widest > 1:
                logits.append(self._block(state, target[:, :-1], table).float())
            values = cross_entropy(torch.cat(logits, 1).transpose(1, 2), target, reduction="none").cpu()
            scored.append([values[row, : len(answer)] for row, answer in enumerate(answers)])
        return scored

    def _prefill(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[_State, Tensor]:
        """Every prompt through every layer; the logits [rows, V] of each prompt's last token."""
        width = max(map(len, prompts))
        pads = torch.tensor([width - len(prompt) for prompt in prompts], device=self.device)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self.device)
        size = (len(prompts), self.shape.kv_heads, width + room, self.shape.head_dim)
        stores = [[torch.zeros(size, dtype=self.dtype, device=self.device) for _ in self._layers] for _ in range(2)]
        state = _State(stores[0], stores[1], pads, 0)
        x = self._run(state, ids, LayerTable.full(self.shape.num_layers), first_step=None)
        state.columns = width
        return state, self._logits(x[:, -1])

    def _step(self, state: _State, tokens: Tensor, table: LayerTable, step: int) -> Tensor:
        x = self._run(state, tokens[:, None], table, step)
        state.columns += 1
        return self._logits(x[:, -1])

    def _block(self, state: _State, ids: Tensor, table: LayerTable) -> Tensor:
        """Logits [rows, n, V] of steps 1..n, leaving the state as it was."""
        room = ids.shape[1] - (state.keys[0].shape[2] - state.columns)
        if room > 0:
            state.keys = [_wider(store, room) for store in state.keys]
            state.values = [_wider(store, room) for store in state.values]
        return self._logits(self._run(state, ids, table, first_step=1))

    def _run(self, state: _State, ids: Tensor, table: LayerTable, first_step: int | None) -> Tensor:
        """The stream [rows, n, hidden] after all layers of `n` new columns; `first_step` None is a prompt."""
        rows, count = ids.shape
        columns = torch.arange(state.columns, state.columns + count, device=self.device)
        places = (columns[None] - state.pads[:, None]).clamp_min(0)
        self.rotary.reach(int(places.max()) + 1)
        cos, sin = self.rotary.cos[:, places], self.rotary.sin[:, places]
        stream = self._final_norm.dtype
        x = self._embedding.lookup(ids.flatten()).to(stream).view(rows, count, -1) * self.shape.embedding_scale
        masks: dict[tuple[int, int | None], Tensor] = {}  # built once for all layers that see the same
        for index, layer in enumerate(self._layers):
            if first_step is None:
                attends, feeds = [True] * count, [True] * count
            else:
                attends, feeds = table.runs(index, first_step, count)
            sees = count if table.propagates else _prefix(attends)
            if sees:
                window = self.shape.windows[index]
                if (sees, window) not in masks:
                    masks[sees, window] = self._mask(state, columns[:sees], window)
                rope = self.shape.rotary[index]
                tables = None if rope is None else (cos[rope, :, :sees], sin[rope, :, :sees])
                added = self._attention(x[:, :sees], layer, tables, state, index, masks[sees, window])
                x = _add(x, added, attends)
            if any(feeds):
                reach = count if table.propagates else _prefix(feeds)
                flat = x[:, :reach].reshape(rows * reach, -1)
                x = _add(x, block.mlp(flat, layer, self.shape, self.dtype).view(rows, reach, -1), feeds)
        return x

    def _attention(
        self, x: Tensor, layer: Layer, tables: tuple[Tensor, Tensor] | None, state: _State, index: int, mask: Tensor
    ) -> Tensor:
        rows, count, _ = x.shape
        end = state.columns + count

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.view(rows, count, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
            state.keys[index][:, :, end - count : end] = k
            state.values[index][:, :, end - count : end] = v
            keys, values = (store[index][:, :, :end] for store in (state.keys, state.values))
            out = block.scaled_attention(q, keys, values, self.shape, mask)
            return out.transpose(1, 2).reshape(rows * count, *out.shape[1:2], out.shape[3])

        flat = None if tables is None else (tables[0].flatten(0, 1), tables[1].flatten(0, 1))
        added = block.attention(x.reshape(rows * count, -1), layer, self.shape, self.dtype, flat, attend)
        return added.view(rows, count, -1)

    def _mask(self, state: _State, columns: Tensor, window: int | None) -> Tensor:
        """[rows, 1, n, columns]: 0 where a new column sees, else -inf. Padding sees itself: a softmax needs one."""
        keys = torch.arange(int(columns[-1]) + 1, device=self.device)
        seen = keys[None] <= columns[:, None]
        if window is not None:
            seen = seen & (keys[None] > columns[:, None] - window)
        real = keys[None] >= state.pads[:, None]
        visible = (seen[None] & real[:, None]) | (keys[None] == columns[:, None])[None]
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return bias.masked_fill_(~visible, -torch.inf)[:, None]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[..., V] in float32 or wider."""
        normed = rms_norm(hidden, (self.shape.hidden,), self._final_norm, self.shape.eps).to(self.dtype)
        out = block.scaled_logits(self._head(normed.flatten(0, -2)), self.shape).view(*normed.shape[:-1], -1)
        return out if out.dtype == torch.float64 else out.float()


def _add(x: Tensor, added: Tensor, runs: Sequence[bool]) -> Tensor:
    """`x` with what was added at the columns that run; the others pass through."""
    count = added.shape[1]
    if not all(runs[:count]):
        added = added * torch.tensor(runs[:count], device=x.device)[None, :, None]
    return x + added if count == x.shape[1] else torch.cat([x[:, :count] + added, x[:, count:]], 1)


def _prefix(runs: Sequence[bool]) -> int:
    return sum(runs)


def _wider(store: Tensor, room: int) -> Tensor:
    return torch.cat([store, store.new_zeros(*store.shape[:2], room, store.shape[3])], 2)


def _plain(matrix: Linear, dtype: torch.dtype) -> Linear:
    if isinstance(matrix, Stacked):
        return Stacked([_plain(part, dtype) for part in matrix.parts])
    return Dense(matrix.packed.unpack(dtype)) if isinstance(matrix, NativeMatrix) else matrix


def _plain_layer(layer: Layer, dtype: torch.dtype) -> Layer:
    parts = {name: _plain(getattr(layer, name), dtype) for name in ("qkv", "out", "gate_up", "down")}
    return Layer(**{**vars(layer), **parts})
