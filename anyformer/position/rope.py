"""Rotary positions: queries and keys are rotated by their own position, so that their product sees the offset only.

Paper: Su et al. 2021, 2104.09864; scalings and partial rotation name their own (see `_scaling` and the knobs).
Equation: q'_i = R(i) q_i, k'_j = R(j) k_j, where R(p) turns pair (a, b) number l of the r rotated channels by the angle p w_l:
    y_a = x_a cos - x_b sin,   y_b = x_a sin + x_b cos,   w_l = base ** (-2 l / r), or scaled.
    Hence q'_i . k'_j = q_i . R(j - i) k_j.
Cost: (n h + m k) d; with dynamic_ntk beyond the trained length, 2 n m h r on pairs.
Beyond the paper: pairs may be channels (l, l + r/2), the default; some channels or pairs may stay; frequencies may be equal,
    learned or scaled.
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.ops.turn import Pairing, pairs_of, turned
from anyformer.position._scaling import WAYS, DynamicNtk, ScalingSpec, build, stretching, written_out
from anyformer.position._tables import inner, with_knobs
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import PositiveFloat, Share

_ROWS = 16  # queries with frequencies of their own that are compared at once


class Rope(Position):
    """Rotates queries and keys by position * frequency. Each call makes its angles afresh; nothing is stored.

    Args:
        base: the slowest pair turns once in about 2 pi * base tokens.
        pairing: which channels turn together: "half" (l, l + r/2) as in Llama and NeoX, "interleaved" (2l, 2l + 1) as
            in the paper, RoFormer and GPT-J. With the rows of W_q and W_k permuted, the one is the other.
        partial: share of a head's channels that are rotated, the first ones (GPT-NeoX: 0.25). Frequencies are those of a head
            this wide.
        kept: share of the rotated pairs that really turn, the fastest ones; slow ones stay (p-RoPE, Barbero et al. 2024,
            2410.06205).
        frequencies: "geometric", "equal" (all base ** -0.5) or "learned" (a weight a pair, geometric at the start).
        scaling: spec of a way to stretch geometric frequencies to longer inputs: linear, ntk, dynamic_ntk, yarn, longrope or
            llama3, for example yarn(factor=4, original=2048).
        angle_dtype: "float64", or "float32" to equal implementations that round angles (by 0.05 radians at position
            1,000,000).

    With dynamic_ntk the frequencies of a pair depend on the length that its query sees, as when text is written token by
    token from a cache of unrotated keys; where max_length is above the trained length it is a term on pairs, not a rotation.

    Raises:
        SpecError: the number of rotated channels is odd or none, or a scaling that cannot be had here.
    """

    name = "rope"
    summary = "queries and keys are rotated by their own position"
    paper = "Su et al. 2021, 2104.09864"
    family = ("other", "rotary")
    scope = "model"

    def __init__(
        self,
        site: Site,
        *,
        base: PositiveFloat = 10000.0,
        pairing: Pairing = "half",
        partial: Share = 1.0,
        kept: Share = 1.0,
        frequencies: Literal["geometric", "equal", "learned"] = "geometric",
        scaling: ScalingSpec | None = None,
        angle_dtype: Literal["float64", "float32"] = "float64",
    ) -> None:
        super().__init__(site)
        self.width = int(site.head_dim * partial)
        if self.width % 2 or self.width == 0:
            raise SpecError(
                f"rope: channels turn in pairs, expected an even number of them, got {self.width}; "
                "choose an even head_dim, or another partial"
            )
        if scaling is not None and frequencies != "geometric":
            raise SpecError(
                f"rope: a scaling stretches geometric frequencies, got frequencies={frequencies!r}; leave one of the two out"
            )
        self.base = base
        self.pairing: Pairing = pairing
        self.turning = int(kept * self.width / 2)
        self.frequencies: Literal["geometric", "equal", "learned"] = frequencies
        self.scaling = None if scaling is None else build(scaling)
        self.angle_dtype = angle_dtype
        self.dynamic = self.scaling if isinstance(self.scaling, DynamicNtk) else None
        if self.dynamic is not None and self.dynamic.trained(site.max_length) >= site.max_length:
            self.dynamic = None
        self.forms = ((Form.ROTATE,),) if self.dynamic is None else ((Form.SCORE,),)
        self.relative = self.dynamic is None
        self.magnitude = 1.0 if self.scaling is None else self.scaling.magnitude(site.max_length)
        self.learned = (
            nn.Parameter(self._geometric().to(torch.get_default_dtype())) if frequencies == "learned" else None
        )
        if frequencies == "geometric" and scaling is None:
            self.extensions = ("plain", *WAYS)
        self.speeds()  # a scaling may not fit

    def extended(self, spec: Spec, way: Spec, to: int) -> Spec:
        """The same rotations, or with the scaling of this name; one that was there before stays what it was."""
        if way.name != "plain":
            return with_knobs(spec, scaling=stretching(way, self.site.max_length, to))
        scaling = inner(spec, "scaling")
        return with_knobs(spec, scaling=written_out(scaling, self.site.max_length)) if scaling else spec

    def scale(self, head_dim: int) -> float:
        """`head_dim ** -0.5`, times the scaling's growth where all channels are rotated."""
        return head_dim**-0.5 * (self.magnitude**2 if self.width == self.site.head_dim else 1.0)

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]]:
        """Queries and keys, turned in the wider of float32 and their dtype."""
        q_turn = self._turn(q_pos, q.dtype)
        k_turn = q_turn if k_pos is q_pos and k.dtype == q.dtype else self._turn(k_pos, k.dtype)
        return turned(q, *q_turn, self.pairing), turned(k, *k_turn, self.pairing)

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """dynamic_ntk: `scale(d) (q_i . R(j - i) k_j - q_i . k_j)` with the frequencies of the i + 1 tokens that q_i sees."""
        assert self.dynamic is not None, "built without dynamic_ntk"
        wide = torch.promote_types(torch.float32, q.dtype)
        speeds = self.dynamic.at(self.speeds(q.device), q_pos + 1, self.site.max_length)  # [b n f]
        angles = (k_pos[:, None, :] - q_pos[:, :, None])[..., None]
        pieces = [(q, angles, speeds)]
        if not torch.compiler.is_compiling():  # a loop would fix the number of queries
            pieces = zip(q.split(_ROWS, dim=2), angles.split(_ROWS, dim=1), speeds.split(_ROWS, dim=1), strict=True)
        terms = [
            moved(rows.to(wide), k.to(wide), offsets * each[:, :, None], self.width, self.pairing)
            for rows, offsets, each in pieces
        ]
        return self.scale(self.site.head_dim) * torch.cat(terms, dim=2)

    def speeds(self, device: torch.device | None = None) -> Float64[Tensor, "f"]:
        """The frequencies of the pairs, in radians a token."""
        if self.learned is not None:
            speeds = self.learned.to(torch.float64)
        elif self.frequencies == "equal":
            speeds = torch.full((self.width // 2,), self.base**-0.5, dtype=torch.float64, device=device)
        else:
            speeds = self._geometric(device)
        if self.scaling is not None:
            speeds = self.scaling.apply(speeds, self.base, self.site.max_length)
        return speeds * (torch.arange(len(speeds), device=speeds.device) < self.turning)

    def _geometric(self, device: torch.device | None = None) -> Float64[Tensor, "f"]:
        return phases(torch.ones((), dtype=torch.int64, device=device), self.width, self.base)

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, `[b|1 1 n f]`."""
        if self.angle_dtype == "float64":
            angles = positions[..., None] * self.speeds(positions.device)
        else:
            angles = positions[..., None].to(torch.float32) * self._rounded(positions.device)
        wide = torch.promote_types(torch.float32, dtype)
        grown = 1.0 if self.width == self.site.head_dim else self.magnitude
        return angles.cos()[:, None].to(wide) * grown, angles.sin()[:, None].to(wide) * grown

    def _rounded(self, device: torch.device) -> Float[Tensor, "f"]:
        """The frequencies in float32; plain ones by the steps of the float32 implementations, to equal them bit for bit."""
        if self.scaling is not None or self.frequencies != "geometric" or 2 * self.turning < self.width:
            return self.speeds(device).to(torch.float32)
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width
        return 1.0 / self.base**exponents


def moved(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    angles: Float64[Tensor, "#b n m f"],
    width: int,
    pairing: Pairing,
) -> Float[Tensor, "b h n m"]:
    """`q_i . R_ij k_j - q_i . k_j`, where R_ij turns the first `width` channels by the angles of the pair."""
    (q_a, q_b), (k_a, k_b) = (pairs_of(x[..., :width], pairing) for x in (q, k))
    less = (angles.cos() - 1.0).to(q.dtype)[:, None]  # [b 1 n m f]
    sine = angles.sin().to(q.dtype)[:, None]
    with_q = q_a[..., None, :] * less + q_b[..., None, :] * sine  # met by k_a
    across = q_b[..., None, :] * less - q_a[..., None, :] * sine  # met by k_b
    return (with_q * k_a[:, :, None] + across * k_b[:, :, None]).sum(-1)
