"""Attention on lists of blocks against masked softmax over all pairs in float64, with drawn sizes and lists."""

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from anyformer.ops.blocks import block_attention, block_forward
from anyformer.ops.composite import block_attention_composite
from anyformer.ops.window import window_attention

SIZES = st.sampled_from([1, 2, 5, 31, 64, 65, 97])
OPTIONS = ["masks", "keep", "asking", "documents", "bias", "softcap"]


def pairs(n, m, heads, batch, block, offsets, keys, partial=None, masks=None):
    """[b h n m]: the pairs that lists let meet, entry by entry."""
    lists, row_blocks = offsets.shape[0], offsets.shape[1] - 1
    allowed = torch.zeros(batch, heads, row_blocks * block, -(-m // block) * block, dtype=torch.bool)
    for sample in range(batch):
        for head in range(heads):
            index = {1: 0, heads: head}.get(lists, sample * heads + head)
            for t in range(row_blocks):
                for entry in range(int(offsets[index, t]), int(offsets[index, t + 1])):
                    rows, columns = slice(t * block, (t + 1) * block), int(keys[entry]) * block
                    mask = True
                    if masks is not None and partial is not None and partial[entry] >= 0:
                        mask = masks[partial[entry]]
                    allowed[sample, head, rows, columns : columns + block] = mask
    return allowed[:, :, :n, :m]


def reference(q, k, v, *, block, offsets, keys, scale, partial=None, masks=None, keep=None, asking=None, documents=None,
              bias=None, softcap=None):  # fmt: skip
    """The definition, over all pairs."""
    (batch, heads, n, _), m = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    allowed = pairs(n, m, heads, batch, block, offsets, keys, partial, masks)
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[:, torch.arange(m) - (torch.arange(n) + m - n)[:, None] + m - 1]
    if keep is not None:
        allowed = allowed & keep[:, None, None]
    if documents is not None:
        rows = F.pad(documents, (max(n - m, 0), 0), value=-1)[:, -n:]
        allowed = allowed & (rows[:, None, :, None] == documents[:, None, None])
    if asking is not None:
        allowed = allowed & asking[:, None, :, None]
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -math.inf).masked_fill(empty, 0.0)
    out = torch.softmax(scores, -1).masked_fill(empty, 0.0) @ v
    return out, torch.logsumexp(scores, -1).masked_fill(empty[..., 0], -math.inf)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def draw_lists(count, row_blocks, key_blocks):
    """Lists of 0 to 5 blocks; about one in ten has all."""
    offsets, keys = [], []
    for _ in range(count):
        row = [len(keys)]
        for _ in range(row_blocks):
            length = key_blocks if torch.rand(()) < 0.1 else int(torch.randint(0, min(key_blocks, 5) + 1, ()))
            keys += torch.randperm(key_blocks)[:length].tolist()
            row.append(len(keys))
        offsets.append(row)
    return torch.tensor(offsets), torch.tensor(keys, dtype=torch.int32)


@st.composite
def calls(draw):
    """Tensors and arguments of one call."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n, heads_of_keys, block = draw(SIZES), draw(st.sampled_from([1, 2])), draw(st.sampled_from([4, 7, 16, 64]))
    m = max(1, draw(st.sampled_from([n, n, n + 3, 2 * n + 1, n - 4])))
    b, h = draw(st.sampled_from([1, 2])), heads_of_keys * draw(st.sampled_from([1, 2]))
    offsets, keys = draw_lists(draw(st.sampled_from([1, h, b * h])), -(-n // block), -(-m // block))
    arguments = {"block": block, "offsets": offsets, "keys": keys, "scale": 0.4}
    drawn = {
        "masks": torch.rand(4, block, block) < 0.4,
        "keep": torch.rand(b, m) < 0.7,
        "asking": torch.rand(b, n) < 0.7,
        "documents": (torch.rand(b, m) < 0.1).cumsum(1),
        "bias": random(h, n + m - 1),
        "softcap": 1.5,
    }
    chosen = draw(st.sets(st.sampled_from(OPTIONS), max_size=4))
    arguments |= {name: drawn[name] for name in OPTIONS if name in chosen}
    if "masks" in chosen:
        arguments["partial"] = torch.randint(-1, 4, keys.shape, dtype=torch.int32)
    return (random(b, h, n, 4), random(b, heads_of_keys, m, 4), random(b, heads_of_keys, m, 3)), arguments


def gradients(result, tensors, probe):
    """Of a random linear function of the output and the finite log-sum-exps."""
    (out, lse), (out_probe, lse_probe) = result, probe
    total = (out * out_probe).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * lse_probe).sum()
    return torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)


def assert_same(one, other, tolerance):
    """Largest difference over the largest expected entry (at least 1)."""
    for x, y in zip(one, other, strict=True):
        x, y = x.double().nan_to_num(neginf=-9.0), y.nan_to_num(neginf=-9.0)
        assert x.shape == y.shape
        assert (x - y).abs().max().item() <= tolerance * max(1.0, y.abs().max().item())


@settings(max_examples=50, deadline=None)
@given(calls())
def test_equals_the_definition(call):
    tensors, arguments = call
    learned = [*tensors, *([arguments["bias"]] if "bias" in arguments else [])]
    expected, result = reference(*tensors, **arguments), block_attention(*tensors, **arguments)
    probe = [torch.randn_like(x) for x in expected]
    assert_same(result, expected, 1e-10)
    assert_same(block_attention_composite(*tensors, **arguments), expected, 1e-10)
    assert_same(gradients(result, learned, probe), gradients(expected, learned, probe), 1e-10)


@settings(max_examples=15, deadline=None)
@given(calls())
def test_equals_the_definition_in_float32(call):
    tensors, arguments = call
    single = [x.detach().float().requires_grad_() for x in tensors]
    single_arguments = arguments | ({"bias": arguments["bias"].detach().float()} if "bias" in arguments else {})
    expected, result = reference(*tensors, **arguments), block_attention(*single, **single_arguments)
    probe = [torch.randn_like(x) for x in expected]
    assert_same(result, expected, 1e-5)
    found = gradients(result, single, [x.float() for x in probe])
    assert_same(found, gradients(expected, tensors, probe), 1e-4)


def test_lists_that_differ_in_one_thing_are_not_mistaken_for_those_of_an_earlier_call():
    torch.manual_seed(0)
    offsets, keys, masks = torch.tensor([[0, 1, 3]]), torch.tensor([0, 1, 0]), torch.rand(2, 4, 4) < 0.5
    first = {
        "block": 4,
        "offsets": offsets,
        "keys": keys,
        "partial": torch.tensor([0, -1, 1]),
        "masks": masks,
        "scale": 1.0,
    }
    changes = (
        {},
        {"keys": torch.tensor([1, 1, 0])},
        {"offsets": torch.tensor([[0, 2, 3]])},
        {"partial": torch.tensor([0, 0, 1])},
        {"partial": None, "masks": None},
        {},
    )
    for m in (8, 7, 8):
        tensors = random(1, 1, 8, 4), random(1, 1, m, 4), random(1, 1, m, 3)
        for change in changes:
            arguments = first | change
            assert_same(block_attention(*tensors, **arguments), reference(*tensors, **arguments), 1e-10)


def test_a_band_of_blocks_is_a_window():
    """The same pairs through both layouts."""
    n, block, reach = 160, 16, 16
    q, k, v, bias = random(1, 2, n, 4), random(1, 2, n, 4), random(1, 2, n, 4), random(2, 2 * n - 1)
    near = (torch.arange(n) - torch.arange(n)[:, None]).abs() <= reach
    tiles = near.view(n // block, block, n // block, block).transpose(1, 2)
    row, keys = tiles.any(-1).any(-1).nonzero().T
    offsets = torch.searchsorted(row, torch.arange(n // block + 1))[None]
    lists = {
        "block": block,
        "offsets": offsets,
        "keys": keys,
        "partial": torch.arange(len(keys)),
        "masks": tiles[row, keys],
    }
    one = block_attention(q, k, v, **lists, bias=bias, scale=0.5)
    other = window_attention(q, k, v, left=reach, right=reach, bias=bias[:, n - 1 - reach : n + reach], scale=0.5)
    assert_same(one, other, 1e-12)
    probe = [torch.randn_like(x) for x in other]
    assert_same(gradients(one, [q, k, v, bias], probe), gradients(other, [q, k, v, bias], probe), 1e-12)


@pytest.mark.parametrize("n, m", [(0, 0), (0, 5), (4, 0), (4, 5)])
def test_nothing_to_look_at(n, m):
    q, k, v = random(2, 2, n, 4), random(2, 1, m, 4), random(2, 1, m, 3)
    offsets, keys = torch.zeros(1, -(-n // 4) + 1, dtype=torch.long), torch.zeros(0, dtype=torch.int32)
    out, lse = block_attention(q, k, v, block=4, offsets=offsets, keys=keys, scale=1.0)
    assert out.shape == (2, 2, n, 3)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("garbage", [math.nan, 1e4])
def test_padding_moves_nothing(garbage):
    keep = torch.ones(2, 75, dtype=torch.bool)
    keep[0, :20] = keep[0, 60:] = keep[1, 33:40] = False
    offsets, keys = draw_lists(1, 5, 5)
    clean = [torch.randn(2, 2, 75, 4) for _ in range(3)]
    results = []
    for tensors in (clean, [x.masked_fill(~keep[:, None, :, None], garbage) for x in clean]):
        tensors = [x.requires_grad_() for x in tensors]
        lists = {"block": 16, "offsets": offsets, "keys": keys}
        out, lse = block_attention(*tensors, **lists, scale=0.5, keep=keep, asking=keep)
        grads = torch.autograd.grad(out.sum(), tensors)
        assert all((x[~keep[:, None].expand(2, 2, 75)] == 0).all() for x in (out, *grads))
        results.append([out, lse, *grads])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_dropout_gradient():
    """The gradient of the output it drew: finite differences under one seed."""
    q, k, v, bias = random(1, 2, 6, 2), random(1, 1, 6, 2), random(1, 1, 6, 2), random(2, 11)
    offsets, keys = torch.tensor([[0, 2, 3], [3, 4, 6]]), torch.tensor([0, 1, 1, 0, 0, 1])

    def attend(q, k, v, bias):
        torch.manual_seed(3)
        return block_attention(q, k, v, block=4, offsets=offsets, keys=keys, bias=bias, scale=0.7, dropout=0.3)[0]

    assert torch.autograd.gradcheck(attend, (q, k, v, bias))


def test_the_composite_differentiates_twice():
    q, k, v, bias = random(1, 2, 6, 2), random(1, 1, 6, 2), random(1, 1, 6, 2), random(2, 11)
    offsets, keys = draw_lists(2, 2, 2)

    def attend(q, k, v, bias):
        return block_attention_composite(q, k, v, block=4, offsets=offsets, keys=keys, bias=bias, scale=0.7)

    assert torch.autograd.gradgradcheck(attend, (q, k, v, bias))


@pytest.mark.parametrize("full", [False, True])
def test_opcheck(full):
    q, k, v = random(2, 4, 37, 4), random(2, 2, 40, 4), random(2, 2, 40, 3)
    offsets, keys = draw_lists(4, 10, 10)
    extras = [None] * 7
    if full:
        keep, asking = torch.rand(2, 40) < 0.8, torch.rand(2, 37) < 0.8
        partial, masks = torch.randint(-1, 2, keys.shape), torch.rand(2, 4, 4) < 0.5
        extras = [partial, masks, keep, asking, torch.zeros(2, 40, dtype=torch.long), random(4, 76), torch.tensor(5)]
    plain = (4, 0.3, 2.0, 0.2, True) if full else (4, 0.3, 0.0, 0.0, False)
    torch.library.opcheck(block_forward, (q, k, v, offsets, keys, *extras, *plain))
