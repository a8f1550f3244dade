"""Volume decoding: dense, and hierarchical with a few keys for each block of queries (FlashVDM, 4.1 and 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_lab.other_fields.flashvdm.autoencoder import FieldDecoder
from shoal_lab.other_fields.flashvdm.solids import TRUNCATED

_CHUNK = 1 << 13
_BLOCKS = 4
"""Blocks along each side of the cube, whose queries share their keys; a guess."""
_ASKED = 16
"""Queries of a block that choose its keys."""


@dataclass
class Volume:
    """What a decoder says of one solid, with a count of the queries it was asked.

    Args:
        decoder: of the autoencoder.
        latents: [1, vectors, channels].
        keys: vectors that each block of queries attends to; None for all.

    Raises:
        ValueError: `keys` is none of the number of vectors.
    """

    decoder: FieldDecoder
    latents: Tensor
    keys: int | None = None
    queries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.keys is not None and not 1 <= self.keys <= self.latents.shape[1]:
            raise ValueError(f"keys {self.keys}; it must be 1..{self.latents.shape[1]}, the number of vectors")
        with torch.inference_mode():
            self._memory = self.decoder.memory(self.latents)

    def at(self, points: Tensor) -> Tensor:
        """Distances [points], as shares of the truncation, at points [points, 3]."""
        self.queries += len(points)
        with torch.inference_mode():
            if self.keys is None:
                return torch.cat([self._answer(part, *self._memory) for part in points.split(_CHUNK)])
            return self._by_block(points, self.keys)

    def _answer(self, points: Tensor, key: Tensor, value: Tensor) -> Tensor:
        hidden, query = self.decoder.ask(points[None])
        return self.decoder.answer(hidden, query, key, value)[0]

    def _by_block(self, points: Tensor, keys: int) -> Tensor:
        cell = ((points + 1) / 2 * _BLOCKS).long().clamp(0, _BLOCKS - 1)
        order = (cell @ torch.tensor([_BLOCKS * _BLOCKS, _BLOCKS, 1])).sort()
        sizes = order.values.unique_consecutive(return_counts=True)[1].tolist()
        found = torch.empty(len(points))
        for rows in order.indices.split(sizes):
            inside = points[rows]
            chosen = [part.gather(2, self._chosen(inside, keys)[..., None].expand(-1, -1, -1, part.shape[-1]))
                      for part in self._memory]
            found[rows] = torch.cat([self._answer(part, *chosen) for part in inside.split(_CHUNK)])
        return found

    def _chosen(self, inside: Tensor, keys: int) -> Tensor:
        """The vectors [1, heads, keys] to which a few of a block's queries attend most, by head."""
        few = inside[torch.linspace(0, len(inside) - 1, min(_ASKED, len(inside))).long()]
        query = self.decoder.ask(few[None])[1]
        weights = (query @ self._memory[0].transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        return weights.mean(2).topk(keys, dim=-1).indices  # type: ignore[no-any-return]


def dense(volume: Volume, resolution: int) -> Tensor:
    """Distances at all corners [resolution + 1] * 3 of a grid's cells."""
    side = resolution + 1
    return volume.at(_place(torch.cartesian_prod(*[torch.arange(side)] * 3), resolution)).view(side, side, side)


def hierarchical(volume: Volume, resolution: int, coarsest: int = 16, margin: float = 0.5) -> Tensor:
    """Distances at all corners, asked only near the surface: a coarse grid whose cells are halved where it may pass.

    Elsewhere the coarser grid's distances are interpolated, which keeps their sign.

    Args:
        volume: to be asked.
        resolution: cells along a side.
        coarsest: of the first grid.
        margin: of `near_surface` on finer grids than the first; with 0 a part thinner than their cells may be lost.

    Raises:
        ValueError: `resolution` is not `coarsest` times a power of two.
    """
    times = resolution // coarsest
    if times < 1 or times * coarsest != resolution or times & (times - 1):
        raise ValueError(f"resolution {resolution}; it must be {coarsest} times a power of two")
    grid = dense(volume, coarsest)
    while len(grid) <= resolution:
        cells = 2 * (len(grid) - 1)
        finer = F.interpolate(grid[None, None], (cells + 1,) * 3, mode="trilinear", align_corners=True)[0, 0]
        wanted = corners(near_surface(grid, 0.5 if len(grid) == coarsest + 1 else margin))
        wanted[::2, ::2, ::2] = False  # The coarser grid knows them.
        at = wanted.nonzero()
        finer[tuple(at.T)] = volume.at(_place(at, cells))
        grid = finer
    return grid


def near_surface(grid: Tensor, margin: float = 0.5) -> Tensor:
    """Cells [side - 1] * 3 through which the surface may pass.

    A cell's corners differ in sign, or one is nearer to the surface than the margin, in diagonals: half of one leaves
    out nothing where distances are exact. The paper takes a threshold of the truncated distance.
    """
    far = margin * 2 * 3**0.5 / (len(grid) - 1) / TRUNCATED
    least, most, nearest = -_of_cells(-grid), _of_cells(grid), -_of_cells(-grid.abs())
    return ((least < 0) & (most >= 0)) | (nearest < far)


def corners(cells: Tensor) -> Tensor:
    """Corners [2 * side + 1] * 3 that chosen cells [side] * 3 have, each halved along all axes."""
    halves = F.interpolate(cells[None, None].float(), scale_factor=2.0)[0, 0]
    return _of_cells(F.pad(halves, (1, 1) * 3)) > 0


def _of_cells(grid: Tensor) -> Tensor:
    """The largest of the eight corners of each cell."""
    return F.max_pool3d(grid[None, None], 2, stride=1)[0, 0]


def _place(corner: Tensor, resolution: int) -> Tensor:
    return corner * (2 / resolution) - 1


def iou(one: Tensor, other: Tensor, points: Tensor) -> float:
    """Intersection over union of the solids that two grids' surfaces bound, by points [points, 3] of the cube.

    Between corners the distance is trilinear, as the mesh's surface has it.
    """
    inside = [F.grid_sample(grid.permute(2, 1, 0)[None, None], points[None, None, None], align_corners=True)[0, 0, 0, 0]
              < 0 for grid in (one, other)]
    return float((inside[0] & inside[1]).sum() / (inside[0] | inside[1]).sum().clamp(min=1))


def mesh(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Vertices [vertices, 3] in the cube and triangles [triangles, 3] of the surface, by marching cubes."""
    from skimage.measure import marching_cubes

    vertices, faces, _, _ = marching_cubes(grid.numpy(), level=0.0)
    return _place(torch.from_numpy(vertices.copy()), len(grid) - 1), torch.from_numpy(faces.astype("int64"))
