"""The tokens of one side of a forward, queries or keys: where they are, and which of them are real.

Place: the number of real tokens before a token in its row, cached tokens included.
Position: what encodings read. By default the place, from 0 again in each document; the user may give any.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """The tokens of one side, queries or keys, in slot order.

    Args:
        places: number of real tokens before each in its row.
        positions: what encodings read, with a last axis of 2 on a grid.
        keep: which are real tokens; None: all.
        documents: the document of each; None: one document.
        flags: which are flagged as global; None: none.
        without: which have no position (class and register tokens); None: none.
        arithmetic: whether positions are places.
        drawn: what stands for each position from 0 on in this forward, for encodings that draw positions; None: they draw.
    """

    places: Int[Tensor, "#b t"]
    positions: Int[Tensor, "#b t *a"]
    keep: Bool[Tensor, "b t"] | None = None
    documents: Int[Tensor, "b t"] | None = None
    flags: Bool[Tensor, "b t"] | None = None
    without: Bool[Tensor, "b t"] | None = None
    arithmetic: bool = True
    drawn: Int[Tensor, "p"] | None = None

    @property
    def length(self) -> int:
        return self.places.shape[1]

    @property
    def count(self) -> Int[Tensor, "b 1"] | int:
        """Number of real tokens of each row."""
        return self.length if self.keep is None else self.keep.sum(dim=1, keepdim=True)

    @property
    def batch(self) -> int:
        """Rows that may differ; 1 where all are alike."""
        return max(part.shape[0] for part in self._tensors().values())

    def part(self, start: int, stop: int) -> "Side":
        """The tokens of slots start..stop-1."""
        return self._map(lambda tensor: tensor[:, start:stop])

    def rows(self, rows: Int[Tensor, "r"]) -> "Side":
        """The given rows of the batch."""
        return self._map(lambda tensor: tensor if tensor.shape[0] == 1 else tensor[rows])

    def take(self, order: Int[Tensor, "b s"]) -> "Side":
        """The tokens of each row in the given order of slots."""
        return self._map(lambda tensor: take(tensor, order))

    def join(self, later: "Side") -> "Side":
        """These tokens followed by later ones."""
        b = max(self.batch, later.batch)

        def both(name: str, fill: bool | int) -> Tensor | None:
            sides = [(side._tensors().get(name), side.length) for side in (self, later)]
            known = [part for part, _ in sides if part is not None]
            if not known:
                return None
            return torch.cat(
                [
                    known[0].new_full((b, length), fill) if part is None else part.expand(b, -1)
                    for part, length in sides
                ],
                dim=1,
            )

        return Side(
            places=torch.cat([self.places.expand(b, -1), later.places.expand(b, -1)], dim=1),
            positions=torch.cat([side.positions.expand(b, *side.positions.shape[1:]) for side in (self, later)], dim=1),
            keep=both("keep", True),
            documents=both("documents", 0),
            flags=both("flags", False),
            without=both("without", False),
            arithmetic=self.arithmetic and later.arithmetic,
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Side":
        return replace(self, **{name: function(part) for name, part in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        names = ("places", "positions", "keep", "documents", "flags", "without")
        parts = {name: getattr(self, name) for name in names}
        return {name: part for name, part in parts.items() if part is not None}


def take(x: Shaped[Tensor, "#b t *rest"], slots: Int[Tensor, "b s"]) -> Shaped[Tensor, "b s *rest"]:
    """The tokens of the given slots of each row."""
    x = x.expand(slots.shape[0], *x.shape[1:])
    return x.gather(1, slots.reshape(*slots.shape, *(1,) * (x.dim() - 2)).expand(*slots.shape, *x.shape[2:]))


def grid(rows: int, columns: int, device: torch.device | None = None) -> Int[Tensor, "1 t 2"]:
    """The row and the column of each token of an image read row by row: positions for encodings on a grid."""
    index = torch.arange(rows * columns, device=device)
    return torch.stack([index // max(columns, 1), index % max(columns, 1)], dim=-1)[None]


def whole(name: str, positions: Shaped[Tensor, "#b t *a"]) -> Int[Tensor, "#b t *a"]:
    """Positions as they are.

    Args:
        name: what the argument is called, for the message.

    Raises:
        ValueError: they are no whole numbers; encodings count tokens.
    """
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        got = str(positions.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name}: expected whole numbers, got {got}; round them, or count in finer steps (tenths as 0, 1, 2, ...)"
        )
    return positions


def left_order(keep: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The slots of each row with real tokens first, order kept; without a stable sort, which ONNX does not have."""
    rank = torch.where(keep, keep.cumsum(dim=1), keep.sum(dim=1, keepdim=True) + (~keep).cumsum(dim=1)) - 1
    return torch.zeros_like(rank).scatter(1, rank, torch.arange(keep.shape[1], device=keep.device).expand_as(rank))


def right_order(keep: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The slots of each row with real tokens last, order kept."""
    return keep.shape[1] - 1 - left_order(keep.flip(1)).flip(1)


def side(
    length: int,
    device: torch.device,
    *,
    start: Int[Tensor, "b 1"] | int = 0,
    keep: Bool[Tensor, "b t"] | None = None,
    positions: Int[Tensor, "#b t *a"] | None = None,
    documents: Int[Tensor, "b t"] | None = None,
    flags: Bool[Tensor, "b t"] | None = None,
    without: Bool[Tensor, "b t"] | None = None,
) -> Side:
    """The side of `length` tokens, places counted from `start`, positions (where not given) equal to places.

    Raises:
        ValueError: positions are no whole numbers.
    """
    if keep is None:
        places = start + torch.arange(length, device=device)[None]
    else:
        places = start + keep.cumsum(dim=1) - keep.to(torch.int64)
    arithmetic = positions is None and documents is None
    return Side(
        places,
        places if positions is None else whole("positions", positions),
        keep,
        documents,
        flags,
        without,
        arithmetic,
    )


def restart(tokens: Side, new: int) -> Side:
    """The last `new` tokens of a side with their positions counted from 0 again in each document."""
    last = tokens.part(tokens.length - new, tokens.length)
    if tokens.documents is None:
        return last
    documents, index = tokens.documents.unique(return_inverse=True)
    places = tokens.places.expand(tokens.documents.shape)
    real = (
        places
        if tokens.keep is None
        else torch.where(tokens.keep, places, tokens.length + int(places.max()) if places.numel() else 0)
    )
    first = places.new_full((places.shape[0], len(documents)), torch.iinfo(places.dtype).max)
    first = first.scatter_reduce(1, index, real, "amin").gather(1, index[:, tokens.length - new :])
    return replace(last, positions=(last.places - first).clamp(min=0))
