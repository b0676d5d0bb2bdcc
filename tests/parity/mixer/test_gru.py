"""GRU against its equation, token by token: torch's GRUCell, and the gates written out."""

import pytest
import torch
from torch import Tensor, nn

from anyformer.mixer.gru import GRU
from anyformer.model.build import build_mixer
from anyformer.site import Site

LENGTHS = [6, 3, 1, 0]


def cell(unit: nn.GRU) -> nn.GRUCell:
    made = nn.GRUCell(unit.input_size, unit.hidden_size).double()
    made.load_state_dict({name.removesuffix("_l0"): part for name, part in unit.state_dict().items()})
    return made


def written_out(unit: nn.GRUCell, x: Tensor, h: Tensor) -> Tensor:
    """One step of the equation in the module's header."""
    from_x = (x @ unit.weight_ih.T + unit.bias_ih).chunk(3, dim=-1)
    from_h = (h @ unit.weight_hh.T + unit.bias_hh).chunk(3, dim=-1)
    r, z = torch.sigmoid(from_x[0] + from_h[0]), torch.sigmoid(from_x[1] + from_h[1])
    return (1 - z) * torch.tanh(from_x[2] + r * from_h[2]) + z * h


def run(unit: nn.GRUCell, tokens: Tensor, *, by_hand: bool) -> Tensor:
    """The state after each token of one row."""
    h, states = torch.zeros(1, unit.hidden_size, dtype=tokens.dtype), []
    for token in tokens:
        h = written_out(unit, token[None], h) if by_hand else unit(token[None], h)
        states.append(h[0])
    return torch.stack(states)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_cell_token_by_token(causal: bool, by_hand: bool) -> None:
    mixer = build_mixer("gru(width=5)", "none", Site(4, 1, causal=causal)).double()
    assert isinstance(mixer, GRU)
    cells = [cell(unit) for unit in (mixer.ahead, mixer.back) if unit is not None]
    assert len(cells) == (1 if causal else 2)
    keep = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    x, weights = torch.randn(2, 4, 6, 4, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    rows = []
    for row, length in enumerate(LENGTHS):
        out = torch.zeros(6, 4, dtype=torch.float64)
        if length:
            real = other[row, :length]
            states = [run(cells[0], real, by_hand=by_hand)]
            if not causal:
                states.append(run(cells[1], real.flip(0), by_hand=by_hand).flip(0))
            out[:length] = torch.cat(states, dim=-1) @ mixer.o.weight.T.detach() + mixer.o.bias.detach()
        rows.append(out)
    got, expected = mixer(mine, attention_mask=keep), torch.stack(rows)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    for unit, peer in zip((mixer.ahead, mixer.back), cells, strict=False):
        assert unit is not None
        for name, weight in peer.named_parameters():
            close(unit.get_parameter(f"{name}_l0").grad, weight.grad)


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
