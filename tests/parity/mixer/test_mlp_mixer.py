"""MLP-Mixer against torch's own layers along the sequence, and the place of each unit when causal."""

import pytest
import torch
from torch import Tensor, nn

from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.mlp_mixer import MLPMixer, unit_places
from anyformer.model.build import build_mixer
from anyformer.site import Site

DIM, LONGEST = 6, 9


def built(hidden: int, *, causal: bool = False) -> MLPMixer:
    site = Site(DIM, 2, causal=causal, max_length=LONGEST)
    mixer = build_mixer(f"mlp_mixer(hidden={hidden})", "none", site).double().eval()
    assert isinstance(mixer, MLPMixer)
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight)
    return mixer


def by_layers(mixer: MLPMixer, *, causal: bool) -> nn.Sequential:
    """Two linear layers on the transposed sequence, with the forbidden weights at 0."""
    hidden = mixer.inward.shape[1]
    layers = nn.Sequential(nn.Linear(LONGEST, hidden), nn.GELU(), nn.Linear(hidden, LONGEST)).double()
    inward, outward = mixer.inward.detach().clone(), mixer.outward.detach().clone()
    if causal:
        for s in range(hidden):
            place = next(p for p in range(LONGEST) if (p + 1) * hidden >= (s + 1) * LONGEST)
            inward[place + 1 :, s] = 0
            outward[:place, s] = 0
    layers[0].weight.data.copy_(inward.T)
    layers[0].bias.data.copy_(mixer.inward_bias)
    layers[2].weight.data.copy_(outward)
    layers[2].bias.data.copy_(mixer.outward_bias)
    return layers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hidden", [1, 4, LONGEST, 20])
@pytest.mark.parametrize("n", [1, 5, LONGEST])
def test_equals_two_linear_layers_along_the_sequence(n: int, hidden: int, causal: bool) -> None:
    mixer = built(hidden, causal=causal)
    layers = by_layers(mixer, causal=causal)
    keep = torch.arange(n) < torch.tensor([[n], [(n + 1) // 2]])
    x, weights = torch.randn(2, 2, n, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    filled = torch.zeros(2, LONGEST, DIM, dtype=torch.float64)
    filled[:, :n] = other * keep[..., None]
    expected = layers(filled.transpose(1, 2)).transpose(1, 2)[:, :n] * keep[..., None]
    got = mixer(mine, attention_mask=keep)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    if not causal:
        close(mixer.inward.grad, layers[0].weight.grad.T)
        close(mixer.outward.grad, layers[2].weight.grad)
    close(mixer.inward_bias.grad, layers[0].bias.grad)
    close(mixer.outward_bias.grad, layers[2].bias.grad)


@pytest.mark.parametrize("hidden", [1, 4, LONGEST, 20])
def test_when_causal_a_gradient_never_flows_to_the_past(hidden: int) -> None:
    mixer = built(hidden, causal=True)
    reads = torch.autograd.functional.jacobian(lambda x: mixer(x)[0].sum(-1), torch.randn(1, LONGEST, DIM).double())
    reads = reads[:, 0].abs().sum(-1) > 0  # output, input
    assert not reads.triu(1).any()
    assert reads[-1].all()
    if hidden >= LONGEST:
        assert reads.diagonal().all()


def test_units_are_spread_evenly() -> None:
    where = torch.device("cpu")
    assert unit_places(9, 9, where).tolist() == list(range(9))
    assert unit_places(9, 3, where).tolist() == [2, 5, 8]
    assert unit_places(4, 8, where).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert unit_places(7, 2, where).tolist() == [3, 6]


def test_it_is_the_same_for_every_channel_and_not_blind_to_order() -> None:
    mixer, x = built(4), torch.randn(1, 7, DIM, dtype=torch.float64)
    close(mixer(x.flip(-1)), mixer(x).flip(-1))
    assert not torch.allclose(mixer(x.flip(1)), mixer(x).flip(1), atol=1e-3)


def test_default_sizes() -> None:
    sizes = [
        build_mixer("mlp_mixer", "none", Site(dim, 1, causal=causal, max_length=LONGEST)).state_dict()["inward"].shape
        for dim, causal in ((DIM, False), (1, False), (DIM, True))
    ]
    assert sizes == [(LONGEST, 3), (LONGEST, 1), (LONGEST, LONGEST)]


def test_what_it_refuses() -> None:
    with pytest.raises(SpecError, match="hidden=0: expected"):
        build_mixer("mlp_mixer(hidden=0)", "none", Site(DIM, 2))
    with pytest.raises(SpecError, match="mlp_mixer was built for at most 9 tokens, got 10; build with max_length=10"):
        built(4)(torch.randn(1, 10, DIM, dtype=torch.float64))
    with pytest.raises(IncompatibleError, match=r"mlp_mixer cannot use alibi.*use an encoding added at the embedding"):
        build_mixer("mlp_mixer", "alibi", Site(DIM, 2))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
