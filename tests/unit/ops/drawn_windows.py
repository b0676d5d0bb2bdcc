"""Window attention as it is defined, over all pairs, and calls of it with drawn sizes and optional terms."""

import math

import hypothesis.strategies as st
import torch
import torch.nn.functional as F

SIZES, REACHES = (1, 2, 5, 31, 32, 33, 64, 97, 131), ((0, 1, 9, 40, 200), (0, 2, 7, 300))
LONG, NARROW = (256, 300, 321), ((0, 1, 9), (0, 2, 7))
TABLES = ["bias", "query_table", "value_table", "key_table"]
OPTIONS = ["keep", "asking", "documents", *TABLES, "global_keys", "global_bias", "full_rows", "full_bias", "softcap"]


def reference(q, k, v, *, left, right, scale, causal=False, keep=None, asking=None, documents=None, bias=None,
              query_table=None, value_table=None, key_table=None, global_keys=None, global_bias=None, full_rows=None,
              full_bias=None, softcap=None,
              kept: torch.Tensor | float = 1.0):  # fmt: skip
    """The definition, over all pairs."""
    (batch, heads, n, _), m, right = q.shape, k.shape[2], 0 if causal else right
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    offset = torch.arange(m) - (torch.arange(n) + m - n)[:, None]
    near = (offset >= -left) & (offset <= right)
    by_offset = (offset + left).clamp(0, left + right)
    allowed = near.expand(batch, 1, n, m)
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k)
    products = scores * scale
    if query_table is not None:
        scores = scores + torch.einsum("bhnd,hnmd->bhnm", q, query_table[:, by_offset] * near[..., None])
    if key_table is not None:
        scores = scores + torch.einsum("bhmd,hnmd->bhnm", k, key_table[:, by_offset] * near[..., None])
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + torch.where(near, bias[:, by_offset], 0.0)
    if global_keys is not None:
        column = F.one_hot(global_keys + 1, m + 1)[..., 1:].to(q.dtype)  # [b g m]
        far = (column.sum(1) > 0)[:, None, None] & ~near
        allowed = allowed | (far & (offset <= 0) if causal else far)
        if global_bias is not None:
            scores = scores + torch.where(
                far, torch.einsum("bhng,bgm->bhnm", global_bias.expand(batch, -1, -1, -1), column), 0
            )
    if full_rows is not None:
        row = F.one_hot(full_rows + 1, n + 1)[..., 1:].to(q.dtype)  # [b f n]
        full = (row.sum(1) > 0)[:, None, :, None]
        products = products if softcap is None else softcap * torch.tanh(products / softcap)
        if full_bias is not None:
            products = products + torch.einsum("bhfm,bfn->bhnm", full_bias.expand(batch, heads, -1, -1), row)
        scores, allowed = torch.where(full, products, scores), allowed | full
        near = near & ~full
    if keep is not None:
        allowed = allowed & keep[:, None, None]
    if documents is not None:
        rows = F.pad(documents, (max(n - m, 0), 0), value=-9)[:, -n:]
        allowed = allowed & (rows[:, None, :, None] == documents[:, None, None])
    if asking is not None:
        allowed = allowed & asking[:, None, :, None]
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -math.inf).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0) * kept
    out = torch.einsum("bhnm,bhmv->bhnv", weights, v)
    if value_table is not None:
        out = out + torch.einsum("bhnm,hnmv->bhnv", weights * near, value_table[:, by_offset])
    return out, torch.logsumexp(scores, -1).masked_fill(empty[..., 0], -math.inf)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@st.composite
def calls(draw, sizes=SIZES, reaches=REACHES):
    """Tensors and arguments of one call."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n, heads_of_keys = draw(st.sampled_from(sizes)), draw(st.sampled_from([1, 2]))
    m = max(1, draw(st.sampled_from([n, n, n + 3, 2 * n + 1, n - 4])))
    b, h, g = draw(st.sampled_from([1, 2])), heads_of_keys * draw(st.sampled_from([1, 2])), min(3, m)
    f = min(2, n)
    left, right = (draw(st.sampled_from(each)) for each in reaches)
    arguments = {"left": left, "right": right, "causal": draw(st.booleans()), "scale": 0.4}
    drawn = {
        "keep": torch.rand(b, m) < 0.7,
        "asking": torch.rand(b, n) < 0.7,
        "documents": (torch.rand(b, m) < 0.1).cumsum(1) + draw(st.sampled_from([-1, 2**40])),
        "bias": random(h, left + right + 1),
        "query_table": random(h, left + right + 1, 4),
        "value_table": random(h, left + right + 1, 3),
        "key_table": random(h, left + right + 1, 4),
        "global_keys": torch.stack([torch.randperm(m)[:g].where(torch.rand(g) < 0.8, -1) for _ in range(b)]),
        "global_bias": random(draw(st.sampled_from([1, b])), h, n, g),
        "full_rows": torch.stack([torch.randperm(n)[:f].where(torch.rand(f) < 0.8, -1) for _ in range(b)]),
        "full_bias": random(draw(st.sampled_from([1, b])), draw(st.sampled_from([1, h])), f, m),
        "softcap": 1.5,
    }
    chosen = draw(st.sets(st.sampled_from(OPTIONS), max_size=5))
    chosen = chosen | {"global_keys"} if "global_bias" in chosen else chosen
    chosen = chosen | {"full_rows"} if "full_bias" in chosen else chosen
    return (random(b, h, n, 4), random(b, heads_of_keys, m, 4), random(b, heads_of_keys, m, 3)), {
        **arguments,
        **{name: drawn[name] for name in OPTIONS if name in chosen},
    }


def leaves(tensors, arguments):
    named = dict(zip("qkv", tensors, strict=True)) | arguments
    return {name: x for name, x in named.items() if isinstance(x, torch.Tensor) and x.requires_grad}


def gradients(result, tensors, probe):
    """Of a random linear function of the output and the finite log-sum-exps."""
    (out, lse), (out_probe, lse_probe) = result, probe
    total = (out * out_probe).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * lse_probe).sum()
    return torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)


def assert_same(one, other, expected, tolerance):
    """Largest difference over the largest expected entry (at least 1)."""
    for name, x, y in zip(expected, one, other, strict=True):
        x, y = x.double().nan_to_num(neginf=-9.0), y.nan_to_num(neginf=-9.0)
        size = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        assert x.shape == y.shape, name
        assert (x - y).abs().max().item() <= tolerance * size, name
