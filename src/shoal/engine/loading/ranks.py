"""Tensor parallelism: each process holds a slice of every matrix, as transformers' own plans cut it.

All processes run the same forwards in the same order, and each ends with the same logits. A depth plan depends on the
step alone, so which layers run needs no message. Only what a process chooses by itself, such as a seed, must be agreed
on. `torchrun` starts the processes and tells each its number.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Paced
from shoal.errors import Unsupported

T = TypeVar("T")
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_PATIENCE = timedelta(minutes=10)
"""How long a process waits for what another one sends, for when a whole machine is gone without a word."""


@dataclass(frozen=True)
class Ranks:
    """The processes of one model: the number of this one, from 0, and how many there are.

    Attributes:
        told: whether process 0 tells the others of each request, so that there is nothing to agree on.
    """

    rank: int = 0
    size: int = 1
    told: bool = False

    def agree(self, value: T) -> T:
        """The value that process 0 passes. All processes must call this."""
        if self.size == 1 or self.told:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def check(self, recipe: Recipe) -> None:
        """Refuse what could make processes decide differently."""
        if self.size > 1 and isinstance(recipe.proposer, Paced):
            raise Unsupported(f"a controller of guesses in {self.size} processes",
                              "it measures time, which differs between them, and all must run the same forwards",
                              "Leave the method's control at its default")
        if self.size > 1 and any(part is not None and part.timed for part in (recipe.loop, recipe.search)):
            raise Unsupported(f"waiting for what others say in {self.size} processes",
                              "it comes at another time in each of them",
                              "Let a model judge thoughts, and likelihood answers")


ALONE = Ranks()


class ControlChannel:
    """Tells the other processes what comes next, by gloo whatever the devices; all processes make it together."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._group = ranks.rank, dist.new_group(backend="gloo", timeout=_PATIENCE)

    def tell(self, state: int, told: Any, *, last: bool = False) -> None:
        """Send a number and an object, None for nothing, or that these were the last; called by process 0."""
        sent = b"" if told is None else pickle.dumps(told)
        dist.broadcast(torch.tensor([-1 if last else len(sent), state]), 0, self._group)
        if sent:
            dist.broadcast(torch.frombuffer(bytearray(sent), dtype=torch.uint8), 0, self._group)

    def hear(self) -> tuple[int, Any] | None:
        """What process 0 sends, or None after the last; ConnectionError where it has ended without a word."""
        head = torch.zeros(2, dtype=torch.int64)
        try:
            dist.broadcast(head, 0, self._group)
            size, state = head.tolist()
            if size < 1:
                return None if size < 0 else (state, None)
            sent = torch.empty(size, dtype=torch.uint8)
            dist.broadcast(sent, 0, self._group)
        except RuntimeError as error:
            raise ConnectionError("process 0 has ended") from error
        return state, pickle.loads(sent.numpy().tobytes())  # by no one else's hand than process 0's

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of all processes' numbers, place by place."""
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return found.tolist()


def join(device: torch.device) -> Ranks:
    """Join the other processes, on CUDA by the device of this one's number; Unsupported where there is no way."""
    what = "tensor parallelism"
    if "LOCAL_RANK" not in os.environ and not dist.is_initialized():
        remedy = "Start it by torchrun: torchrun --nproc-per-node 2 -m shoal generate --tensor-parallel ..."
        raise Unsupported(what, "this process has no others beside it", remedy)
    if device.type not in _BACKENDS:
        raise Unsupported(f"{what} on {device}", "processes cannot talk to each other there", "Use cuda or cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(_BACKENDS[device.type], timeout=_PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    """Leave the other processes, if there are any."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def check_model(config: Any, ranks: Ranks) -> None:
    """Refuse a model that cannot be cut into that many slices."""
    text = config.get_text_config()
    name = f"tensor parallelism of model type {text.model_type!r} over {ranks.size} processes"
    if not getattr(text, "base_model_tp_plan", None):
        raise Unsupported(name, "transformers has no plan for it", "Use one process, or replicas")
    heads = text.num_attention_heads
    for count, kind in ((heads, "heads"), (getattr(text, "num_key_value_heads", None) or heads, "heads of keys")):
        if count % ranks.size:
            raise Unsupported(name, f"it has {count} {kind}", "Use a number of processes that divides them")


def loading(ranks: Ranks) -> dict[str, Any]:
    """Options of `from_pretrained` that load one slice."""
    with suppress(ImportError):
        from transformers.distributed import DistributedConfig

        if "tp_size" in {field.name for field in fields(DistributedConfig)}:  # since transformers 5.13 or so
            return {"distributed_config": DistributedConfig(tp_size=ranks.size)}
    return {"tp_plan": "auto"}
