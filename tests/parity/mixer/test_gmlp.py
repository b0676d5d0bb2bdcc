"""gMLP against the `g_mlp_pytorch` package, and the feed-forward that it starts as."""

import pytest
import torch
import torch.nn.functional as F
from g_mlp_pytorch.g_mlp_pytorch import gMLPBlock
from torch import Tensor

from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.gmlp import GMLP
from anyformer.model.build import build_mixer
from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer
from anyformer.site import Site

DIM, WIDTH, LONGEST = 6, 5, 9


def built(*, causal: bool = False, toeplitz: bool = False) -> GMLP:
    site = Site(DIM, 2, causal=causal, max_length=LONGEST)
    mixer = build_mixer(f"gmlp(width={WIDTH}, toeplitz={toeplitz})", "none", site).double().eval()
    assert isinstance(mixer, GMLP)
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight)
    return mixer


def theirs(mixer: GMLP, *, causal: bool) -> gMLPBlock:
    peer = gMLPBlock(dim=DIM, dim_ff=2 * WIDTH, seq_len=LONGEST, causal=causal).double()
    peer.proj_in[0].load_state_dict(mixer.i.state_dict())
    peer.proj_out.load_state_dict(mixer.o.state_dict())
    peer.sgu.norm.load_state_dict(mixer.gate.norm.state_dict())
    peer.sgu.weight.data.copy_(mixer.gate.rows(torch.arange(LONGEST)[None], LONGEST))
    peer.sgu.bias.data.copy_(mixer.gate.bias[None])
    return peer


@pytest.mark.parametrize("toeplitz", [False, True])
@pytest.mark.parametrize(("n", "causal"), [(LONGEST, False), (LONGEST, True), (4, True)])
def test_equals_the_package(n: int, causal: bool, toeplitz: bool) -> None:
    mixer = built(causal=causal, toeplitz=toeplitz)
    peer = theirs(mixer, causal=causal)
    x, weights = torch.randn(2, 2, n, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = mixer(mine), peer(other)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    close(mixer.i.weight.grad, peer.proj_in[0].weight.grad)
    close(mixer.gate.norm.weight.grad, peer.sgu.norm.weight.grad)
    close(mixer.gate.bias.grad, peer.sgu.bias.grad[0])
    if not toeplitz:
        close(mixer.gate.weight.grad, peer.sgu.weight.grad[0])


def test_a_shorter_sequence_is_one_filled_up_with_nothing() -> None:
    """The package mixes full length only; hidden tokens are those whose normalised stream is 0."""
    mixer, x = built(), torch.randn(2, 4, DIM, dtype=torch.float64)
    u, z = F.gelu(mixer.i(x)).chunk(2, dim=-1)
    gates = torch.einsum("ij,bjf->bif", mixer.gate.weight[:4, :4], mixer.gate.norm(z)) + mixer.gate.bias[:4, None]
    close(mixer(x), mixer.o(u * gates))
    keep = torch.arange(4) < torch.tensor([[4], [2]])
    close(mixer(x, attention_mask=keep)[1, :2], mixer(x[1:, :2])[0])


def test_with_gates_of_one_it_is_a_feed_forward() -> None:
    mixer, x = built(), torch.randn(2, 7, DIM, dtype=torch.float64)
    mixer.gate.weight.data.zero_()
    mixer.gate.bias.data.fill_(1.0)
    close(mixer(x), mixer.o(F.gelu(mixer.i(x))[..., :WIDTH]))


def test_a_fresh_one_starts_near_that() -> None:
    mixer = build_mixer("gmlp", "none", Site(DIM, 2, max_length=LONGEST))
    assert isinstance(mixer, GMLP)
    assert mixer.gate.weight.abs().max() <= 1e-3 / LONGEST
    assert (mixer.gate.bias == 1).all()
    assert mixer.o.in_features == 3 * DIM


def test_a_toeplitz_gate_depends_on_offsets_only() -> None:
    mixer = built(toeplitz=True)
    rows = mixer.gate.rows(torch.arange(LONGEST)[None], LONGEST)[0]
    assert mixer.gate.weight.shape == (2 * LONGEST - 1,)
    for offset in range(1 - LONGEST, LONGEST):
        assert (rows.diagonal(offset) == mixer.gate.weight[offset + LONGEST - 1]).all()


def test_its_block_adds_no_feed_forward() -> None:
    model = Transformer(
        ModelConfig(vocab=7, dim=8, depth=1, heads=2, attention="gmlp", position="none", head="mlm", max_length=9)
    )
    assert model.blocks[0].feed_forward is None
    assert not [name for name in model.state_dict() if "feed_forward" in name]


def test_what_it_refuses() -> None:
    with pytest.raises(SpecError, match="width=0: expected"):
        build_mixer("gmlp(width=0)", "none", Site(DIM, 2))
    with pytest.raises(SpecError, match="gmlp was built for at most 9 tokens, got 10; build with max_length=10"):
        built()(torch.randn(1, 10, DIM, dtype=torch.float64))
    with pytest.raises(IncompatibleError, match=r"gmlp cannot use alibi.*use an encoding added at the embedding"):
        build_mixer("gmlp", "alibi", Site(DIM, 2))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
