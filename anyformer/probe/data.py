"""Images of one shape each, made from a seed, and the maps of positions that a read-out is asked for."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.ops.draws import generator

SHAPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "disc": lambda row, column, radius: row**2 + column**2 <= radius**2,
    "ring": lambda row, column, radius: ((row**2 + column**2) / radius**2 - 0.65).abs() <= 0.35,
    "square": lambda row, column, radius: torch.maximum(row.abs(), column.abs()) <= 0.9 * radius,
    "cross": lambda row, column, radius: (
        (torch.minimum(row.abs(), column.abs()) <= radius / 4) & (torch.maximum(row.abs(), column.abs()) <= radius)
    ),
}
"""Whether a pixel belongs to the shape, from its row and column counted from the centre, and the radius."""
MAPS = ("horizontal", "vertical", "gaussian", "horizontal stripes", "vertical stripes")


def images(count: int, size: int, seed: int, split: str) -> tuple[Float[Tensor, "b 1 y x"], Int[Tensor, "b"]]:
    """Images of `size` x `size` pixels and the number of the shape in each.

    A shape lies anywhere and goes on at the opposite side where it meets a border, so that what is in an image says nothing about
    where a pixel is.

    Args:
        split: its name keys the draws; images of two splits have nothing in common.
    """
    draw = generator(seed, "shapes", split, size)
    labels = torch.randint(len(SHAPES), (count,), generator=draw)
    centre = torch.rand(count, 2, generator=draw) * size
    radius = (0.12 + 0.1 * torch.rand(count, 1, 1, generator=draw)) * size
    bright = 0.5 + 0.5 * torch.rand(count, 1, 1, generator=draw)
    places = torch.arange(size)
    row, column = ((places - each[:, None] + size / 2) % size - size / 2 for each in centre.unbind(1))
    row, column = row[:, :, None], column[:, None, :]
    inside = torch.zeros(count, size, size, dtype=torch.bool)
    for number, shape in enumerate(SHAPES.values()):
        inside |= (labels == number)[:, None, None] & shape(row, column, radius)
    noise = 0.1 * torch.randn(count, size, size, generator=draw)
    return (inside * bright + noise)[:, None], labels


def maps(size: int) -> Float[Tensor, "t y x"]:
    """The maps of `MAPS`, each from 0 to 1: the column, the row, a bump in the middle, and three waves of either."""
    along = torch.linspace(0, 1, size)
    row, column = along[:, None].expand(size, size), along[None, :].expand(size, size)
    bump = torch.exp(-((row - 0.5) ** 2 + (column - 0.5) ** 2) / (2 * 0.25**2))
    waves = (0.5 - 0.5 * torch.cos(6 * math.pi * each) for each in (column, row))
    return torch.stack([column, row, bump, *waves])
