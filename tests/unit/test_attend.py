"""`attend` against a dense oracle of its own, over masks, patterns, documents, grouped heads and empty rows."""

import math

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.pattern.read import pattern_of


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Row by row, key by key, with nothing shared with the package."""
    b, h, n, d = q.shape
    groups = h // k.shape[1]
    out, lse = torch.zeros(b, h, n, v.shape[-1], dtype=q.dtype), torch.full((b, h, n), -math.inf, dtype=q.dtype)
    keep = torch.ones(b, h, n, k.shape[2], dtype=torch.bool) if keep is None else keep.expand(b, h, n, k.shape[2])
    for i in range(b):
        for head in range(h):
            for row in range(n):
                seen = keep[i, head, row].nonzero()[:, 0]
                if not len(seen):
                    continue
                logits = k[i, head // groups, seen] @ q[i, head, row] * (d**-0.5 if scale is None else scale)
                if softcap is not None:
                    logits = softcap * (logits / softcap).tanh()
                if bias is not None:
                    logits = logits + bias.expand(b, h, n, k.shape[2])[i, head, row, seen]
                lse[i, head, row] = logits.logsumexp(0)
                out[i, head, row] = (logits - lse[i, head, row]).exp() @ v[i, head // groups, seen]
    return out, lse


def _qkv(n: int = 7, m: int = 9, h: int = 4, hk: int = 2, d: int = 8, dv: int = 6, b: int = 2) -> list[Tensor]:
    shapes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv))
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def _lower(n: int, m: int) -> Tensor:
    return torch.arange(m) <= torch.arange(n)[:, None] + m - n


CASES = {
    "plain": ({}, lambda n, m: None),
    "causal": ({"causal": True}, _lower),
    "window": ({"pattern": af.Local(2, 1)}, lambda n, m: af.Local(2, 1).dense(n, m)),
    "window, causal": ({"pattern": af.Local(2), "causal": True}, lambda n, m: af.Local(2).dense(n, m) & _lower(n, m)),
    "union": (
        {"pattern": af.Local(1) | af.Global([0]) | af.Random(2, seed=3)},
        lambda n, m: (af.Local(1) | af.Global([0]) | af.Random(2, seed=3)).dense(n, m, heads=4),
    ),
}


@pytest.mark.parametrize("impl", ["auto", "reference", "torch"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("n", "m"), [(7, 7), (3, 9), (1, 4), (0, 3)])
def test_equals_the_oracle_forward_and_backward(name: str, impl: str, n: int, m: int) -> None:
    facts, keep = CASES[name]
    q, k, v = _qkv(n, m)
    out = af.attend(q, k, v, impl=impl, **facts)
    right, _ = oracle(q, k, v, keep(n, m))
    torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-10)
    if n:
        seed = torch.randn_like(out)
        for ours, theirs in zip(
            torch.autograd.grad(out, (q, k, v), seed), torch.autograd.grad(right, (q, k, v), seed), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_masks_documents_and_a_bias_together(impl: str) -> None:
    q, k, v = _qkv(9, 9)
    attention_mask = torch.ones(2, 9, dtype=torch.int64)
    attention_mask[1, 6:] = 0
    documents = torch.tensor([[0] * 4 + [1] * 5, [3] * 9])
    mask = torch.rand(1, 4, 9, 9) > 0.3
    bias = torch.randn(2, 1, 9, 9, dtype=torch.float64, requires_grad=True)
    keep = mask & (documents[:, None, :, None] == documents[:, None, None, :]) & attention_mask.bool()[:, None, None, :]
    out = af.attend(
        q, k, v, attention_mask=attention_mask, document_ids=documents, mask=mask, bias=bias, causal=True, impl=impl
    )
    right, _ = oracle(q, k, v, keep & _lower(9, 9), bias)
    torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-10)
    ours, theirs = (torch.autograd.grad(each.square().sum(), bias)[0] for each in (out, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("text", ["local(4)", "Local(2) | Global([0])", "bigbird(block=2)"])
def test_a_pattern_is_a_value_or_its_text(text: str) -> None:
    q, k, v = _qkv(40, 40)
    out = af.attend(q, k, v, pattern=text)
    assert torch.equal(out, af.attend(q, k, v, pattern=pattern_of(text)))
    assert not torch.allclose(out, af.attend(q, k, v))
    assert torch.equal(
        af.attend_with_lse(q, k, v, pattern=text)[1], af.attend_with_lse(q, k, v, pattern=pattern_of(text))[1]
    )


def test_scale_softcap_and_the_normaliser() -> None:
    q, k, v = _qkv(5, 5)
    out, lse = af.attend_with_lse(q, k, v, causal=True, scale=0.7, softcap=1.5)
    right, right_lse = oracle(q, k, v, _lower(5, 5), scale=0.7, softcap=1.5)
    torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, right_lse, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(af.attend(q, k, v, causal=True, scale=0.7, softcap=1.5), right, rtol=1e-10, atol=1e-10)


def test_unions_merge_by_the_normaliser() -> None:
    q, k, v = _qkv(6, 8)
    parts = [af.attend_with_lse(q, k[:, :, cut], v[:, :, cut]) for cut in (slice(0, 5), slice(5, 8))]
    weight = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)
    merged = sum(weight[i, ..., None] * parts[i][0] for i in range(2))
    torch.testing.assert_close(merged, af.attend(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_rows_that_may_look_nowhere(dtype: torch.dtype, impl: str) -> None:
    q, k, v = (each.detach().to(dtype).requires_grad_() for each in _qkv(7, 4, hk=4, dv=8))
    keep = torch.ones(2, 1, 7, 4, dtype=torch.bool)
    keep[1] = False
    keep[0, 0, 3] = False
    poisoned = torch.where(torch.tensor([False, True])[:, None, None, None], torch.nan, v) if impl == "reference" else v
    out = af.attend(q, k, v, mask=keep, impl=impl)
    assert not out[1].any()
    assert not out[0, :, 3].any()
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert not any(grad[1].any() for grad in grads)
    right = oracle(q.double(), k.double(), v.double(), keep)[0]
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-6 if dtype == torch.float32 else 3e-2)
    assert poisoned is not None


@pytest.mark.parametrize("impl", ["auto", "tiles", "reference"])
@pytest.mark.parametrize("text", ["Local(3) | Flagged()", "Local(3) | Random(3)", "Random(3)"])
def test_a_batch_of_no_samples(text: str, impl: str) -> None:
    q, k, v = (torch.zeros(0, 2, 700, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = af.attend(q, k, v, pattern=text, global_mask=torch.zeros(0, 700, dtype=torch.bool), impl=impl)
    assert out.shape == q.shape
    assert [each.shape for each in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape] * 3


def test_nan_in_padding_moves_nothing() -> None:
    q, k, v = (each.detach() for each in _qkv(5, 5))
    keep = torch.tensor([[True] * 5, [True, True, True, False, False]])
    bad = [torch.where(keep[:, None, :, None], each, torch.nan) for each in (k, v)]
    torch.testing.assert_close(af.attend(q, *bad, attention_mask=keep), af.attend(q, k, v, attention_mask=keep))


def test_positions_act_inside() -> None:
    q, k, v = _qkv(6, 6, hk=4, dv=8)
    site = af.Site(32, 4, causal=True)
    for spec in ("rope", "alibi", "t5", "shaw", "transformer_xl"):
        position = af.build_position(spec, site).double()
        for parameter in position.parameters():
            torch.nn.init.normal_(parameter)
        whole = af.attend(q, k, v, position=position, causal=True)
        assert not torch.allclose(whole, af.attend(q, k, v, causal=True))
        newest = af.attend(q[:, :, 4:], k, v, position=position, causal=True)
        torch.testing.assert_close(newest, whole[:, :, 4:], rtol=1e-9, atol=1e-10)
        moved = torch.arange(6)[None] + 11
        shifted = af.attend(q, k, v, position=position, causal=True, q_positions=moved, k_positions=moved)
        torch.testing.assert_close(shifted, whole, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(af.attend(q, k, v, position="none"), af.attend(q, k, v))


def test_dropout_is_unbiased() -> None:
    q, k, v = (each.detach().expand(4000, -1, -1, -1) for each in _qkv(2, 3, b=1))
    right = af.attend(q[:1], k[:1], v[:1])
    draws = af.attend(q, k, v, dropout=0.5)
    error = (draws.mean(0) - right[0]).abs() / (draws.std(0) / 4000**0.5)
    assert error.max() < 5


@pytest.mark.parametrize(
    ("facts", "error", "message"),
    [
        ({"position": "learned"}, SpecError, "position='learned' has weights.*af.build_position"),
        ({"position": "sinusoidal"}, IncompatibleError, "added to token vectors before attention: use Transformer"),
        ({"softcap": 2.0, "impl": "torch"}, SpecError, 'impl="torch" has no softcap'),
        ({"attention_mask": torch.ones(2, 5)}, ValueError, "attention_mask: expected one entry for each of the 9 keys"),
        ({"document_ids": torch.zeros(2, 9, dtype=torch.int64)}, ValueError, "at most 9 of them, got 11"),
        (
            {"sink": torch.zeros(1, 4)},
            ValueError,
            r"sink: expected a floating number for each of the 4 .*shape \[1, 4\]",
        ),
        ({"sink": torch.zeros(4, dtype=torch.int64)}, ValueError, "sink: expected a floating number.*torch.int64"),
        ({"sink": 0.5}, ValueError, "sink: expected a floating number for each of the 4 query heads, got 0.5"),
        ({"pattern": "locale(4)"}, SpecError, "there is no pattern named 'locale'; did you mean 'local'"),
        (
            {"position": "rope", "k_positions": torch.zeros(1, 9)},
            ValueError,
            "k_positions: expected whole numbers, got float32",
        ),
        (
            {"position": "alibi", "q_positions": torch.zeros(1, 11)},
            ValueError,
            "q_positions: expected whole.*; round them",
        ),
    ],
)
@pytest.mark.plain
def test_what_attend_refuses(facts: dict, error: type[Exception], message: str) -> None:
    q, k, v = _qkv(11, 9)
    with pytest.raises(error, match=message):
        af.attend(q, k, v, **facts)
