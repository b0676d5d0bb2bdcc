"""aMLP against the `g_mlp_pytorch` package, and gMLP where its attention reads nothing."""

import pytest
import torch
from g_mlp_pytorch.g_mlp_pytorch import gMLPBlock
from torch import Tensor

from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.amlp import AMLP
from anyformer.model.build import build_mixer
from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer
from anyformer.site import Site

DIM, WIDTH, TINY, LONGEST = 6, 5, 3, 9


def built(*, causal: bool = False) -> AMLP:
    site = Site(DIM, 2, causal=causal, max_length=LONGEST)
    mixer = build_mixer(f"amlp(width={WIDTH}, tiny={TINY})", "none", site).double().eval()
    assert isinstance(mixer, AMLP)
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight)
    return mixer


def theirs(mixer: AMLP, *, causal: bool) -> gMLPBlock:
    peer = gMLPBlock(dim=DIM, dim_ff=2 * WIDTH, seq_len=LONGEST, causal=causal, attn_dim=TINY).double()
    peer.proj_in[0].load_state_dict(mixer.i.state_dict())
    peer.proj_out.load_state_dict(mixer.o.state_dict())
    peer.sgu.norm.load_state_dict(mixer.gate.norm.state_dict())
    peer.sgu.weight.data.copy_(mixer.gate.weight[None])
    peer.sgu.bias.data.copy_(mixer.gate.bias[None])
    for linear in (mixer.q, mixer.k, mixer.v):
        linear.bias.data.zero_()  # the peer has none
    peer.attn.to_qkv.weight.data.copy_(torch.cat([mixer.q.weight, mixer.k.weight, mixer.v.weight]))
    peer.attn.to_out.load_state_dict(mixer.read.state_dict())
    return peer


@pytest.mark.parametrize(("n", "causal"), [(LONGEST, False), (LONGEST, True), (4, True)])
def test_equals_the_package(n: int, causal: bool) -> None:
    mixer = built(causal=causal)
    peer = theirs(mixer, causal=causal)
    x, weights = torch.randn(2, 2, n, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = mixer(mine), peer(other)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    close(mixer.gate.weight.grad, peer.sgu.weight.grad[0])
    grads = [linear.weight.grad for linear in (mixer.q, mixer.k, mixer.v)]
    close(torch.cat([each for each in grads if each is not None]), peer.attn.to_qkv.weight.grad)
    close(mixer.read.weight.grad, peer.attn.to_out.weight.grad)


@pytest.mark.parametrize("causal", [False, True])
def test_where_its_attention_reads_nothing_it_is_gmlp(causal: bool) -> None:
    mixer, x = built(causal=causal), torch.randn(2, 7, DIM, dtype=torch.float64)
    for weight in mixer.read.parameters():
        weight.data.zero_()
    other = build_mixer(f"gmlp(width={WIDTH})", "none", mixer.site).double().eval()
    other.load_state_dict({name: part for name, part in mixer.state_dict().items() if name in other.state_dict()})
    close(mixer(x), other(x))


def test_its_block_adds_no_feed_forward() -> None:
    model = Transformer(
        ModelConfig(vocab=7, dim=8, depth=1, heads=2, attention="amlp", position="none", head="mlm", max_length=9)
    )
    assert model.blocks[0].feed_forward is None


def test_what_it_refuses() -> None:
    with pytest.raises(SpecError, match="tiny=0: expected"):
        build_mixer("amlp(tiny=0)", "none", Site(DIM, 2))
    with pytest.raises(SpecError, match="amlp was built for at most 9 tokens, got 10; build with max_length=10"):
        built()(torch.randn(1, 10, DIM, dtype=torch.float64))
    with pytest.raises(IncompatibleError, match=r"amlp cannot use alibi.*use an encoding added at the embedding"):
        build_mixer("amlp", "alibi", Site(DIM, 2))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
