"""A state that fades channel by channel against its quadratic form, against itself in pieces, and with gates that shut at once."""

import pytest
import torch
from torch import Tensor

from anyformer.ops import scan_tiles
from anyformer.ops.gated_node import gated_forward
from anyformer.ops.linear_gated import gated_linear_attention, gated_linear_attention_with_state

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fade: Tensor,
    causal: bool,
    keep: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Every weight of every channel written out: [b h n m f]."""
    h, n, m = q.shape[1], q.shape[2], k.shape[2]
    k, v, fade = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v, fade.expand(*k.shape)))
    fade = fade if keep is None else fade.masked_fill(~keep[:, None, :, None], 0.0)
    place = fade.cumsum(2)
    decay = torch.exp(-(place[:, :, m - n :, None] - place[:, :, None]).abs())
    weights = torch.einsum("bhnf,bhmf,bhnmf->bhnm", q, k, decay)
    seen = torch.ones(q.shape[0], 1, n, m, dtype=torch.bool)
    if causal:
        seen &= torch.arange(m) <= torch.arange(m - n, m)[:, None]
    if keep is not None:
        seen &= keep[:, None, None]
    if documents is not None:
        seen &= documents[:, None, m - n :, None] == documents[:, None, None]
    return (weights * seen) @ v


def made(n: int, m: int, groups: int, strength: float = 0.3) -> list[Tensor]:
    shapes = (2, 4, n, 5), (2, groups, m, 5), (2, groups, m, 3), (2, groups, m, 5)
    q, k, v, gate = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v, -strength * gate.abs())]


def agree(out: Tensor, truth: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    found, wanted = (torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (out, truth))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("n", "m", "groups", "chunk", "hidden", "documents"),
    [
        (37, 37, 4, 8, False, False),
        (37, 37, 2, 16, True, True),
        (9, 37, 2, 4, True, False),
        (1, 1, 4, 64, False, False),
    ],
)
def test_equals_the_quadratic_form(
    causal: bool,
    n: int,
    m: int,
    groups: int,
    chunk: int,
    hidden: bool,
    documents: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan_tiles, "TOKENS", 16)
    inputs = made(n, m, groups)
    keep = torch.rand(2, m) > 0.3 if hidden else None
    parts = torch.randint(0, 3, (2, m)).sort()[0] if documents else None
    out = gated_linear_attention(*inputs, causal=causal, keep=keep, documents=parts, chunk=chunk)
    truth = quadratic(*inputs, causal, keep, parts)
    if keep is not None:  # the queries of hidden tokens are of no document
        out, truth = (x * keep[:, None, m - n :, None] for x in (out, truth))
    agree(out, truth, inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_gates_of_any_strength_neither_overflow_nor_lose_what_they_let_through(causal: bool) -> None:
    q, k, v, fade = made(70, 70, 4)
    fade = torch.where(torch.rand(2, 4, 70, 5) < 0.2, -60.0, fade.detach()).requires_grad_()
    out = gated_linear_attention(q, k, v, fade, causal=causal)
    agree(out, quadratic(q, k, v, fade, causal), [q, k, v, fade])
    halved = [x.float() for x in (q, k, v, fade)]
    error = (gated_linear_attention(*halved, causal=causal) - out).abs().max() / out.abs().max()
    assert error < 1e-6


def test_pieces_equal_the_whole() -> None:
    q, k, v, fade = made(37, 37, 2)
    keep = torch.rand(2, 37) > 0.2
    documents = torch.randint(0, 3, (2, 37)).sort()[0]
    whole, last = gated_linear_attention_with_state(q, k, v, fade, keep=keep, documents=documents)
    state, outs, at = None, [], 0
    for size in (1, 1, 5, 16, 0, 13, 1):
        here = slice(at, at + size)
        out, state = gated_linear_attention_with_state(
            *(x[:, :, here] for x in (q, k, v, fade)),
            state=state, keep=keep[:, : at + size], documents=documents[:, : at + size],
        )  # fmt: skip
        outs.append(out)
        at += size
    shown = keep[:, None, :, None]
    torch.testing.assert_close(torch.cat(outs, 2) * shown, whole * shown, **TIGHT)
    torch.testing.assert_close(state, last, **TIGHT)


def test_queries_before_the_first_key_read_nothing() -> None:
    q, k, v, fade = made(5, 3, 4)
    out = gated_linear_attention(q, k, v, fade, causal=True)
    torch.testing.assert_close(out[:, :, 2:], gated_linear_attention(q[:, :, 2:], k, v, fade, causal=True), **TIGHT)
    assert float(out[:, :, :2].detach().abs().max()) == 0.0


def test_both_directions_need_a_place_for_every_query() -> None:
    with pytest.raises(ValueError, match="needs a place for every query: expected at most 3 queries, got 5"):
        gated_linear_attention(*made(5, 3, 4), causal=False)


def test_sums_run_in_float32() -> None:
    q, k, v, fade = (x.detach() for x in made(200, 200, 4, 0.01))
    narrow = [x.to(torch.bfloat16) for x in (q, k, v, fade)]
    out = gated_linear_attention(*narrow, causal=True)
    wide = gated_linear_attention(*(x.double() for x in narrow), causal=True)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - wide).abs().max() / wide.abs().max()) < 2**-8


def test_the_pass_is_a_proper_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_tiles, "TOKENS", 8)
    q, k, v, fade = (x.detach().float().requires_grad_() for x in made(19, 19, 2))
    state = torch.rand(2, 2, 5, 3, requires_grad=True)
    torch.library.opcheck(gated_forward, (q, k, v, fade, state, True, 4))


@pytest.mark.parametrize("causal", [True, False])
def test_the_pass_equals_ordinary_operators_and_can_be_differentiated_twice(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_tiles, "TOKENS", 8)
    inputs = made(19, 19, 2)

    def function(*inputs: Tensor) -> Tensor:
        return gated_linear_attention(*inputs, causal=causal, chunk=4)

    once = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    again = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    for one, other in zip(once, again, strict=True):
        torch.testing.assert_close(one, other.detach(), **TIGHT)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_gradients_keep_their_precision_in_float32() -> None:
    inputs = made(300, 300, 4)
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 4, 300, 3, dtype=torch.float64)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [x.detach().to(dtype).requires_grad_() for x in (*inputs, state)]
        out, last = gated_linear_attention_with_state(*given[:4], state=given[4])
        return torch.autograd.grad((out * upstream.to(dtype)).sum() + last.sum(), given)

    for one, other in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert float((one.double() - other).abs().max() / other.abs().max()) < 1e-5


@pytest.mark.plain
def test_compiles_whole_for_any_length() -> None:
    compiled = torch.compile(gated_linear_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (70, 130):
        inputs = made(n, n, 2)
        found, truth = (f(*inputs, causal=False) for f in (compiled, gated_linear_attention))
        torch.testing.assert_close(found, truth, **TIGHT)
        upstream = torch.randn_like(truth)
        for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (found, truth)), strict=True):
            torch.testing.assert_close(one, other, **TIGHT)
