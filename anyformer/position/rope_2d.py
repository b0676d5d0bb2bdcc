"""Rotary positions on a grid: queries and keys are rotated by row and column, so that their product sees the two offsets only.

Paper: axial: Fang et al. 2023, 2303.11331; mixed: Heo, Park, Han and Yun 2024, 2403.13298.
Equation: q'_i = R(i) q_i, k'_j = R(j) k_j, where R(y, x) turns pair number l of the d channels by the angle
    axial:  x w_l for l < d/4, and y w_(l - d/4) for the other d/4 pairs, with w_t = base ** (-4 t / d)
    mixed:  y f_hl + x g_hl, with f and g learned for each head.
    Hence q'_i . k'_j = q_i . R(j - i) k_j.
Cost: (n h + m k) d; mixed: k d weights a layer.
Deviation: mixed frequencies belong to key heads; the query heads that share one share them.
Beyond the papers: pairs may be channels (l, l + d/2), the default.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.turn import Pairing, turned
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size


class Rope2d(Position):
    """Rotates queries and keys by row and column. Each call makes its angles afresh; no angle is stored.

    Args:
        kind: "axial" turns half the pairs by the column and half by the row; "mixed" turns each pair by both, with learned
            frequencies that start in a random direction of its own for each head.
        base: ratio of the shortest to the longest turn; None: 100 for axial, 10 for mixed, as the authors chose.
        pairing: which channels turn together: "half" (l, l + d/2), "interleaved" (2l, 2l + 1) as in the authors' code.
        first: axial: whether the first half of the pairs reads the "column", as in the authors' code, or the "row", as in
            timm and DINOv3.
        rows, columns: size of the image in tokens, to which positions are then relative, as in DINOv3: row t counts as
            2 pi times the place of its centre between -1 and 1. None: the row itself.

    Raises:
        SpecError: a head's width is no multiple of 4 (mixed: odd); one of rows and columns without the other.
    """

    name = "rope_2d"
    summary = "queries and keys are rotated by row and column"
    paper = "Heo et al. 2024, 2403.13298"
    family = ("vision", "rotary")
    axes = 2

    def __init__(
        self,
        site: Site,
        *,
        kind: Literal["axial", "mixed"] = "axial",
        base: PositiveFloat | None = None,
        pairing: Pairing = "half",
        first: Literal["column", "row"] = "column",
        rows: Size | None = None,
        columns: Size | None = None,
    ) -> None:
        super().__init__(site)
        step = 4 if kind == "axial" else 2
        if site.head_dim % step:
            raise SpecError(
                f"rope_2d: {kind} turns need a head_dim that is a multiple of {step}, got {site.head_dim}; choose another"
            )
        if (rows is None) != (columns is None):
            raise SpecError(
                f"rope_2d: expected rows and columns, or neither, got rows={rows} and columns={columns}; an image has both"
            )
        self.forms = ((Form.ROTATE,),)
        self.turns_by = kind
        self.base = base if base is not None else 100.0 if kind == "axial" else 10.0
        self.pairing: Pairing = pairing
        self.first = first
        self.size = None if rows is None or columns is None else (rows, columns)
        self.frequencies = nn.Parameter(torch.empty(site.kv_heads, site.head_dim // 2, 2)) if kind == "mixed" else None
        if self.frequencies is not None:
            self._draw(self.frequencies)

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n 2"],
        k_pos: Int[Tensor, "#b m 2"],
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]]:
        """Queries and keys, turned in the wider of float32 and their dtype."""
        k_angles = self.angles(k_pos)
        q_angles = k_angles if q_pos is k_pos else self.angles(q_pos)
        if q_angles.shape[1] > 1:
            q_angles = q_angles.repeat_interleave(q.shape[1] // q_angles.shape[1], dim=1)
        return self._turned(q, q_angles), self._turned(k, k_angles)

    def angles(self, positions: Int[Tensor, "#b n 2"]) -> Float64[Tensor, "#b #k n f"]:
        """The angle of each pair of channels, one set for all heads where axial, else one a key head."""
        row, column = (part[:, None, :, None] for part in self._coordinates(positions).unbind(-1))
        if self.frequencies is not None:
            by_row, by_column = self.frequencies.to(torch.float64)[:, None].unbind(-1)
            return row * by_row + column * by_column
        waves = self._waves(self.site.head_dim // 4, positions.device)
        parts = (column * waves, row * waves) if self.first == "column" else (row * waves, column * waves)
        return torch.cat(parts, dim=-1)

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        wide = torch.promote_types(torch.float32, x.dtype)
        return turned(x, angles.cos().to(wide), angles.sin().to(wide), self.pairing)

    def _coordinates(self, positions: Tensor) -> Tensor:
        if self.size is None:
            return positions.to(torch.float64)
        size = torch.tensor(self.size, dtype=torch.float64, device=positions.device)
        return 2 * math.pi * ((2 * positions + 1) / size - 1)

    def _waves(self, count: int, device: torch.device) -> Tensor:
        exponents = torch.arange(count, dtype=torch.float64, device=device) * (-4 / self.site.head_dim)
        return self.base**exponents

    @torch.no_grad()
    def _draw(self, frequencies: Tensor) -> None:
        """The lengths of the axial waves, each twice, in two directions at a right angle, one pair of them a head."""
        heads, pairs, _ = frequencies.shape
        lengths = self._waves((pairs + 1) // 2, frequencies.device).to(frequencies.dtype)
        direction = torch.rand(heads, 1, device=frequencies.device) * 2 * math.pi
        turns = torch.cat([direction + lengths * 0, direction + math.pi / 2 + lengths * 0], dim=-1)[:, :pairs]
        lengths = torch.cat([lengths, lengths])[:pairs]
        frequencies.copy_(torch.stack([lengths * turns.sin(), lengths * turns.cos()], dim=-1))
