"""Window attention against masked softmax over all pairs in float64, with drawn sizes and every optional term."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from drawn_windows import LONG, NARROW, assert_same, calls, gradients, leaves, random, reference
from hypothesis import given, settings

from anyformer.ops import window_cut
from anyformer.ops.composite import window_attention_composite
from anyformer.ops.window import window_attention, window_forward
from anyformer.ops.window_cut import Extras
from anyformer.ops.window_tiles import WindowTiles


@settings(max_examples=60, deadline=None)
@given(calls())
def test_equals_the_definition(call):
    tensors, arguments = call
    named = leaves(tensors, arguments)
    expected, result = reference(*tensors, **arguments), window_attention(*tensors, **arguments)
    probe = [torch.randn_like(x) for x in expected]
    assert_same(result, expected, ["out", "lse"], 1e-10)
    assert_same(window_attention_composite(*tensors, **arguments), expected, ["out", "lse"], 1e-10)
    wanted = gradients(expected, list(named.values()), probe)
    assert_same(gradients(result, list(named.values()), probe), wanted, named, 1e-10)


@settings(max_examples=30, deadline=None)
@given(calls(sizes=LONG, reaches=NARROW))
def test_chunks_that_read_keys_where_they_are_equal_the_definition(call):
    tensors, arguments = call
    named = leaves(tensors, arguments)
    expected = reference(*tensors, **arguments)
    probe = [torch.randn_like(x) for x in expected]
    with patch.object(window_cut, "tiles_at_once", lambda scores, threads: 1):
        result = window_attention(*tensors, **arguments)
        found = gradients(result, list(named.values()), probe)
    assert_same(result, expected, ["out", "lse"], 1e-10)
    assert_same(found, gradients(expected, list(named.values()), probe), named, 1e-10)


@pytest.mark.parametrize("global_keys", [None, torch.tensor([[3]])])
def test_only_the_ends_of_keys_and_gradients_are_copied(global_keys):
    k = torch.randn(400, 4)
    none = Extras(*[None] * 6, global_keys, None, None)
    with patch.object(window_cut, "tiles_at_once", lambda scores, threads: 1):
        layout = WindowTiles(k[None, None], k[None, None], 7, 2, False, none, 1)
    keys, gradient = layout.load(0, k, "keys"), layout.gradient_room(k, "d_keys")
    assert keys.parts[1] is k
    assert gradient.parts[1] is k
    assert sum(each.shape[0] for each in (keys.parts[0], keys.parts[2])) < 200
    apart = torch.randn(400, 8)[:, ::2]
    assert layout.load(0, apart, "keys").parts[1] is not apart


@settings(max_examples=15, deadline=None)
@given(calls())
def test_equals_the_definition_in_float32(call):
    tensors, arguments = call
    single = [x.detach().float().requires_grad_() for x in tensors]
    single_arguments = {
        name: x.detach().float().requires_grad_() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x
        for name, x in arguments.items()
    }
    named, named_single = leaves(tensors, arguments), leaves(single, single_arguments)
    expected, result = reference(*tensors, **arguments), window_attention(*single, **single_arguments)
    assert_same(result, expected, ["out", "lse"], 1e-5)
    probe = [torch.randn_like(x) for x in expected]
    wanted = gradients(expected, list(named.values()), probe)
    found = gradients(result, list(named_single.values()), [x.float() for x in probe])
    assert_same(found, wanted, named, 1e-4)


def test_equals_scaled_dot_product_attention():
    q, k, v = (torch.randn(2, 3, 70, 8) for _ in range(3))
    out, _ = window_attention(q, k, v, left=69, right=0, scale=8**-0.5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=0, atol=2e-6)


def test_bfloat16_keeps_scores_in_float32():
    q, k, v = (torch.randn(1, 2, 50, 16).bfloat16().requires_grad_() for _ in range(3))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = window_attention(q, k, v, left=9, right=4, scale=1.0)
    expected = reference(*wide, left=9, right=4, scale=1.0)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert_same([lse], [expected[1]], ["lse"], 1e-6)
    assert_same([out], [expected[0]], ["out"], 2**-8)
    probe = torch.randn(out.shape, dtype=torch.float64).bfloat16()
    found = torch.autograd.grad(out, (q, k, v), probe)
    assert_same(found, torch.autograd.grad(expected[0], wide, probe.double()), "qkv", 2**-6)


@pytest.mark.parametrize("n, m", [(0, 0), (0, 5), (4, 0)])
def test_nothing_to_look_at(n, m):
    q, k, v = random(2, 2, n, 4), random(2, 1, m, 4), random(2, 1, m, 3)
    bias = random(2, 6)
    out, lse = window_attention(q, k, v, left=3, right=2, bias=bias, scale=1.0)
    assert out.shape == (2, 2, n, 3)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v, bias)))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e4])
def test_padding_moves_nothing(garbage):
    keep = torch.ones(2, 75, dtype=torch.bool)
    keep[0, :20] = keep[0, 60:] = keep[1, 33:40] = False
    clean = [torch.randn(2, 2, 75, 4) for _ in range(3)]
    dirty = [x.masked_fill(~keep[:, None, :, None], garbage) for x in clean]
    results = []
    for tensors in (clean, dirty):
        tensors = [x.requires_grad_() for x in tensors]
        out, lse = window_attention(*tensors, left=5, right=3, scale=0.5, keep=keep, asking=keep)
        assert (out[~keep[:, None].expand(2, 2, 75)] == 0).all()
        d_out = torch.ones_like(out).masked_fill(~keep[:, None, :, None], garbage)
        grads = torch.autograd.grad(out, tensors, d_out)
        assert all((x[~keep[:, None].expand(2, 2, 75)] == 0).all() for x in grads)
        results.append([out, lse, *grads])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_rows_without_keys_are_exactly_zero():
    q, k, v = (torch.randn(1, 1, 40, 4, requires_grad=True) for _ in range(3))
    keep = torch.arange(40)[None] >= 20
    out, lse = window_attention(q, k, v, left=3, right=3, scale=1.0, keep=keep)
    assert (out[:, :, :17] == 0).all()
    assert (lse[:, :, :17] == -math.inf).all()
    assert lse[:, :, 17:].isfinite().all()
    d_q, d_k = torch.autograd.grad(out.sum(), (q, k))
    assert (d_q[:, :, :17] == 0).all()
    assert (d_k[:, :, :20] == 0).all()
    assert d_q.isfinite().all()
    shut = window_attention(q, k, v, left=1, right=1, bias=torch.full((1, 3), -math.inf), scale=1.0)
    assert (shut[0] == 0).all()
    assert (shut[1] == -math.inf).all()


def test_strides_of_the_inputs_do_not_matter():
    q, k, v = (torch.randn(2, 50, 3, 4) for _ in range(3))
    swapped = window_attention(*(x.transpose(1, 2) for x in (q, k, v)), left=7, right=7, scale=1.0)
    plain = window_attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), left=7, right=7, scale=1.0)
    assert torch.equal(swapped[0], plain[0])


def test_the_log_sum_exp_only_when_wanted():
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    out, lse = window_attention(q, k, v, left=2, right=2, scale=1.0, want_lse=False)
    assert lse.shape == (1, 2, 0)
    assert torch.equal(out, window_attention(q, k, v, left=2, right=2, scale=1.0)[0])


def drawn_multiplier(q, k, arguments):
    """The dropout multiplier of each pair, read off the output for values that name the keys."""
    m = k.shape[2]
    torch.manual_seed(5)
    names = torch.eye(m, dtype=q.dtype).expand(*k.shape[:2], m, m)
    dropped, _ = window_attention(q, k, names, **arguments, dropout=0.25)
    return dropped, dropped / window_attention(q, k, names, **arguments)[0].clamp(min=1e-300)


def test_dropout_is_a_mask_with_the_right_mean_and_gradient():
    q, k, v = random(1, 2, 300, 4), random(1, 1, 300, 4), random(1, 1, 300, 5)
    arguments = {"left": 20, "right": 20, "scale": 0.3}
    dropped, kept = drawn_multiplier(q, k, arguments)
    values = kept[dropped > 0].detach()
    near = (torch.arange(300) - torch.arange(300)[:, None]).abs() <= 20
    assert ((values - 4 / 3).abs() < 1e-9).all()
    assert abs(values.numel() / (2 * near.sum().item()) - 0.75) < 0.02
    torch.manual_seed(5)
    out, _ = window_attention(q, k, v, **arguments, dropout=0.25)
    expected, _ = reference(q, k, v, **arguments, kept=kept.detach())
    probe = torch.randn_like(out)
    assert_same([out], [expected], ["out"], 1e-10)
    found, wanted = (torch.autograd.grad(x, (q, k, v), probe) for x in (out, expected))
    assert_same(found, wanted, "qkv", 1e-10)


def test_dropout_draws_from_the_global_generator():
    q, k, v = (torch.randn(1, 1, 40, 4) for _ in range(3))
    one, two = (window_attention(q, k, v, left=9, right=9, scale=1.0, dropout=0.5)[0] for _ in range(2))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    window_attention(q, k, v, left=9, right=9, scale=1.0)
    assert not torch.equal(one, two)
    assert torch.equal(before, torch.get_rng_state())


def test_a_bucketed_table_is_a_gathered_bias():
    """T5: one value for each head and bucket; the sum over the offsets of a bucket is left to autograd."""
    q, k, v, table = random(1, 2, 60, 4), random(1, 2, 60, 4), random(1, 2, 60, 4), random(2, 5)
    buckets = torch.arange(-20, 21).abs().add(1).log2().long()
    expected, result = (
        attend(q, k, v, left=20, right=20, bias=table[:, buckets], scale=1.0)
        for attend in (reference, window_attention)
    )
    probe = [torch.randn_like(x) for x in expected]
    found, wanted = (gradients(x, [table], probe) for x in (result, expected))
    assert_same(found, wanted, ["table"], 1e-10)


def test_gradcheck():
    q, k, v = random(1, 2, 9, 3), random(1, 1, 9, 3), random(1, 1, 9, 2)
    bias, query_table, value_table, key_table = random(2, 6), random(2, 6, 3), random(2, 6, 2), random(2, 6, 3)

    def attend(q, k, v, bias, query_table, value_table, key_table):
        tables = {"bias": bias, "query_table": query_table, "value_table": value_table, "key_table": key_table}
        return window_attention(q, k, v, left=3, right=2, **tables, scale=0.7, softcap=2.0)

    assert torch.autograd.gradcheck(attend, (q, k, v, bias, query_table, value_table, key_table))


def test_the_composite_differentiates_twice():
    q, k, v, bias = random(1, 1, 5, 2), random(1, 1, 5, 2), random(1, 1, 5, 2), random(1, 4)

    def attend(q, k, v, bias):
        return window_attention_composite(q, k, v, left=2, right=1, bias=bias, scale=0.7)

    assert torch.autograd.gradgradcheck(attend, (q, k, v, bias))


@pytest.mark.parametrize("full", [False, True])
def test_opcheck(full):
    q, k, v = random(2, 4, 37, 4), random(2, 2, 40, 4), random(2, 2, 40, 3)
    extras = [None] * 12
    if full:
        keep, asking = torch.rand(2, 40) < 0.8, torch.rand(2, 37) < 0.8
        extras = [keep, asking, torch.zeros(2, 40, dtype=torch.long), random(4, 12),
                  random(4, 12, 4), random(4, 12, 3), random(4, 12, 4),
                  torch.tensor([[0, 3], [1, -1]]), random(1, 4, 37, 2),
                  torch.tensor([[-1, 3], [36, 0]]), random(2, 1, 2, 40), torch.tensor(5)]  # fmt: skip
    plain = (5, 6, False, None, 0.3, 2.0, 0.2, True) if full else (5, 6, True, [1, 2, 9, 0], 0.3, 0.0, 0.0, False)
    torch.library.opcheck(window_forward, (q, k, v, *extras, *plain))


def test_a_second_derivative_is_refused():
    q, k, v = random(1, 1, 5, 2), random(1, 1, 5, 2), random(1, 1, 5, 2)
    out, _ = window_attention(q, k, v, left=2, right=1, scale=0.7)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiate twice, use window_attention_composite"):
        grad.sum().backward()
