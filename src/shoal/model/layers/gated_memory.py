"""SambaY's gated memory unit (arXiv 2507.06607, section 2): y_t = W_2 (m_t * SiLU(W_1 x_t)).

m_t is what the last Mamba of the self-decoder has read of its state at the same token, before that layer's own gate. So
the unit keeps no state, and a token needs no earlier one to have run it. The published configuration gives it no norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import silu

from shoal.model.layers.mixer import Matrix


@dataclass(frozen=True)
class GatedMemory:
    """A gated memory unit.

    Attributes:
        into, out: W_1 [C, D] and W_2 [D, C].
    """

    into: Matrix
    out: Matrix

    def __call__(self, x: Tensor, memory: Tensor) -> Tensor:
        """Outputs [n, D] of tokens `x` [n, D] with their memory [n, C], in whose dtype the product is taken."""
        return self.out((silu(self.into(x).to(memory.dtype)) * memory).to(x.dtype))
