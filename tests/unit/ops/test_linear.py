"""Linear attention against the quadratic form it stands for, against itself in other forms, and against other projects."""

import itertools
import math

import pytest
import torch
from linear_truth import TIGHT, agree, decay_of, gap, made, quadratic

from anyformer.ops.feature_maps import elu1
from anyformer.ops.linear import LinearState, linear_attention, linear_attention_with_state

CASES = [
    # n, m, groups, decay, hidden keys, documents, features of the denominator, normalise, chunk (32 chunks are a segment)
    (37, 37, 4, None, False, False, False, True, 5),
    (140, 140, 2, None, True, False, True, True, 1),
    (140, 140, 4, "head", False, False, False, True, 1),
    (37, 37, 1, "head", True, False, False, True, 5),
    (140, 140, 4, "token", False, False, True, True, 1),
    (37, 37, 2, "token", True, True, False, True, 4),
    (37, 37, 2, "shared", True, False, True, True, 5),
    (140, 140, 4, None, True, True, False, True, 1),
    (37, 37, 2, None, False, True, True, True, 5),
    (40, 40, 4, "head", False, True, False, False, 1),
    (37, 37, 2, "token", False, False, False, False, 3),
    (37, 37, 2, None, True, False, False, False, 64),
    (8, 37, 2, None, True, False, False, True, 3),
    (8, 37, 4, "token", True, False, True, True, 3),
    (8, 37, 2, "head", False, True, False, True, None),
    (133, 140, 4, "head", False, False, False, False, 1),
    (1, 1, 2, "token", False, False, True, True, None),
    (150, 150, 4, None, False, False, False, True, None),
    (150, 150, 2, "head", False, False, True, True, None),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_quadratic_form_with_gradients(case, causal):
    n, m, groups, decay, hidden, documents, own, normalise, chunk = case
    q, k, v = made(n, m, groups=groups)
    q_den, k_den, _ = made(n, m, groups=groups, width=2) if own else (None, None, None)
    keep = torch.rand(2, m) > 0.3 if hidden else None
    facts = {
        "causal": causal,
        "keep": keep,
        "log_decay": decay_of(decay, m),
        "documents": torch.randint(0, 4, (2, m)).sort()[0] if documents else None,
        "q_den": q_den,
        "k_den": k_den,
        "normalise": normalise,
    }
    out, truth = linear_attention(q, k, v, **facts, chunk=chunk), quadratic(q, k, v, **facts)
    if documents and keep is not None:  # a hidden token has no document of its own
        out, truth = (y * keep[:, None, m - n :, None] for y in (out, truth))
    agree(out, truth, [x for x in (q, k, v, q_den, k_den, facts["log_decay"]) if x is not None])


@pytest.mark.parametrize("causal", [True, False])
def test_queries_before_the_first_key(causal):
    q, k, v = made(9, 5)
    out = linear_attention(q, k, v, causal=causal, chunk=2)
    agree(out, quadratic(q, k, v, causal), (q, k, v))
    if causal:
        assert float(out[:, :, :4].detach().abs().max()) == 0.0


@pytest.mark.parametrize("causal", [True, False])
def test_negative_denominators_keep_their_sign(causal):
    q, k, v = made(23, 23)
    q, k = ((x.detach() - 0.5).requires_grad_() for x in (q, k))
    facts = {"causal": causal, "eps": 0.3, "signed": True}
    agree(linear_attention(q, k, v, **facts, chunk=4), quadratic(q, k, v, **facts), (q, k, v))


@pytest.mark.parametrize("causal, groups, n", [(True, 2, 19), (True, 4, 16), (False, 2, 19), (True, 2, 1)])
def test_elu1_inside_equals_elu1_before(causal, groups, n):
    q, k, v = made(n, n, groups=groups)
    q, k = ((4 * x.detach() - 3).requires_grad_() for x in (q, k))
    keep = torch.rand(2, n) > 0.3
    inside = linear_attention(q, k, v, causal=causal, keep=keep, features="elu1", chunk=4)
    agree(inside, linear_attention(elu1(q), elu1(k), v, causal=causal, keep=keep, chunk=4), (q, k, v))


@pytest.mark.parametrize(
    "decay, documents, hidden", [(None, False, False), ("token", True, True), ("head", False, True)]
)
@pytest.mark.parametrize("pieces", [[23], [1] * 23, [7, 1, 10, 5], [0, 20, 3]])
def test_steps_pieces_and_the_whole_are_equal(pieces, decay, documents, hidden):
    n = sum(pieces)
    q, k, v = (x.detach() for x in made(n, n, groups=2))
    decay = None if decay is None else decay_of(decay, n).detach()
    ids = torch.arange(n).expand(2, -1) // 9 if documents else None
    keep = torch.rand(2, n) > 0.3 if hidden else None
    facts = {"log_decay": decay, "documents": ids, "keep": keep}
    whole, last = linear_attention_with_state(q, k, v, **facts, chunk=4)
    outs, state, start = [], None, 0
    for size in pieces:
        stop = start + size
        here = {
            "log_decay": decay[..., start:stop] if decay is not None and decay.dim() == 3 else decay,
            "documents": None if ids is None else ids[:, :stop],
            "keep": None if keep is None else keep[:, :stop],
        }
        part = (x[:, :, start:stop] for x in (q, k, v))
        out, state = linear_attention_with_state(*part, **here, state=state, chunk=4)
        outs, start = [*outs, out], stop
        assert state.s.shape == (2, 2 if decay is None else 4, 5, 3)
        assert state.z.shape == state.s.shape[:3]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in state)
    torch.testing.assert_close(torch.cat(outs, dim=2), whole, **TIGHT)
    for one, other in zip(state, last, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_gradients_flow_through_the_state():
    q, k, v = made(20, 20)
    decay = decay_of("token", 20)
    _, state = linear_attention_with_state(q[:, :, :9], k[:, :, :9], v[:, :, :9], log_decay=decay[..., :9], chunk=2)
    out, last = linear_attention_with_state(
        q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], log_decay=decay[..., 9:], state=state, chunk=4
    )
    whole, end = linear_attention_with_state(q, k, v, log_decay=decay, chunk=64)
    agree(out, whole[:, :, 9:], (q, k, v, decay))
    for one, other in zip(last, end, strict=True):
        agree(one, other, (k, v, decay) if one is last.s else (k, decay))


