"""FoX against flash-linear-attention's reference and x-transformers' bias; in kernel attention and AFT against its sum."""

import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError
from anyformer.ops.feature_maps import elu1
from anyformer.ops.gates import gate_sums, last_seen
from anyformer.side import side

with warnings.catch_warnings():  # it uses torch.jit.script, which torch deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from x_transformers.x_transformers import DataDependentAlibi


def layer(attention: str = "softmax", *, dtype: torch.dtype = torch.float32) -> af.MultiHead:
    built = af.MultiHead(12, 4, kv_heads=2, attention=attention, position="fox(start=1.0)", causal=True).to(dtype)
    torch.nn.init.normal_(built.position.gate.weight)
    return built


def projected(built: af.MultiHead, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[b n h d]`."""
    return tuple(each(x).unflatten(-1, (-1, 3)) for each in (built.q, built.k, built.v))


@pytest.mark.parametrize(("attention", "window"), [("softmax", None), ("local(2)", 3)])
def test_flash_linear_attention(naive: Callable[[str], ModuleType], attention: str, window: int | None) -> None:
    built, x, probe = layer(attention), torch.randn(2, 9, 12, requires_grad=True), torch.randn(2, 9, 12)
    gates = F.logsigmoid(built.position.gate(x))
    attend = naive("forgetting_attn").naive_forgetting_attn
    theirs = built.o(attend(*projected(built, x), gates, window_size=window).flatten(2))
    weights = built.position.gate.weight
    results = [(out, *torch.autograd.grad((out * probe).sum(), (x, weights))) for out in (built(x), theirs)]
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=2e-6, atol=2e-6 * max(1.0, float(other.detach().abs().max())))


def test_the_bias_of_x_transformers() -> None:
    theirs, x = DataDependentAlibi(12, 4), torch.randn(2, 9, 12)
    ours = af.build_position("fox", af.Site(12, 4, causal=True))
    ours.gate.load_state_dict(theirs.to_forget_gates[0].state_dict())
    found = gate_sums(ours.prepare(x, side(9, x.device), None).mT, None)
    torch.testing.assert_close(found.float().tril(), theirs(x).tril(), rtol=0, atol=2e-6)
    started = af.build_position("fox", af.Site(12, 4, causal=True)).gate.bias
    torch.testing.assert_close(started, torch.full((4,), 5.0), rtol=0, atol=0)


def by_hand(built: af.MultiHead) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Tokens, a probe of the output, and the tokens' queries, keys and values of all heads [b h n d] and factors [b h n]."""
    x, probe = torch.randn(2, 2, 7, 12, dtype=torch.float64)
    x.requires_grad_()
    q, k, v = (each.transpose(1, 2) for each in projected(built, x))
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return x, probe, (q, k, v, torch.sigmoid(built.position.gate(x)).transpose(1, 2))


def test_kernel_attention_fades_by_the_same_factors() -> None:
    built = layer("linear", dtype=torch.float64)
    x, probe, (q, k, v, factors) = by_hand(built)
    rows = []
    for i in range(7):
        weights = [
            (elu1(q[:, :, i]) * elu1(k[:, :, j])).sum(-1) * factors[:, :, j + 1 : i + 1].prod(-1) for j in range(i + 1)
        ]
        stacked = torch.stack(weights, dim=-1)
        rows.append((stacked / stacked.sum(-1, keepdim=True))[:, :, None] @ v[:, :, : i + 1])
    theirs = built.o(torch.cat(rows, dim=2).transpose(1, 2).flatten(2))
    results = [(out, *torch.autograd.grad((out * probe).sum(), x)) for out in (built(x), theirs)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def test_channels_without_products_fade_by_the_same_factors() -> None:
    built = layer("aft(variant=simple)", dtype=torch.float64)
    x, probe, (q, k, v, factors) = by_hand(built)
    rows = []
    for i in range(7):
        weights = [k[:, :, j].exp() * factors[:, :, j + 1 : i + 1].prod(-1, keepdim=True) for j in range(i + 1)]
        stacked = torch.stack(weights, dim=2)
        rows.append((stacked * v[:, :, : i + 1]).sum(2) / stacked.sum(2))
    theirs = built.o((torch.sigmoid(q) * torch.stack(rows, dim=2)).transpose(1, 2).flatten(2))
    weights = built.position.gate.weight
    results = [(out, *torch.autograd.grad((out * probe).sum(), (x, weights))) for out in (built(x), theirs)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["softmax", "aft(variant=simple)", "aft(rank=3)"])
def test_a_step_with_a_cache_after_padding_on_either_side(attention: str) -> None:
    built, x = layer(attention, dtype=torch.float64), torch.randn(1, 8, 12, dtype=torch.float64)
    whole = built(x)
    for left, right in ((2, 0), (0, 2), (1, 1)):
        keep = F.pad(torch.ones(1, 5, dtype=torch.bool), (left, right))
        cache = built.new_cache(1)
        out = [built(F.pad(x[:, :5], (0, 0, left, right), value=7.0), attention_mask=keep, cache=cache)[keep][None]]
        for t in range(5, 8):
            keep = F.pad(keep, (0, 1), value=True)
            out.append(built(x[:, t : t + 1], attention_mask=keep, cache=cache))
        torch.testing.assert_close(torch.cat(out, dim=1), whole, rtol=0, atol=1e-10)


def test_a_cache_can_go_back() -> None:
    built, x = layer(dtype=torch.float64), torch.randn(1, 8, 12, dtype=torch.float64)
    cache = built.new_cache(1)
    built(torch.cat([x[:, :5], x[:, :2]], dim=1), cache=cache)
    cache.crop(5)
    torch.testing.assert_close(built(x[:, 5:], cache=cache), built(x)[:, 5:], rtol=0, atol=1e-10)


def test_long_sums_keep_their_differences() -> None:
    gates = torch.full((1, 1, 100_000), -1.0)
    gates[..., -1] = -1e-4
    assert float(gate_sums(gates, torch.tensor([[99_999]]))[0, 0, 0, -2]) == pytest.approx(-1e-4, rel=1e-5)


def test_the_last_key_that_a_query_sees() -> None:
    assert last_seen(torch.tensor([[0, 2, 9]]), torch.tensor([[1, 1, 2]])).tolist() == [[-1, 2, 2]]
    assert gate_sums(torch.zeros(2, 3, 0), torch.tensor([[0, 0]])).shape == (2, 3, 2, 0)


def test_refusals() -> None:
    with pytest.raises(IncompatibleError, match="fox is defined for causal attention only"):
        af.MultiHead(12, 4, position="fox")
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(
        IncompatibleError, match=r"fox reads the tokens that keys are made of, .* use MultiHead or Transformer"
    ):
        af.attend(q, q, q, causal=True, position=af.build_position("fox", af.Site(8, 2, causal=True)))
