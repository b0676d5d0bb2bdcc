"""PEG against torch's depthwise convolutions of sequences and images."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position
from anyformer.side import Side, side


def built(knobs: str = "", *, causal: bool = False, dim: int = 4) -> Position:
    position = af.build_position(f"peg({knobs})", af.Site(dim, 1, causal=causal)).double()
    torch.nn.init.normal_(position.constant)
    return position


def at(positions: Tensor, **facts: Tensor) -> Side:
    return side(positions.shape[1], positions.device, positions=positions, **facts)


def agree(ours: Tensor, theirs: Tensor, position: Position, x: Tensor) -> None:
    """Outputs and gradients."""
    probe = torch.randn_like(ours)
    asked = (x, position.filter, position.constant)
    results = [(out, *torch.autograd.grad((out * probe).sum(), asked)) for out in (ours, theirs)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (1, 7), (6, 1)])
def test_images(size: int, rows: int, columns: int) -> None:
    position, x = (
        built(f"size={size}, grid=True"),
        torch.randn(2, rows * columns, 4, dtype=torch.float64, requires_grad=True),
    )
    image = x.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
    kernel = position.filter.T.unflatten(1, (1, size, size))
    theirs = image + F.conv2d(image, kernel, position.constant, padding=size // 2, groups=4)
    agree(position.read(x, at(af.grid(rows, columns)), None), theirs.flatten(2).mT, position, x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_sequences(size: int, causal: bool) -> None:
    position, x = built(f"size={size}", causal=causal), torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    pads = (size - 1, 0) if causal else (size // 2, size // 2)
    kernel = position.filter.T[:, None]
    theirs = x.mT + F.conv1d(F.pad(x.mT, pads), kernel, position.constant, groups=4)
    agree(position.read(x, side(7, x.device), None), theirs.mT, position, x)


def test_order_does_not_matter_on_a_grid_and_absent_tokens_are_zeros() -> None:
    position, x = built("grid=True"), torch.randn(1, 20, 4, dtype=torch.float64)
    chosen = torch.randperm(20)[:13]
    image = torch.zeros(1, 20, 4, dtype=torch.float64)
    image[:, chosen] = x[:, chosen]
    whole = position.read(image, at(af.grid(4, 5)), None)
    some = position.read(x[:, chosen], at(af.grid(4, 5)[:, chosen] + torch.tensor([100, -3])), None)
    torch.testing.assert_close(some, whole[:, chosen], rtol=0, atol=1e-12)


def test_class_tokens_are_neither_read_nor_changed() -> None:
    """Whatever `positions` says of them."""
    config = {"vocab": 9, "dim": 8, "depth": 1, "heads": 2, "head": "mlm"}
    for spec, places in (("peg(grid=True)", af.grid(2, 3)), ("peg", torch.arange(6)[None])):
        model = af.Transformer(af.ModelConfig(position=spec, **config)).double().eval()
        positions = torch.cat([places[:, 2:3], places], dim=1)
        tokens, without = torch.randint(9, (1, 7)), torch.arange(7)[None] == 0
        embedded = model.embedding(tokens, at(positions, without=without))
        alone = model.embedding(tokens[:, 1:], at(places))
        torch.testing.assert_close(embedded[:, 1:], alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(embedded[:, 0], model.embedding.tokens(tokens[:, 0]), rtol=0, atol=0)


def test_only_the_border_tells_where_a_token_is() -> None:
    """Equal tokens stay equal inside of an image, and differ at its border."""
    position = built("grid=True")
    out = position.read(torch.ones(1, 35, 4, dtype=torch.float64), at(af.grid(5, 7)), None).detach()
    image = out[0].unflatten(0, (5, 7))
    torch.testing.assert_close(image[1:-1, 1:-1], image[1:2, 1:2].expand(3, 5, -1), rtol=0, atol=1e-12)
    assert float((image[0, 3] - image[2, 3]).abs().max()) > 0.1


def test_refusals() -> None:
    with pytest.raises(
        SpecError, match="peg: on a grid there is no earlier and later; use grid=False in causal models"
    ):
        built("grid=True", causal=True)
    with pytest.raises(SpecError, match="a filter around a token covers an odd number of tokens, got size=4; use 5"):
        built("size=4")
    assert built("size=4", causal=True).filter.shape == (4, 4)
