"""Attention to listed keys equals the dense reference with the same pairs."""

import torch

from anyformer.ops.gathered import gathered_attention
from anyformer.ops.softmax import dense


def test_equals_the_dense_reference_forward_and_backward() -> None:
    b, h, n, m, r = 2, 4, 7, 9, 3
    q = torch.randn(b, h, n, 5, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(b, 2, m, width, dtype=torch.float64, requires_grad=True) for width in (5, 6))
    index = torch.stack([torch.stack([torch.randperm(m)[:r] for _ in range(n)]) for _ in range(h)])
    listed = torch.rand(b, h, n, r) < 0.7
    listed[0, 0, 0] = False
    bias = torch.randn(1, h, n, r, dtype=torch.float64, requires_grad=True)
    pairs = torch.zeros(b, h, n, m, dtype=torch.bool).scatter(3, index.expand(b, -1, -1, -1), listed)
    spread = torch.zeros(b, h, n, m, dtype=torch.float64).scatter(
        3, index.expand(b, -1, -1, -1), bias.expand(b, -1, -1, -1)
    )
    ours = gathered_attention(q, k, v, index=index, allowed=listed, bias=bias, scale=0.4, softcap=2.0)
    theirs = dense(q, k, v, allowed=pairs, bias=spread, scale=0.4, softcap=2.0)
    assert not ours[0][0, 0, 0].any()
    probe = [torch.randn_like(part) for part in ours]

    def total(result: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return sum(
            (part.masked_fill(part == -torch.inf, 0.0) * each).sum() for part, each in zip(result, probe, strict=True)
        )

    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    for one, two in zip(
        torch.autograd.grad(total(ours), (q, k, v, bias)),
        torch.autograd.grad(total(theirs), (q, k, v, bias)),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)


def test_dropout_drops_weights() -> None:
    q, k = torch.zeros(1, 1, 400, 2), torch.zeros(1, 1, 2, 2)
    index, allowed = torch.tensor([0, 1]).expand(1, 400, 2), torch.ones(1, 1, 400, 2, dtype=torch.bool)
    out, _ = gathered_attention(q, k, torch.eye(2)[None, None], index=index, allowed=allowed, scale=1.0, dropout=0.5)
    assert set(out.unique().tolist()) == {0.0, 1.0}
