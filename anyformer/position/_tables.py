"""Trained tables of one row a position, taken to more positions."""

from math import isqrt

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.ops.draws import generator
from anyformer.spec import Spec


def with_new_rows(table: Float[Tensor, "r c"], new: int, std: float, seed: int) -> Float[Tensor, "s c"]:
    """The table and below it `new` rows drawn as at the start of training, from a generator of their own."""
    draw = generator(seed, "random_rows", len(table))
    rows = torch.randn(new, table.shape[1], generator=draw, device="cpu") * std
    return torch.cat([table, rows.to(table)])


def stretched(table: Float[Tensor, "r c"], rows: int) -> Float[Tensor, "s c"]:
    """Row p of `rows` lies at p (r - 1) / (rows - 1) between the rows of the table: first and last row stay."""
    wide = table.to(torch.promote_types(torch.float32, table.dtype))
    return F.interpolate(wide.T[None], rows, mode="linear", align_corners=True)[0].T.to(table.dtype)


def larger_grid(spec: Spec, size: tuple[int, int], to: int) -> Spec:
    """The spec of an encoding with a table on a grid, resampled to the grid of the same shape with `to` places.

    Raises:
        SpecError: there is no such grid.
    """
    rows, columns = size
    to_columns = isqrt(to * columns // rows)
    to_rows = to_columns * rows // columns
    if to_rows * to_columns != to or to_rows * columns != to_columns * rows:
        raise SpecError(
            f"extend: {spec.name} has a grid of {rows} x {columns}, and no grid of that shape has {to} places; "
            f"use to={4 * rows * columns} for twice as many rows and columns, or another square multiple"
        )
    return with_knobs(spec, rows=rows, columns=columns, to_rows=to_rows, to_columns=to_columns)


def with_knobs(spec: Spec, **knobs: object) -> Spec:
    """The spec with these knobs in place of its own."""
    return Spec(spec.name, (), tuple((dict(spec.knobs) | knobs).items()))


def inner(spec: Spec, name: str) -> Spec | None:
    """The spec that a knob holds, where it is given."""
    value = dict(spec.knobs).get(name)
    return value if isinstance(value, Spec) else None
