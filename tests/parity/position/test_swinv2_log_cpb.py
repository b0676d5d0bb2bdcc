"""Swin V2's bias and its cosine scores against transformers' layer, and the network against its equation."""

import math

import pytest
import torch
from torch import nn
from transformers import Swinv2Config
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

import anyformer as af


def theirs(window: tuple[int, int], trained: list[int]) -> Swinv2SelfAttention:
    peer = Swinv2SelfAttention(Swinv2Config(), 16, 2, window, trained).eval()
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.3)
    peer.logit_scale.data[1] = 7.0  # beyond the bound of ln 100
    return peer.double()


@pytest.mark.parametrize(
    ("window", "trained"), [((3, 2), [0, 0]), ((4, 3), [3, 5]), ((1, 1), [0, 0])], ids=["own", "larger", "one token"]
)
def test_a_layer_of_transformers(window: tuple[int, int], trained: list[int]) -> None:
    peer = theirs(window, trained)
    rows, columns = window if trained == [0, 0] else trained
    ours = af.MultiHead(16, 2, position=f"swinv2_log_cpb(rows={rows}, columns={columns}, cosine=True)").double()
    for name, other in zip("qkv", (peer.query, peer.key, peer.value), strict=True):
        bias = torch.zeros(16) if other.bias is None else other.bias.detach()
        getattr(ours, name).load_state_dict({"weight": other.weight.detach(), "bias": bias})
    ours.o.load_state_dict({"weight": torch.eye(16), "bias": torch.zeros(16)})
    first, _, second = peer.continuous_position_bias_mlp
    ours.position.hidden.load_state_dict(first.state_dict())
    ours.position.out.load_state_dict(second.state_dict())
    ours.position.log_scale.data.copy_(peer.logit_scale.detach().flatten())
    x, probe = torch.randn(2, 2, window[0] * window[1], 16, dtype=torch.float64)
    x.requires_grad_()
    weights = [
        (ours.position.hidden.weight, first.weight),
        (ours.position.out.weight, second.weight),
        (ours.position.log_scale, peer.logit_scale),
    ]
    results = []
    for side, out in enumerate((ours(x, positions=af.grid(*window)), peer(x)[0])):
        asked = (x, *(pair[side] for pair in weights))
        grads = torch.autograd.grad((out * probe).sum(), asked)
        results.append((out, *(grad.flatten() for grad in grads)))
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)  # its offsets are float32


def test_the_network_is_the_equation() -> None:
    position = af.build_position("swinv2_log_cpb(rows=5, columns=1, hidden=3)", af.Site(8, 2)).double()
    first, bias, second = (
        each.tolist() for each in (position.hidden.weight, position.hidden.bias, position.out.weight)
    )
    for y, x in ((0, 0), (-3, 2), (40, -1), (100_000, 7)):
        spaced = [math.copysign(math.log2(1 + 8 * abs(t) / unit) / math.log2(8), t) for t, unit in ((y, 4), (x, 1))]
        hidden = [max(0.0, w[0] * spaced[0] + w[1] * spaced[1] + b) for w, b in zip(first, bias, strict=True)]
        expected = [16 / (1 + math.exp(-sum(w * each for w, each in zip(row, hidden, strict=True)))) for row in second]
        found = position.network(torch.tensor([[y, x]]))[0].tolist()
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_table_of_offsets_and_single_pairs_agree() -> None:
    position = af.build_position("swinv2_log_cpb(hidden=5)", af.Site(8, 2)).double()
    head, near = torch.arange(2)[:, None, None], torch.randint(0, 4, (2, 9, 2))
    for places in (near, near * 1000):
        q_pos, k_pos = places[:, None, :, None], places[:, None, None, :]
        whole = position.bias(head, q_pos, k_pos)
        assert whole.shape == (2, 2, 9, 9)
        for b, h, i, j in ((0, 0, 0, 0), (1, 1, 8, 3), (0, 1, 2, 7)):
            alone = position.bias(torch.tensor([h]), places[b, i][None], places[b, j][None])
            torch.testing.assert_close(whole[b, h, i, j], alone[0], rtol=0, atol=1e-12)
