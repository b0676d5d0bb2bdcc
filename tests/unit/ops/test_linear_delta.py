"""The delta rule against its recurrence, against itself in pieces, and in both directions."""

import pytest
import torch
from torch import Tensor

from anyformer.ops import scan_tiles
from anyformer.ops.delta_node import delta_forward
from anyformer.ops.linear_delta import delta_rule, delta_rule_with_state

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    read: Tensor,
    keep: Tensor | None = None,
    documents: Tensor | None = None,
    own: bool = True,
) -> Tensor:
    """One token after the other; `own`: whether a query reads the state after its own token or before."""
    share = q.shape[1] // k.shape[1]
    k, v, read, beta = (x.repeat_interleave(share, 1) for x in (k, v, read, beta))
    rows = []
    for b in range(q.shape[0]):
        state, outs, last = torch.zeros(q.shape[1], k.shape[3], v.shape[3], dtype=q.dtype), [], None
        for t in range(k.shape[2]):
            shown = keep is None or bool(keep[b, t])
            if documents is not None and shown:
                state = state if last is None or last == int(documents[b, t]) else torch.zeros_like(state)
                last = int(documents[b, t])
            before = state
            if shown:
                move = beta[b, :, t, None] * (v[b, :, t] - (read[b, :, t, None] @ state)[:, 0])
                state = state + k[b, :, t, :, None] * move[:, None]
            outs.append((q[b, :, t, None] @ (state if own else before))[:, 0])
        rows.append(torch.stack(outs, 1))
    return torch.stack(rows)


def made(n: int, groups: int) -> list[Tensor]:
    shapes = (2, 4, n, 5), (2, groups, n, 5), (2, groups, n, 3), (2, groups, n), (2, groups, n, 5)
    q, k, v, beta, read = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    k, read = k / k.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True) + 0.1 * read
    return [x.requires_grad_() for x in (q, k, v, 1.5 * torch.sigmoid(beta), read)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("n", "groups", "chunk", "hidden", "documents"),
    [
        (37, 4, 8, False, False),
        (37, 2, 7, True, True),
        (37, 2, 64, True, False),
        (21, 1, 4, False, True),
        (1, 4, 8, False, False),
    ],
)
def test_equals_the_recurrence(
    causal: bool, n: int, groups: int, chunk: int, hidden: bool, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_tiles, "TOKENS", 16)
    inputs = made(n, groups)
    keep = torch.rand(2, n) > 0.3 if hidden else None
    parts = torch.randint(0, 3, (2, n)).sort()[0] if documents else None
    q, k, v, beta, read = inputs
    out = delta_rule(q, k, v, beta, causal=causal, read=read, keep=keep, documents=parts, chunk=chunk)
    truth = recurrence(q, k, v, beta, read, keep, parts)
    if not causal:
        turned = (x.flip(2) for x in (q, k, v, beta, read))
        facts = (None if x is None else x.flip(1) for x in (keep, parts))
        truth = truth + recurrence_before(*turned, *facts).flip(2)
    if keep is not None:  # the queries of hidden tokens are of no document
        out, truth = (x * keep[:, None, :, None] for x in (out, truth))
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (out, truth)), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def recurrence_before(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, read: Tensor, keep: Tensor | None, documents: Tensor | None
) -> Tensor:
    """What each query reads of the tokens before its own, those of other documents forgotten."""
    if documents is None:
        return recurrence(q, k, v, beta, read, keep, own=False)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for number in documents.unique():
        mine = documents == number
        shown = mine if keep is None else mine & keep
        out = out + recurrence(q, k, v, beta, read, shown, own=False) * mine[:, None, :, None]
    return out


def test_pieces_equal_the_whole() -> None:
    q, k, v, beta, read = made(37, 2)
    keep = torch.rand(2, 37) > 0.2
    documents = torch.randint(0, 3, (2, 37)).sort()[0]
    whole, last = delta_rule_with_state(q, k, v, beta, read=read, keep=keep, documents=documents)
    state, outs, at = None, [], 0
    for size in (1, 1, 5, 16, 0, 13, 1):
        here = slice(at, at + size)
        pieces = (x[:, :, here] for x in (q, k, v, beta))
        out, state = delta_rule_with_state(
            *pieces, state=state, read=read[:, :, here], keep=keep[:, : at + size], documents=documents[:, : at + size]
        )
        outs.append(out)
        at += size
    shown = keep[:, None, :, None]
    torch.testing.assert_close(torch.cat(outs, 2) * shown, whole * shown, **TIGHT)
    torch.testing.assert_close(state, last, **TIGHT)


def test_a_full_correction_replaces_the_value_at_its_key() -> None:
    k, v = (x.detach() for x in made(9, 4)[1:3])
    ones = torch.ones(2, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(delta_rule(k, k, v, ones, causal=True), v, **TIGHT)  # whatever was there


def test_both_directions_need_a_place_for_every_query() -> None:
    q, k, v, beta, _ = made(5, 4)
    with pytest.raises(ValueError, match="needs a place for every query: expected at most 3 queries, got 5"):
        delta_rule(q, k[:, :, :3], v[:, :, :3], beta[:, :, :3], causal=False)


def test_the_pass_is_a_proper_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_tiles, "TOKENS", 8)
    q, k, v, beta, read = (x.detach().float().requires_grad_() for x in made(19, 2))
    state, cuts = torch.rand(2, 2, 5, 3, requires_grad=True), -(torch.rand(2, 1, 19, 1) < 0.2).float()
    given = q, k, v, beta.detach().unsqueeze(-1).requires_grad_(), read
    torch.library.opcheck(delta_forward, (*given, cuts.expand(2, 2, -1, 1).contiguous(), state, True, 4))
    torch.library.opcheck(delta_forward, (*given, None, state, False, 4))


@pytest.mark.parametrize("causal", [True, False])
def test_the_pass_equals_ordinary_operators_and_can_be_differentiated_twice(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_tiles, "TOKENS", 8)
    inputs = made(19, 2)
    documents = torch.randint(0, 3, (2, 19)).sort()[0]

    def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, read: Tensor) -> Tensor:
        return delta_rule(q, k, v, beta, causal=causal, read=read, documents=documents, chunk=4)

    once = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    again = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    for one, other in zip(once, again, strict=True):
        torch.testing.assert_close(one, other.detach(), **TIGHT)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_gradients_keep_their_precision_in_float32() -> None:
    inputs = made(300, 4)
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 4, 300, 3, dtype=torch.float64)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v, beta, read, first = given = [x.detach().to(dtype).requires_grad_() for x in (*inputs, state)]
        out, last = delta_rule_with_state(q, k, v, beta, read=read, state=first)
        return torch.autograd.grad((out * upstream.to(dtype)).sum() + last.sum(), given)

    for one, other in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert float((one.double() - other).abs().max() / other.abs().max()) < 1e-4


@pytest.mark.plain
def test_compiles_whole_for_any_length() -> None:
    compiled = torch.compile(delta_rule, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (70, 130):
        q, k, v, beta, read = inputs = made(n, 2)
        found, truth = (f(q, k, v, beta, causal=False, read=read) for f in (compiled, delta_rule))
        torch.testing.assert_close(found, truth, **TIGHT)
        upstream = torch.randn_like(truth)
        for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (found, truth)), strict=True):
            torch.testing.assert_close(one, other, **TIGHT)
