"""XLNet against its own layer, in both directions, with memory and with a clamp."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import anyformer as af

N = 13


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * max(1.0, float(theirs.detach().abs().max())))


@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("clamp", [None, 4])
def test_a_layer_and_its_gradients(memory: int, clamp: int | None) -> None:
    config = XLNetConfig(
        vocab_size=4, d_model=32, n_head=4, n_layer=1, d_inner=4, dropout=0.0, clamp_len=-1 if clamp is None else clamp
    )
    theirs = XLNetRelativeAttention(config).eval()
    for parameter in theirs.parameters():  # built alone, it leaves them as they are
        nn.init.normal_(parameter, std=0.3)
    ours = af.MultiHead(32, 4, position="xlnet" if clamp is None else f"xlnet(clamp={clamp})", bias=False)
    for name in "qkv":
        getattr(ours, name).load_state_dict({"weight": getattr(theirs, name).flatten(1).T})
    ours.o.load_state_dict({"weight": theirs.o.flatten(1)})
    weight = theirs.r.flatten(1).T
    ours.position.load_state_dict({"u": theirs.r_w_bias, "v": theirs.r_r_bias, "w.weight": weight})

    x, probe, past = torch.randn(2, N, 32), torch.randn(2, N, 32), torch.randn(2, memory, 32)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    waves = XLNetModel(config).relative_positional_encoding(N, memory + N, bsz=2)
    attended = ours(
        inputs[0], source=torch.cat([past, inputs[0]], dim=1), positions=torch.arange(memory, memory + N)[None]
    )
    outputs = (
        F.layer_norm(
            inputs[0] + attended, (32,), theirs.layer_norm.weight, theirs.layer_norm.bias, config.layer_norm_eps
        ),
        theirs(inputs[1].transpose(0, 1), None, None, None, waves, None, mems=past.transpose(0, 1))[0].transpose(0, 1),
    )
    agree(*outputs)
    for output in outputs:
        (output * probe).sum().backward()
    agree(inputs[0].grad, inputs[1].grad)
    agree(ours.position.u.grad, theirs.r_w_bias.grad)
    agree(ours.position.v.grad, theirs.r_r_bias.grad)
    agree(ours.position.w.weight.grad, theirs.r.grad.flatten(1).T)


@torch.no_grad()
@pytest.mark.parametrize("clamp", [None, 2])
def test_by_offset_and_as_columns(clamp: int | None) -> None:
    position = af.build_position("xlnet" if clamp is None else f"xlnet(clamp={clamp})", af.Site(12, 3)).double()
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    q, k = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)
    places, index = torch.arange(5)[None], torch.arange(5) - torch.arange(5)[:, None] + 4
    score = position.score(q, k, places, places)
    tables = position.tables(-4, 4)
    shifted = q + tables.shift[:, None]
    looked_up = torch.einsum("bhnd,bhnmd->bhnm", shifted, k[:, :, None] + tables.keys[:, index]) / 2 - q @ k.mT / 2
    torch.testing.assert_close(score, looked_up + tables.bias[:, index], rtol=0, atol=1e-11)
    if clamp is None:
        wide_q, wide_k = position.augment(q, k, places, places)
        torch.testing.assert_close(wide_q @ wide_k.mT / 2, q @ k.mT / 2 + score, rtol=0, atol=1e-11)
    else:
        content = torch.einsum("bhmd,hd->bhm", k, position.u)[:, :, None] / 2
        near = score[:, :, :1] - content
        far = position.score(q[:, :, :1], k, places[:, :1], places + 10**6) - content
        torch.testing.assert_close(near[..., 2:3].expand_as(far), far, rtol=0, atol=1e-11)
        assert float((near[..., 1] - near[..., 2]).abs().max()) > 1e-3


def test_only_without_a_clamp_it_becomes_columns() -> None:
    assert af.check("linformer(rank=4)", "xlnet").kind == "abs"
    with pytest.raises(af.IncompatibleError, match=r"linformer cannot use xlnet \(table or score or clipped\)"):
        af.check("linformer(rank=4)", "xlnet(clamp=8)")
