"""Linear attention as the quadratic form it stands for, and tensors to ask both with."""

import torch

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def quadratic(
    q,
    k,
    v,
    causal,
    keep=None,
    log_decay=None,
    documents=None,
    q_den=None,
    k_den=None,
    normalise=True,
    eps=1e-6,
    signed=False,
):
    """Every weight written out: [b h n m]."""
    (b, h, n, _), m = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    q_den, k_den = (q, k) if q_den is None else (q_den, k_den.repeat_interleave(h // k_den.shape[1], 1))
    weights = torch.ones(b, h, n, m, dtype=q.dtype)
    if log_decay is not None:
        steps = log_decay[None, :, None].expand(b, h, m) if log_decay.dim() == 1 else log_decay.expand(b, h, m)
        steps = steps if keep is None else torch.where(keep[:, None], steps, 0.0)
        place = steps.cumsum(-1)
        weights = torch.exp(-(place[..., :, None] - place[..., None, :]).abs())[:, :, m - n :]
    seen = torch.ones(b, 1, n, m, dtype=torch.bool)
    if causal:
        seen &= torch.arange(m) <= torch.arange(m - n, m)[:, None]
    if keep is not None:
        seen &= keep[:, None, None]
    if documents is not None:
        seen &= documents[:, None, m - n :, None] == documents[:, None, None]
    weights = weights * seen
    num, den = weights * (q @ k.mT) @ v, (weights * (q_den @ k_den.mT)).sum(-1, keepdim=True)
    bounded = den.clamp_min(eps) if not signed else torch.where(den < 0, -1.0, 1.0) * den.abs().clamp_min(eps)
    return num / bounded if normalise else num


def made(n, m, *, heads=4, groups=4, width=5, values=3, dtype=torch.float64):
    """Positive features and values that need gradients."""
    q, k = torch.rand(2, heads, n, width, dtype=dtype), torch.rand(2, groups, m, width, dtype=dtype)
    return q.requires_grad_(), k.requires_grad_(), torch.randn(2, groups, m, values, dtype=dtype, requires_grad=True)


def decay_of(kind, m, heads=4, dtype=torch.float64):
    if kind is None:
        return None
    shape = (heads,) if kind == "head" else (2, heads, m) if kind == "token" else (1, 1, m)
    return (-0.3 * torch.rand(shape, dtype=dtype)).requires_grad_()


def agree(out, truth, inputs, tolerance=TIGHT):
    """Value and gradients of two expressions of the same inputs."""
    torch.testing.assert_close(out, truth, **tolerance)
    upstream = torch.randn_like(truth)
    found, wanted = (
        torch.autograd.grad(y, inputs, upstream, retain_graph=True, allow_unused=True) for y in (out, truth)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def gap(one, other):
    """Largest difference relative to the largest value."""
    return float((one.double() - other).detach().abs().max() / other.detach().abs().max())
