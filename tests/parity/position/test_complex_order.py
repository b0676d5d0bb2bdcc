"""Complex order against complex numbers, and against the rotation that it is where all words share frequencies."""

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position

KINDS = ("frequencies=dimension", "frequencies=word, vocab=7", "frequencies=both, vocab=7")


def built(knobs: str, *, dim: int = 6) -> Position:
    position = af.build_position(f"complex_order({knobs})", af.Site(dim, 1)).double()
    nn.init.normal_(position.frequencies)
    return position


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 5, 6, dtype=torch.float64), torch.randint(0, 50, (2, 5)), torch.randint(0, 7, (2, 5))


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, dim=-1))


@pytest.mark.parametrize("phase", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_wave_of_each_word(kind: str, phase: bool) -> None:
    position, (x, places, tokens) = built(f"{kind}, phase={phase}"), drawn()
    found = as_complex(position.embed(x, places, tokens))
    table = position.frequencies.expand(7, 3)
    for b in range(2):
        for i in range(5):
            amplitude = as_complex(x)[b, i] if phase else (x[b, i, :3] + x[b, i, 3:]) / 2**0.5
            wave = torch.polar(torch.ones(3, dtype=torch.float64), table[tokens[b, i]] * places[b, i])
            torch.testing.assert_close(found[b, i], amplitude * wave, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shift_multiplies_by_the_wave_of_the_shift(kind: str) -> None:
    position, (x, places, tokens) = built(kind), drawn()
    here, there = (as_complex(position.embed(x, places + by, tokens)) for by in (0, 13))
    turn = torch.polar(torch.ones(1, dtype=torch.float64), position.frequencies.expand(7, 3)[tokens] * 13)
    torch.testing.assert_close(there, here * turn, rtol=0, atol=1e-12)
    torch.testing.assert_close(here.abs(), as_complex(x).abs(), rtol=0, atol=1e-12)


def test_shared_frequencies_are_a_rotation_of_the_whole_vector() -> None:
    """Rope turns queries and keys of each head so; here it is the token vector, once."""
    x, places, tokens = drawn()
    found = af.build_position("complex_order", af.Site(6, 1)).embed(x, places, tokens)
    rope = af.build_position("rope", af.Site(6, 1))
    turned, _ = rope.rotate(x[:, None], x[:, None], places, places)
    torch.testing.assert_close(found, turned[:, 0], rtol=0, atol=1e-5)  # frequencies are kept in float32


@pytest.mark.parametrize("phase", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, phase: bool) -> None:
    position, (x, places, tokens) = built(f"{kind}, phase={phase}"), drawn()

    def embedded(x: Tensor, frequencies: Tensor) -> Tensor:
        return torch.func.functional_call(
            Embedded(position), {"position.frequencies": frequencies}, (x, places, tokens)
        )

    weights = position.frequencies.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(embedded, (x.requires_grad_(), weights))


class Embedded(nn.Module):
    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def forward(self, x: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        return self.position.embed(x, places, tokens)


def test_where_frequencies_start() -> None:
    waves = torch.tensor([10000.0 ** (-2 * wave / 6) for wave in range(3)])
    for knobs, shape in (("", (3,)), ("frequencies=both, vocab=4", (4, 3))):
        started = af.build_position(f"complex_order({knobs})", af.Site(6, 1)).frequencies
        torch.testing.assert_close(started, waves.expand(shape), rtol=1e-6, atol=0)
    words = af.build_position("complex_order(frequencies=word, vocab=99, base=100)", af.Site(6, 1)).frequencies.detach()
    assert words.shape == (99, 1)
    assert 0.01 <= float(words.min()) < 0.02
    assert 0.5 < float(words.max()) <= 1


def test_in_a_model() -> None:
    config = af.ModelConfig(
        vocab=7, dim=8, depth=1, heads=2, position="complex_order(frequencies=word, vocab=7)", attention="linear"
    )
    assert af.Transformer(config)(torch.randint(0, 7, (2, 5))).shape == (2, 5, 7)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="complex_order: real and imaginary parts need an even dim, got 5"):
        af.build_position("complex_order", af.Site(5, 1))
    for knobs in ("frequencies=word", "vocab=7"):
        with pytest.raises(SpecError, match="expected vocab, the number of token ids, where words have frequencies"):
            af.build_position(f"complex_order({knobs})", af.Site(6, 1))
    position, (x, places, tokens) = built(KINDS[1]), drawn()
    with pytest.raises(SpecError, match="words have frequencies here, so it needs their token ids; use Transformer"):
        position.embed(x, places, None)
    with pytest.raises(SpecError, match="complex_order: token id 9 has no frequency; build it with vocab=10"):
        position.embed(x, places, tokens * 0 + 9)