def test_more_keys_than_queries_continue_a_state():
    q, k, v = (x.detach() for x in made(30, 30))
    decay = decay_of("head", 30).detach()
    _, state = linear_attention_with_state(q[:, :, :8], k[:, :, :8], v[:, :, :8], log_decay=decay)
    out, _ = linear_attention_with_state(q[:, :, 25:], k[:, :, 8:], v[:, :, 8:], log_decay=decay, state=state)
    torch.testing.assert_close(out, quadratic(q, k, v, True, log_decay=decay)[:, :, 25:], **TIGHT)


def test_equals_flash_linear_attention(naive):
    q, k, v = made(50, 50, dtype=torch.float32)
    q, k = ((4 * x.detach() - 2).requires_grad_() for x in (q, k))
    features = (elu1(q).transpose(1, 2), elu1(k).transpose(1, 2), v.transpose(1, 2))
    truth = naive("linear_attn").naive_recurrent_linear_attn(*features, normalize=True)[0].transpose(1, 2)
    agree(
        linear_attention(q, k, v, causal=True, features="elu1", chunk=8), truth, (q, k, v), {"rtol": 2e-6, "atol": 2e-6}
    )


def test_equals_retention_of_flash_linear_attention(naive):
    q, k, v = made(50, 50, dtype=torch.float32)
    decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(4))))
    truth = naive("retention").naive_retention(q, k, v)
    out = linear_attention(q * 5**-0.5, k, v, causal=True, log_decay=decay, normalise=False, chunk=8)
    agree(out, truth, (q, k, v), {"rtol": 2e-6, "atol": 4e-6})


@pytest.mark.parametrize("causal, decay", [(True, None), (True, "token"), (False, None), (False, "head")])
def test_hidden_keys_move_nothing_even_as_nan(causal, decay):
    q, k, v = made(21, 21)
    keep = torch.rand(2, 21) > 0.4
    facts = {"causal": causal, "keep": keep, "log_decay": decay_of(decay, 21), "chunk": 4}
    out = linear_attention(q, k, v, **facts)
    junk = [x.detach().masked_fill(~keep[:, None, :, None], math.nan).requires_grad_() for x in (k, v)]
    moved = linear_attention(q, *junk, **facts)
    assert torch.equal(out, moved)
    for grad in torch.autograd.grad(moved.square().sum(), junk):
        assert float(grad.masked_select(~keep[:, None, :, None]).abs().max()) == 0.0
        assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("causal, decay, signed", [*itertools.product([True, False], [None, "token"], [True, False])])
