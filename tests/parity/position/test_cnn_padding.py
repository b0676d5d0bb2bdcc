"""Convolutions before the first block against torch's, and what their padding tells."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.errors import SpecError
from anyformer.ops.neighbours import in_line
from anyformer.position.base import Position
from anyformer.side import Side, side

MODES = {"zeros": "constant", "reflect": "reflect", "circular": "circular"}


def built(knobs: str = "", *, causal: bool = False, dim: int = 4) -> Position:
    position = af.build_position(f"cnn_padding({knobs})", af.Site(dim, 1, causal=causal)).double()
    torch.nn.init.normal_(position.constants)
    return position


def at(positions: Tensor, **facts: Tensor) -> Side:
    return side(positions.shape[1], positions.device, positions=positions, **facts)


def agree(ours: Tensor, theirs: Tensor, position: Position, x: Tensor) -> None:
    """Outputs and gradients."""
    probe = torch.randn_like(ours)
    asked = (x, position.filters, position.constants)
    results = [(out, *torch.autograd.grad((out * probe).sum(), asked)) for out in (ours, theirs)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padding", MODES)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_sequences(size: int, padding: str) -> None:
    position = built(f"depth=3, size={size}, padding={padding}")
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    hidden = x.mT
    for layer in range(3):
        padded = F.pad(hidden, (size // 2, size // 2), mode=MODES[padding])
        hidden = F.conv1d(padded, position.filters[layer].permute(2, 1, 0), position.constants[layer])
        hidden = hidden.relu() if layer < 2 else hidden
    agree(position.read(x, side(7, x.device), None), x + hidden.mT, position, x)


def test_causal_sequences() -> None:
    position = built("depth=3, size=4", causal=True)
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    hidden = x.mT
    for layer in range(3):
        hidden = F.conv1d(F.pad(hidden, (3, 0)), position.filters[layer].permute(2, 1, 0), position.constants[layer])
        hidden = hidden.relu() if layer < 2 else hidden
    agree(position.read(x, side(7, x.device), None), x + hidden.mT, position, x)


@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (1, 7)])
def test_images(rows: int, columns: int) -> None:
    position = built("grid=True")
    x = torch.randn(2, rows * columns, 4, dtype=torch.float64, requires_grad=True)
    image = hidden = x.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
    for layer in range(2):
        kernel = position.filters[layer].unflatten(0, (3, 3)).permute(3, 2, 0, 1)
        hidden = F.conv2d(hidden, kernel, position.constants[layer], padding=1)
        hidden = hidden.relu() if layer < 1 else hidden
    agree(position.read(x, at(af.grid(rows, columns)), None), (image + hidden).flatten(2).mT, position, x)


@pytest.mark.parametrize("padding", MODES)
def test_only_zeros_tell_where_a_token_is(padding: str) -> None:
    """Of equal tokens, those near an end differ with zeros beyond it, and with nothing else."""
    out = built(f"depth=3, padding={padding}").read(
        torch.ones(1, 12, 4, dtype=torch.float64), side(12, torch.device("cpu")), None
    )
    unequal = (out - out[:, 6:7]).detach().abs().amax(dim=(0, 2)) > 1e-9
    assert unequal.nonzero()[:, 0].tolist() == ([0, 1, 2, 9, 10, 11] if padding == "zeros" else [])


def test_circular_padding_turns_with_the_sequence() -> None:
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    for padding, turns in (("circular", True), ("zeros", False)):
        position = built(f"padding={padding}")
        turned = position.read(x.roll(2, dims=1), side(9, x.device), None)
        assert torch.allclose(turned, position.read(x, side(9, x.device), None).roll(2, dims=1)) == turns


@pytest.mark.parametrize("padding", MODES)
def test_a_shorter_row_ends_where_its_tokens_end(padding: str) -> None:
    position, x = built(f"depth=3, padding={padding}"), torch.randn(1, 9, 4, dtype=torch.float64)
    for length in (5, 2, 1):
        alone = position.read(x[:, :length], side(length, x.device), None)
        keep = torch.arange(9)[None] < length
        padded = position.read(x * keep[..., None], side(9, x.device, keep=keep), None)
        torch.testing.assert_close(padded[:, :length], alone, rtol=0, atol=1e-12)


def test_neighbours_beyond_a_short_line() -> None:
    two, one, none = torch.tensor([[2]]), torch.tensor([[1]]), torch.tensor([[0]])
    assert in_line(2, 3, 0, real=two, padding="reflect")[0].tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert in_line(1, 1, 1, real=one, padding="reflect")[0].tolist() == [[0, 0, 0]]
    assert in_line(1, 1, 1, real=none, padding="circular")[0].tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(("causal", "grid"), [(False, False), (False, True), (True, False)])
def test_class_tokens_are_neither_read_nor_changed(causal: bool, grid: bool) -> None:
    """In front of a sequence, one is as good as the border."""
    spec = f"cnn_padding(depth=3, grid={grid})"
    config = af.ModelConfig(vocab=9, dim=8, depth=1, heads=2, head="mlm", position=spec, causal=causal)
    model = af.Transformer(config).double().eval()
    torch.nn.init.normal_(model.embedding.encodings[0].constants)
    tokens, without = torch.randint(9, (1, 7)), torch.arange(7)[None] == 0
    places = af.grid(2, 3) if grid else torch.arange(6)[None]
    embedded = model.embedding(tokens, at(torch.cat([places[:, 2:3], places], dim=1), without=without))
    torch.testing.assert_close(embedded[:, 1:], model.embedding(tokens[:, 1:], at(places)), rtol=0, atol=1e-12)
    torch.testing.assert_close(embedded[:, 0], model.embedding.tokens(tokens[:, 0]), rtol=0, atol=0)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="cnn_padding: on a grid there is no earlier and later; use grid=False"):
        built("grid=True", causal=True)
    with pytest.raises(SpecError, match="a filter around a token covers an odd number of tokens, got size=2; use 3"):
        built("size=2")
    for knobs, causal in (("padding=circular", True), ("padding=reflect, grid=True", False)):
        with pytest.raises(SpecError, match="needs both ends of a sequence; on a grid and in causal models use zeros"):
            built(knobs, causal=causal)
