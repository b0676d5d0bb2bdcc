"""Sinusoidal positions on a grid against transformers, DETR and positional-encodings, and channel by channel."""

import math

import pytest
import torch
from positional_encodings.torch_encodings import PositionalEncoding2D
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

import anyformer as af
from anyformer.errors import SpecError

ROWS, COLUMNS, DIM = 5, 7, 24


def code(knobs: str, positions: torch.Tensor | None = None) -> torch.Tensor:
    positions = af.grid(ROWS, COLUMNS) if positions is None else positions
    position = af.build_position(f"sinusoidal_2d(scale_tokens=False, {knobs})", af.Site(DIM, 2))
    return position.embed(torch.zeros(1, positions.shape[1], DIM, dtype=torch.float64), positions, None)[0]


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=0, atol=2e-6)


def test_rows_first_as_in_transformers() -> None:
    theirs = build_2d_sinusoidal_position_embedding(ROWS, COLUMNS, DIM, dtype=torch.float64)
    torch.testing.assert_close(code("layout=rows"), theirs, rtol=0, atol=1e-12)


def test_interleaved_as_in_positional_encodings() -> None:
    agree(code("layout=interleaved"), PositionalEncoding2D(DIM)(torch.zeros(1, ROWS, COLUMNS, DIM)).flatten(1, 2)[0])


def test_relative_to_the_size_as_in_detr() -> None:
    theirs = DetrSinePositionEmbedding(DIM // 2, normalize=True)((1, DIM, ROWS, COLUMNS), "cpu", torch.float64)
    agree(code(f"layout=interleaved, rows={ROWS}, columns={COLUMNS}"), theirs.flatten(2).mT[0])


CHANNELS = {
    "mae": lambda y, x: [*map(math.sin, x), *map(math.cos, x), *map(math.sin, y), *map(math.cos, y)],
    "rows": lambda y, x: [*map(math.sin, y), *map(math.cos, y), *map(math.sin, x), *map(math.cos, x)],
    "timm": lambda y, x: [*map(math.sin, y), *map(math.sin, x), *map(math.cos, y), *map(math.cos, x)],
    "interleaved": lambda y, x: [wave(each) for axis in (y, x) for each in axis for wave in (math.sin, math.cos)],
}


@pytest.mark.parametrize("layout", CHANNELS)
def test_every_channel(layout: str) -> None:
    places = [(0, 0), (3, 1), (2, 1000), (100_000, 7)]
    found = code(f"layout={layout}, base=100", torch.tensor([places]))
    for row, (y, x) in zip(found.tolist(), places, strict=True):
        angles = [[place * 100.0 ** (-4 * wave / DIM) for wave in range(DIM // 4)] for place in (y, x)]
        assert row == pytest.approx(CHANNELS[layout](*angles), abs=1e-9)


def test_token_vectors_are_scaled_and_their_gradient_too() -> None:
    position = af.build_position("sinusoidal_2d", af.Site(DIM, 2))
    x = torch.randn(1, 35, DIM, dtype=torch.float64, requires_grad=True)
    out = position.embed(x, af.grid(ROWS, COLUMNS), None)
    torch.testing.assert_close(out, x * DIM**0.5 + code("")[None], rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, DIM**0.5), rtol=0, atol=1e-12)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="need a dim that is a multiple of 4, got 6"):
        af.build_position("sinusoidal_2d", af.Site(6, 1))
    with pytest.raises(SpecError, match="expected rows and columns, or neither, got rows=3 and columns=None"):
        af.build_position("sinusoidal_2d(rows=3)", af.Site(8, 1))
