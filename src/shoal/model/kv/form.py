"""Sequences whose keys and values are stored in another form than the one in which the model computes them.

torch is imported only when needed, since methods name their forms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROWTH = 1.5

KVSizes = tuple[int, int, int]
"""Heads, and head_dim of keys and of values."""


class KVForm(ABC):
    """How a layer stores keys and values: each slot by itself, so that slots can be dropped and overwritten.

    Attributes:
        kernel: the name by which the native kernels know the form; None if they do not read it.
        late: whether slots are stored as computed until the recipe's `keep` settles them, and only then take the form.
    """

    kernel: ClassVar[str | None] = None
    late: ClassVar[bool] = False

    @property
    def of_keys(self) -> KVForm | None:
        """The form of the keys that go with these values; None for the same form."""
        return None

    @abstractmethod
    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Encode keys or values [heads, slots, head_dim] as any number of tensors [heads, slots, ...]."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Decode to [heads, slots, head_dim or more], in float32 or the dtype that was encoded."""


class Store(ABC):
    """The component `store` of a recipe. Immutable.

    Attributes:
        dense_prompt: whether a prompt, up to its last token, is stored as the model computes it.
    """

    dense_prompt: ClassVar[bool] = False

    @abstractmethod
    def form(self, layer: int) -> KVForm | None:
        """The form of a sequence in that layer; None to store it as it is computed."""


def forms_of(form: KVForm) -> tuple[KVForm, KVForm]:
    """The form of keys and the form of values."""
    return form.of_keys or form, form


def slot_bytes(form: KVForm, sizes: KVSizes, dtype: torch.dtype) -> int:
    """Bytes of one position, keys and values together, for a model that computes them in `dtype`."""
    import torch

    sides = zip(forms_of(form), sizes[1:], strict=True)
    return sum(part.nbytes for one, dim in sides for part in _encoded(one, torch.zeros(sizes[0], 1, dim, dtype=dtype)))


def _encoded(form: KVForm, values: Tensor) -> tuple[Tensor, ...]:
    """Values in their form; those of no dimensions, which lie in the keys, as they are."""
    return form.encode(values) if values.shape[-1] else (values,)


class EncodedSequence:
    """What one sequence stores in one layer, in a form of its own.

    Attributes:
        keys, values: encoded tensors [heads, capacity, ...]; none before the first write.
        capacity: number of slots that there is room for.
        settled: number of slots that have taken a `late` form.
    """

    def __init__(self, form: KVForm, reserve: int = 0) -> None:
        self.form, self._reserve, self._sides = form, reserve, forms_of(form)
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()
        self.capacity = self.settled = 0
        self._dims: Sequence[int] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All encoded tensors."""
        return (*self.keys, *self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.nbytes // self.capacity if self.capacity else 0

    def allocate(self, like: Tensor, sizes: KVSizes, slots: int) -> None:
        """Allocate storage for at least that many slots; `like` has the dtype and device of the model's keys."""
        slots = max(slots, self._reserve)
        heads, *dims = sizes
        self._dims = dims
        samples = [_encoded(form, like.new_zeros(heads, 1, dim)) for form, dim in zip(self._sides, dims, strict=True)]
        self.keys, self.values = (tuple(part.repeat(1, slots, *[1] * (part.ndim - 2)) for part in parts)
                                  for parts in samples)
        self.capacity = slots

    def make_room(self, slots: int) -> None:
        """Make room for that many slots; tensors that are too small are replaced."""
        import torch

        if slots > self.capacity:
            more = max(slots, int(self.capacity * GROWTH) + 16) - self.capacity
            self.keys, self.values = (tuple(torch.cat([part, part.new_zeros(part.shape[0], more, *part.shape[2:])], 1)
                                            for part in parts) for parts in (self.keys, self.values))
            self.capacity += more

    def write(self, at: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [heads, n, head_dim] to the slots from `at` on; there must be room."""
        for form, parts, new in zip(self._sides, (self.keys, self.values), (keys, values), strict=True):
            for part, encoded in zip(parts, _encoded(form, new), strict=True):
                part[:, at : at + new.shape[1]] = encoded

    def read(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, slots, head_dim] of the first slots."""
        sides = zip(self._sides, (self.keys, self.values), self._dims, strict=True)
        keys, values = (form.decode([part[:, :slots] for part in parts])[..., :dim].to(dtype) if dim
                        else parts[0][:, :slots].to(dtype) for form, parts, dim in sides)
        return keys, values

    def clear(self) -> None:
        """Free the storage."""
        self.keys = self.values = ()
        self.capacity = self.settled = 0


def move(tensors: Sequence[Tensor], slots: Tensor, to: int) -> None:
    """Copy slots, int64 [n] or [heads, n], of a sequence's tensors [heads, capacity, ...] to those from `to` on."""
    count = slots.shape[-1]
    moved = [_picked(tensor, slots) for tensor in tensors]  # read all before any is written
    for tensor, part in zip(tensors, moved, strict=True):
        tensor[:, to : to + count] = part


def _picked(tensor: Tensor, slots: Tensor) -> Tensor:
    import torch

    if slots.ndim == 1:
        return tensor.index_select(1, slots)
    return tensor[torch.arange(len(tensor), device=tensor.device)[:, None], slots]