def test_a_query_without_keys_gives_zero_and_hears_nothing(causal, decay, signed):
    q, k, v = made(12, 12, dtype=torch.float32)
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[0] = False
    keep[1, :3] = False
    out = linear_attention(
        q, k, v, causal=causal, keep=keep, log_decay=decay_of(decay, 12, dtype=torch.float32), signed=signed
    )
    empty = torch.zeros(2, 12, dtype=torch.bool)
    empty[0] = True
    empty[1, :3] = causal
    silent = out.transpose(1, 2)[empty]
    assert float(silent.detach().abs().max()) == 0.0
    for grad in torch.autograd.grad(silent.sum(), (q, k, v)):
        assert float(grad.abs().max()) == 0.0


@pytest.mark.parametrize("sizes", [(0, 0), (0, 4), (3, 0)])
def test_no_queries_or_no_keys(sizes):
    q, k, v = made(*sizes)
    for causal in (True, False):
        out = linear_attention(q, k, v, causal=causal)
        assert out.shape == (2, 4, sizes[0], 3)
        assert float(out.detach().abs().sum()) == 0.0
        out.sum().backward()


@pytest.mark.parametrize("t", [0, 4, 5, 17])
def test_nothing_flows_back_from_the_future(t):
    q, k, v = made(18, 18, dtype=torch.float32)
    decay = decay_of("token", 18, dtype=torch.float32)
    for facts in ({"log_decay": decay}, {"q_den": q, "k_den": k}, {"features": "elu1"}):
        out = linear_attention(q, k, v, causal=True, chunk=5, **facts)
        for grad in torch.autograd.grad(out[:, :, : t + 1].square().sum(), (q, k, v, decay), allow_unused=True):
            rest = grad if grad is None else grad[:, :, t + 1 :]
            assert rest is None or float(rest.abs().sum()) == 0.0


