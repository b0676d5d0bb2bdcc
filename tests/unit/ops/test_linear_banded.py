"""Linear attention with terms that are alike beyond a clip, against every weight written out."""

import pytest
import torch

from anyformer.ops.linear_banded import Terms, banded_sums

TABLES = {
    "all": ("keys", "queries", "shift", "bias", "values", "fade"),
    "shaw": ("keys", "values"),
    "fading values": ("values", "fade"),
    "none": (),
}


def made(n: int, rows: int, tables: tuple[str, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = {name: normal(2, 3, n, width) for name, width in (("q", 4), ("k", 4), ("v", 5), ("asked", 6), ("told", 6))}
    every = {
        "keys": normal(3, rows, 6),
        "queries": normal(3, rows, 6),
        "shift": normal(3, 6),
        "bias": normal(3, rows),
        "values": normal(3, rows, 5),
        "fade": -0.1 * normal(3).abs(),
    }
    made = tokens | {name: every[name] for name in tables}
    return {name: x.requires_grad_() for name, x in made.items()}


def dense(x: dict[str, torch.Tensor], left: int, right: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(x["q"].shape[2])
    offset = index[None] - index[:, None]
    rows = offset.clamp(-left, right) + left
    shift = x.get("shift", torch.zeros(3, 6, dtype=torch.float64))[:, None]
    logits = torch.einsum("bhjd,hid->bhij", x["told"], shift)
    if "keys" in x:
        logits = logits + torch.einsum("bhid,hijd->bhij", x["asked"] + shift, x["keys"][:, rows])
    if "queries" in x:
        logits = logits + torch.einsum("bhjd,hijd->bhij", x["told"], x["queries"][:, rows])
    logits = 0.3 * logits
    if "bias" in x:
        logits = logits + x["bias"][:, rows]
    if "fade" in x:
        logits = logits + x["fade"][:, None, None] * offset.abs()
    weights = (x["q"] @ x["k"].mT) * logits.exp()
    weights = weights.masked_fill(offset > 0, 0.0) if causal else weights
    out = weights @ x["v"]
    if "values" in x:
        out = out + torch.einsum("bhij,hijv->bhiv", weights, x["values"][:, rows])
    return out, weights.sum(-1)


@pytest.mark.parametrize("tables", list(TABLES.values()), ids=list(TABLES))
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 3), (3, 1), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "block"), [(1, None), (5, 1), (13, 4), (29, 4), (29, None)])
def test_equals_every_weight_written_out(
    n: int, block: int | None, causal: bool, left: int, right: int, tables: tuple[str, ...]
) -> None:
    x, results = made(n, left + right + 1, tables), []
    weight = torch.randn(2, 3, n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    terms = Terms(0.3, x["asked"], x["told"], **{name: x[name] for name in tables})
    ours = banded_sums(x["q"], x["k"], x["v"], terms, left=left, right=right, causal=causal, block=block)
    for num, den in (ours, dense(x, left, right, causal)):
        loss = (num * weight).sum() + (den * weight[..., 0]).sum()
        grads = torch.autograd.grad(loss, list(x.values()), materialize_grads=True)
        results.append([num, den, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_nothing_flows_from_the_future() -> None:
    x = made(29, 6, TABLES["all"])
    terms = Terms(0.3, x["asked"], x["told"], **{name: x[name] for name in TABLES["all"]})
    num, _ = banded_sums(x["q"], x["k"], x["v"], terms, left=2, right=3, causal=True, block=4)
    for grad in torch.autograd.grad(num[:, :, 9].sum(), [x[name] for name in ("q", "k", "v", "told")]):
        assert not grad[:, :, 10:].any()


@pytest.mark.parametrize("fade", [None, torch.full((3,), -0.1, dtype=torch.float64)])
def test_no_token(fade: torch.Tensor | None) -> None:
    x = made(0, 3, ())
    terms = Terms(1.0, x["asked"], x["told"], fade=fade)
    num, den = banded_sums(x["q"], x["k"], x["v"], terms, left=1, right=1, causal=False)
    assert num.shape == (2, 3, 0, 5)
    assert den.shape == (2, 3, 0)
