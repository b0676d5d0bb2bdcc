"""FLOATER: positions are a path in continuous time, the solution of a learned differential equation, added in every layer.

Paper: Liu, Yu, Dhillon and Hsieh 2020, 2003.09229.
Equation: q_i = W_q x_i + p^q(t_i), k_i = W_k x_i + p^k(t_i), v_i = W_v x_i + p^v(t_i), with t_i = i step and paths
    dp / dt = f(t, p) from starts p(0) of their own in each layer; f(t, p) = A [relu(B [p; t] + a); t] + b is one for all layers.
Cost: 4 inner products of 3 w^2 multiply-adds a position and layer, one after the other, for w = heads head_dim channels; half as
    many at once beside them, and w^3. 2 w (w + 2) + 3 depth w weights.
Deviations: no second position code is added at the embedding. Paths are solved anew in each call, where the authors' code keeps
    them for 400 updates. Keys and values of fewer heads get the first channels of their path.
"""

from collections.abc import Callable
from typing import Annotated, Any

import annotated_types as at
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from anyformer.errors import IncompatibleError
from anyformer.forms import Form
from anyformer.position._trajectory import points
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Size

_PIECE = 1024  # steps whose hidden units are held together


class Flow(nn.Module):
    """The slope f(t, p) of a path, in the dtype of p.

    Args:
        width: channels of a path.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width + 1, width)
        self.outer = nn.Linear(width + 1, width)
        for layer in (self.inner, self.outer):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, t: Float[Tensor, ""], p: Float[Tensor, "r w"]) -> Float[Tensor, "r w"]:
        """f(t, p) for each row of p."""
        t = t.to(p.dtype).expand(len(p), 1)
        for layer in (self.inner, self.outer):
            p = F.linear(torch.cat([p, t], dim=-1), layer.weight.to(p.dtype), layer.bias.to(p.dtype))
            p = F.relu(p) if layer is self.inner else p
        return p


class Floater(Position):
    """Adds to queries, keys and values the point that a path has reached at their position.

    Paths are solved in float64 by a fourth-order method on a fixed grid, so a point does not depend on how far a call goes on; a
    cache keeps what has been solved.

    Args:
        step: time from one position to the next, at most 100.
        inner: steps of the solver for one position.
        adjoint: whether gradients come from a second equation, solved backwards, which keeps no intermediate points; they are
            then exact up to the error of the solver.

    Raises:
        IncompatibleError: adjoint=True, and torchdiffeq is not installed.
        SpecError: (in `shift`) a position is negative or at or beyond max_length.
    """

    name = "floater"
    summary = "a learned path in continuous time, added to queries, keys and values of every layer"
    paper = "Liu et al. 2020, 2003.09229"
    family = ("absolute", "continuous")
    scope = "model"

    def __init__(
        self, site: Site, *, step: Annotated[float, at.Gt(0), at.Le(100)] = 0.01, inner: Size = 1, adjoint: bool = False
    ) -> None:
        super().__init__(site)
        if adjoint:
            _integrator()
        self.forms = ((Form.SHIFT,),)
        self.relative = False
        self.limit = site.max_length
        self.step = step
        self.inner = inner
        self.adjoint = adjoint
        width = site.heads * site.head_dim
        self.flow = Flow(width)
        self.starts = nn.Parameter(torch.empty(max(site.depth, site.layer + 1), 3, width))
        bound = (6 / (width + 1)) ** 0.5
        nn.init.uniform_(self.starts, -bound, bound)

    def shift(
        self, q_pos: Int[Tensor, "#b n"], k_pos: Int[Tensor, "#b m"], layer: int, tables: dict[str, Tensor] | None
    ) -> tuple[Float[Tensor, "#b n w"], Float[Tensor, "#b m u"], Float[Tensor, "#b m u"]]:
        """`p^q(q_pos), p^k(k_pos), p^v(k_pos)`."""
        path = None if tables is None else tables.get("path")
        path = self.path(self._count(q_pos, k_pos), layer, path)
        if tables is not None:
            tables["path"] = path
        shared = self.site.kv_heads * self.site.head_dim
        return path[q_pos, 0], path[k_pos, 1][..., :shared], path[k_pos, 2][..., :shared]

    def path(
        self, count: int, layer: int = 0, known: Float64[Tensor, "t 3 w"] | None = None
    ) -> Float64[Tensor, "p 3 w"]:
        """The paths of queries, keys and values of a layer at positions 0..count-1 or more.

        Args:
            known: their first points, from where they go on.
        """
        if known is None:
            known = self.starts[layer].to(torch.float64)[None]
        first = len(known) - 1
        if count - 1 <= first:
            return known
        every = torch.arange(first * self.inner, (count - 1) * self.inner + 1, dtype=torch.float64, device=known.device)
        parts = [known[-1:]]
        for start in range(0, len(every) - 1, _PIECE):
            times = every[start : start + _PIECE + 1] * (self.step / self.inner)
            parts.append(self._solved(parts[-1][-1], times)[1:])
        return torch.cat([known, torch.cat(parts)[:: self.inner][1:]])

    def _solved(self, start: Float64[Tensor, "r w"], times: Float64[Tensor, "s"]) -> Float64[Tensor, "s r w"]:
        """The points at these times, with one step of the solver between any two of them."""
        if self.adjoint:
            return _integrator()(self.flow, start, times, method="rk4")
        inner, outer = (
            (layer.weight.to(start.dtype), layer.bias.to(start.dtype)) for layer in (self.flow.inner, self.flow.outer)
        )
        return points(start, times, self.step / self.inner, inner, outer)

    def _count(self, q_pos: Tensor, k_pos: Tensor) -> int:
        """How many points are needed: up to the largest position, or all where values are unknown."""
        if torch.compiler.is_compiling() or q_pos.is_meta:
            return self.site.max_length
        return max((int(each.max()) + 1 for each in (q_pos, k_pos) if each.numel()), default=1)


def _integrator() -> Callable[..., Any]:
    try:
        from torchdiffeq import odeint_adjoint
    except ImportError:
        raise IncompatibleError(
            "floater(adjoint=True) takes gradients by torchdiffeq, which is not installed; pip install 'anyformer[ode]', "
            "or leave adjoint out"
        ) from None
    return odeint_adjoint