def test_decay_that_forgets_at_once_cuts_the_sequence():
    q, k, v = made(24, 24)
    ids = (torch.arange(24) // 7).expand(2, -1)
    for cut in (-math.inf, -1e30, -1e4):
        decay = torch.full((2, 4, 24), -0.1, dtype=torch.float64)
        decay[..., ::7] = cut
        decay.requires_grad_()
        plain = torch.full((4,), -0.1, dtype=torch.float64)
        for causal in (True, False):
            out = linear_attention(q, k, v, causal=causal, log_decay=decay, chunk=5)
            agree(out, linear_attention(q, k, v, causal=causal, log_decay=plain, documents=ids, chunk=5), (q, k, v))
            (grad,) = torch.autograd.grad(out.square().sum(), decay)
            assert bool(torch.isfinite(grad).all())
            assert float(grad[..., ::7].abs().max()) == 0.0


@pytest.mark.parametrize("strong", [-3.0, -30.0, -300.0])
def test_weak_decay_after_strong_decay_keeps_its_digits(strong):
    q, k, v = made(200, 200)
    decay = torch.where(torch.rand(2, 4, 200) < 0.3, strong, -0.01).double().requires_grad_()
    inputs = (q, k, v, decay)
    single = [x.detach().float().requires_grad_() for x in inputs]
    out, truth = (
        linear_attention(*single[:3], causal=True, log_decay=single[3]),
        quadratic(q, k, v, True, log_decay=decay),
    )
    upstream = torch.randn_like(truth)
    found = torch.autograd.grad(out, single, upstream.float())
    for one, other in zip((out, *found), (truth, *torch.autograd.grad(truth, inputs, upstream)), strict=True):
        assert gap(one, other) < 3e-6


def test_half_precision_is_summed_in_float32():
    ones = torch.ones(1, 1, 3000, 1, dtype=torch.bfloat16)
    out, state = linear_attention_with_state(ones, ones, ones)
    assert out.dtype == torch.bfloat16
    assert (state.s.dtype, state.s.item(), state.z.item()) == (torch.float32, 3000.0, 3000.0)
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in made(90, 90))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for causal in (True, False):
        out, truth = linear_attention(q, k, v, causal=causal), quadratic(*wide, causal)
        found = torch.autograd.grad(out.double().square().sum(), (q, k, v))
        wanted = torch.autograd.grad(truth.square().sum(), wide)
        for one, other in zip((out, *found), (truth, *wanted), strict=True):
            assert one.dtype == torch.bfloat16
            assert gap(one, other) < 2e-2


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_does_not_reach_the_sums(causal):
    q, k, v = made(70, 70, dtype=torch.float32)
    plain = linear_attention(q, k, v, causal=causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_attention(q, k, v, causal=causal)
    agree(inside, plain, (q, k, v), {"rtol": 0, "atol": 0})


def test_strided_inputs_and_any_chunk_give_the_same():
    q, k, v = (x.detach() for x in made(53, 53))
    truth = quadratic(q, k, v, True)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for chunk in (1, 2, 3, 26, 53, 100):
        torch.testing.assert_close(linear_attention(*strided, causal=True, chunk=chunk), truth, **TIGHT)


def test_inputs_are_left_alone():
    tensors = made(30, 30)
    before = [x.detach().clone() for x in tensors]
    linear_attention(*tensors, causal=True, keep=torch.rand(2, 30) > 0.5, features="elu1").sum().backward()
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def refused(message, n=4, m=4, call=linear_attention_with_state, groups=4, **facts):
    q, k, v = made(n, m, groups=groups)
    with pytest.raises(ValueError, match=message):
        call(q, k, v, **facts)


def test_refusals_say_what_fits():
    refused("above 0, which keeps the denominator away from it, got 0", eps=0.0)
    refused("chunk: expected at least 1 token, got 0", chunk=0)
    refused("in groups of one size, got 4 query heads over 3 key heads", groups=3)
    refused("q_den and k_den both or neither, and only with normalise=True", q_den=torch.rand(2, 4, 4, 2))
    own = {"q_den": torch.rand(2, 4, 4, 2), "k_den": torch.rand(2, 4, 4, 2)}
    refused("normalise=False", **own, normalise=False)
    refused("features='elu1'", **own, features="elu1")
    refused(r"keep: expected \[2, 4\], one entry a key, got \[2, 3\]", keep=torch.ones(2, 3, dtype=torch.bool))
    refused(
        r"documents: expected \[2, 4\], one entry a key, got \[2, 3\]", documents=torch.zeros(2, 3, dtype=torch.int64)
    )
    facts = {"call": linear_attention, "causal": False, "log_decay": -torch.rand(4)}
    refused("every query needs a place among the keys: expected at most 4 queries, got 6", 6, 4, **facts)
    state = LinearState(torch.zeros(2, 4, 5, 3), torch.zeros(2, 4, 5))
    refused(
        "a state continues a sequence, where every query has a key: expected at most 4 queries, got 6",
        6,
        4,
        state=state,
    )
    refused(
        r"state.s: expected \[2, 2, 5, 3\], got \[2, 4, 5, 3\]; continue a state with the heads", groups=2, state=state
    )


@pytest.mark.plain
def test_a_decay_of_another_shape_is_refused():
    message = r"log_decay: expected \[4\], one a head, or \[2, 4, 4\], one a head and key, got "
    for shape in ((3,), (2, 4, 3), (3, 4, 4), (4, 4)):
        refused(message + str(list(shape)).replace("[", r"\[").replace("]", r"\]"), log_decay=-torch.rand(shape))


@pytest.mark.parametrize("causal", [True, False])
def test_the_document_of_a_hidden_token_does_not_matter(causal):
    q, k, v = made(12, 12)
    keep = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1]], dtype=torch.bool).expand(2, -1)
    ids = torch.tensor([[0, 0, 9, 0, 0, 9, 0, 1, 1, 9, 1, 1]]).expand(2, -1)
    shown = keep[:, None, :, None]
    out = linear_attention(q, k, v, causal=causal, keep=keep, documents=ids, chunk=3)
    agree(out * shown, quadratic(q, k, v, causal, keep, documents=ids) * shown, (q, k, v))
