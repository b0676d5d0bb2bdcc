"""Nystrom attention against the `nystrom_attention` package, and against full attention where every token is a landmark."""

import pytest
import torch
import torch.nn.functional as F
from nystrom_attention import NystromAttention
from torch import Tensor

from anyformer.attention.nystrom import Nystrom, filtered, means, pseudo_inverse
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer, check
from anyformer.side import side
from anyformer.site import Site

DIM = 6


@pytest.mark.parametrize("kernel", [0, 5])
@pytest.mark.parametrize(("n", "landmarks"), [(12, 4), (8, 8), (12, 1)])
def test_equals_the_package(n: int, landmarks: int, kernel: int) -> None:
    """One head and one row: the package scales its inverse by the largest norm of all heads and rows."""
    mixer = build_mixer(f"nystrom(landmarks={landmarks}, kernel={kernel})", "none", Site(DIM, 1), bias=False).double()
    peer = NystromAttention(
        DIM, dim_head=DIM, heads=1, num_landmarks=landmarks, residual=kernel > 0, residual_conv_kernel=5
    ).double()
    state = mixer.state_dict()
    peer.to_qkv.weight.data.copy_(torch.cat([state[f"{letter}.weight"] for letter in "qkv"]))
    peer.to_out[0].weight.data.copy_(state["o.weight"])
    peer.to_out[0].bias.data.zero_()
    if kernel:
        peer.res_conv.weight.data.copy_(state["attention.filter"][:, None, :, None])
    x, weights = torch.randn(2, 1, n, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = mixer(mine), peer(other)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    grads = [mixer.get_parameter(f"{letter}.weight").grad for letter in "qkv"]
    close(torch.cat([each for each in grads if each is not None]), peer.to_qkv.weight.grad)
    if kernel:
        close(mixer.get_parameter("attention.filter").grad, peer.res_conv.weight.grad[:, 0, :, 0])


@pytest.mark.parametrize("landmarks", [7, 11])
def test_with_a_landmark_for_every_token_it_is_full_attention(landmarks: int) -> None:
    nystrom = Nystrom(Site(12, 2), landmarks=landmarks, steps=40, kernel=0)
    q, k, v = 2 * torch.randn(3, 2, 2, 7, 6, dtype=torch.float64)
    mine, other = ([part.clone().requires_grad_() for part in (q, k, v)] for _ in range(2))
    got = nystrom(*mine, facts(7))
    expected = F.scaled_dot_product_attention(*other)
    got.square().sum().backward()
    expected.square().sum().backward()
    close(got, expected)
    for one, two in zip(mine, other, strict=True):
        close(one.grad, two.grad)


def test_equals_the_equation_written_out() -> None:
    """Head by head with the keys of a padded source, and segments by their definition."""
    keep = torch.tensor([[1] * 9, [1, 1, 1, 1, 1, 0, 0, 0, 0]]).bool()
    nystrom = Nystrom(Site(12, 4, kv_heads=2), landmarks=3, kernel=0)
    q = torch.randn(2, 4, 7, 3, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 9, 3, dtype=torch.float64)
    queries, keys = side(7, torch.device("cpu")), side(9, torch.device("cpu"), keep=keep)
    got = nystrom(q, k, v, Context(causal=False, queries=queries, keys=keys))
    for b, t in enumerate(keep.sum(dim=1).tolist()):
        for h in range(4):
            one, two, three = q[b, h], k[b, h // 2, :t], v[b, h // 2, :t]
            marks = [torch.stack([part[segments(len(part), 3) == s].mean(0) for s in range(3)]) for part in (one, two)]
            f1, a, f3 = (
                torch.softmax(x @ y.T * 3**-0.5, dim=-1)
                for x, y in ((one, marks[1]), (marks[0], marks[1]), (marks[0], two))
            )
            z = a.T / (a.abs().sum(0).max() * a.abs().sum(1).max())
            eye = torch.eye(3, dtype=torch.float64)
            for _ in range(6):
                z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
            close(got[b, h], f1 @ z @ f3 @ three)


def segments(t: int, landmarks: int) -> Tensor:
    return torch.tensor([place * landmarks // t for place in range(t)])


def test_equal_segments_need_no_mask_and_change_nothing() -> None:
    x, tokens = torch.randn(2, 3, 8, 5, dtype=torch.float64), side(8, torch.device("cpu"))
    plain, filled = means(x, tokens, 4)
    assert filled is None
    keep = torch.ones(2, 8, dtype=torch.bool)
    marked, filled = means(x, side(8, torch.device("cpu"), keep=keep), 4)
    assert filled is not None
    assert filled.all()
    close(plain, marked)


def test_the_inverse_of_one_matrix_does_not_depend_on_the_others() -> None:
    matrices = torch.softmax(torch.randn(2, 3, 5, 5, dtype=torch.float64), dim=-1)
    close(pseudo_inverse(matrices, 4)[:1, :1], pseudo_inverse(matrices[:1, :1], 4))
    good = 4 * torch.eye(5, dtype=torch.float64) + matrices
    close(pseudo_inverse(good, 30), torch.linalg.inv(good))


def test_the_filter_is_centred_and_shared_among_a_head_s_channels() -> None:
    v, taps = torch.randn(1, 2, 6, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    taps[0, 0], taps[1, 1] = 2.0, 3.0
    out = filtered(v, taps)
    close(out[0, 0], 2 * F.pad(v[0, 0, :-1], (0, 0, 1, 0)))
    close(out[0, 1], 3 * v[0, 1])


def test_what_it_refuses() -> None:
    with pytest.raises(
        IncompatibleError, match=r"nystrom cannot be causal: its landmarks are means over all places.*use linear"
    ):
        build_attention("nystrom", Site(12, 2, causal=True))
    with pytest.raises(
        SpecError, match="expected an odd kernel, with the token itself in the middle, got 4; use kernel=5"
    ):
        build_attention("nystrom(kernel=4)", Site(12, 2))
    with pytest.raises(SpecError, match="landmarks=0: expected"):
        build_attention("nystrom(landmarks=0)", Site(12, 2))
    with pytest.raises(IncompatibleError, match="so no score belongs to one pair"):
        check("nystrom", "alibi")
    mixer, x = build_mixer("nystrom", "none", Site(12, 2)), torch.randn(1, 4, 12)
    with pytest.raises(IncompatibleError, match="mixes one sequence with itself and takes no source"):
        mixer(x, source=x)


def facts(n: int) -> Context:
    tokens = side(n, torch.device("cpu"))
    return Context(causal=False, queries=tokens, keys=tokens)


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
