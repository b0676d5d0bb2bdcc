"""Where tokens stand on one line, so that a term of their positions is a function of the distance on it.

Positions on a grid become a line too: rows one after the other, each followed by so many empty places that no two offsets of row
and column are the same distance.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.context import Context
from anyformer.side import Side

SPARSE = 4
"""Places a token beyond which a line is too long to be worth it."""


@dataclass(frozen=True)
class Line:
    """Places 0 to length - 1, on each of which stands one query and one key at most.

    Args:
        queries, keys: the place of each, `length` for padding; None: they are the last ones in the order of their slots.
        width: places of a row of a grid, which begins with one; 0: there is no grid.
    """

    length: int
    queries: Int[Tensor, "#b n"] | None = None
    keys: Int[Tensor, "#b m"] | None = None
    width: int = 0

    def of_queries(self, x: Float[Tensor, "b h n w"]) -> Float[Tensor, "b h l w"]:
        """Queries on their places, 0 where none is."""
        return _onto(x, self.queries, self.length)

    def of_keys(self, x: Float[Tensor, "b h m w"]) -> Float[Tensor, "b h l w"]:
        """Keys on their places, 0 where none is."""
        return _onto(x, self.keys, self.length)

    def back(self, x: Float[Tensor, "b h l w"], n: int) -> Float[Tensor, "b h n w"]:
        """What stands on the places of the n queries; 0 for padding."""
        if self.queries is None:
            return x[:, :, self.length - n :]
        x = F.pad(x, (0, 0, 0, 1))
        return x.gather(2, self.queries[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))

    def offsets(self, low: int, high: int, device: torch.device) -> Int[Tensor, "r a"]:
        """Rows and columns of the distances low to high."""
        steps = torch.arange(low, high + 1, device=device)
        rows = torch.div(steps + self.width // 2, self.width, rounding_mode="floor")
        return torch.stack([rows, steps - rows * self.width], dim=-1)


def line(context: Context, *, apart: bool = True) -> Line | None:
    """The line of this forward; None where there is none: two tokens stand on one place, documents or tokens without a position
    are among them, later tokens do not stand farther on, or places are many more than tokens.

    Args:
        apart: whether rows of a grid are set apart, so that no two offsets are the same distance.
    """
    queries, keys = context.queries, context.keys
    sides = (queries, keys)
    if any(each.without is not None or each.documents is not None for each in sides):
        return None
    arithmetic = queries.arithmetic and keys.arithmetic
    if arithmetic and queries.keep is None and keys.keep is None:
        return Line(max(queries.length, keys.length))
    if torch.compiler.is_compiling() or keys.positions.is_meta:
        return None
    real = [_real(each) for each in sides]
    if not all(bool(is_real.any()) for is_real in real):
        return None
    places, width = _numbered([each.positions for each in sides], real, apart)
    least, most = _range(places, real)
    least -= least % width if width else 0
    if most - least >= SPARSE * max(queries.length, keys.length):
        return None
    places = [place - least for place in places]
    ordered = _tail(queries, keys) and _rising(places[1], real[1]) if context.causal else _apart(places, real)
    if not arithmetic and not ordered:
        return None
    length = most - least + 1
    q_places, k_places = (torch.where(is_real, place, length) for place, is_real in zip(places, real, strict=True))
    return Line(length, q_places, k_places, width)


def _onto(x: Tensor, places: Tensor | None, length: int) -> Tensor:
    if places is None:
        return F.pad(x, (0, 0, length - x.shape[2], 0))
    empty = x.new_zeros(*x.shape[:2], length + 1, x.shape[3])
    return empty.scatter(2, places[:, None, :, None].expand(x.shape), x)[:, :, :length]


def _real(tokens: Side) -> Bool[Tensor, "#b t"]:
    everyone = torch.ones(1, 1, dtype=torch.bool, device=tokens.places.device)
    return everyone.expand(len(tokens.places), tokens.length) if tokens.keep is None else tokens.keep


def _tail(queries: Side, keys: Side) -> bool:
    """Whether the queries are the last keys."""
    if queries.length > keys.length:
        return False
    last = keys.part(keys.length - queries.length, keys.length)
    facts = (queries.places, last.places), (queries.positions, last.positions)
    return all(ours.shape == theirs.shape and torch.equal(ours, theirs) for ours, theirs in facts)


def _numbered(positions: list[Tensor], real: list[Tensor], apart: bool) -> tuple[list[Tensor], int]:
    """Positions as single numbers, and how many places a row of a grid has (0: no grid)."""
    if positions[0].dim() == 2:
        return positions, 0
    least, most = _range([each[..., 1] for each in positions], real)
    width = (most - least) * (1 + apart) + 1
    return [each[..., 0] * width + each[..., 1] - least for each in positions], width


def _range(numbers: list[Tensor], real: list[Tensor]) -> tuple[int, int]:
    """The least and the greatest number of real tokens."""
    both = [torch.broadcast_tensors(*pair) for pair in zip(numbers, real, strict=True)]
    shown = torch.cat([each[is_real] for each, is_real in both])
    least, most = shown.aminmax()
    return int(least), int(most)


def _rising(places: Tensor, real: Tensor) -> bool:
    """Whether each real token stands farther on than those before it."""
    last = torch.where(real, places, -1).cummax(dim=-1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    return bool(((places > before) | ~real).all())


def _apart(places: list[Tensor], real: list[Tensor]) -> bool:
    """Whether no two queries and no two keys stand on one place."""
    for each, is_real in zip(places, real, strict=True):
        padding = -1 - torch.arange(each.shape[-1], device=each.device)
        ordered = torch.where(is_real, each, padding).sort(dim=-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            return False
    return True
