"""Learned blocks against dense attention under a pattern made group by group, and the estimator against its definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.attention.learned_blocks import LearnedBlocks, choose
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer, build_position, verdict
from anyformer.position.bind import bind
from anyformer.side import side
from anyformer.site import Site

GROUP, WIDTH = 3, 6


def built(keep: int, causal: bool) -> LearnedBlocks:
    site = Site(24, 4, kv_heads=2, head_dim=WIDTH, causal=causal, max_length=64)
    attention = LearnedBlocks(site, group=GROUP, keep=keep, temperature=0.7)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention.double().eval()


def drawn(n: int) -> list[Tensor]:
    return [torch.randn(2, heads, n, WIDTH, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


def context(n: int, causal: bool) -> Context:
    tokens = side(n, torch.device("cpu"))
    return Context(causal=causal, queries=tokens, keys=tokens)


def by_group(attention: LearnedBlocks, causal: bool, k: Tensor, head: int) -> Tensor:
    """The term on the logits of one head [n n]: -inf where groups do not meet, else 0 with the gradient of the estimator."""
    n, (rows, columns, offsets) = len(k), (each[head] for each in attention.parameters())
    spans = [range(at, min(n, at + GROUP)) for at in range(0, n, GROUP)]
    means = [k[list(span)].mean(0) for span in spans]
    bias = torch.full((n, n), -torch.inf, dtype=torch.float64)
    for r, places in enumerate(spans):
        asked = means[r] if not causal else means[r - 1] if r else torch.zeros(WIDTH, dtype=torch.float64)
        others = [c for c in range(len(spans)) if (c < r if causal else c != r)]
        scores = {
            c: (asked @ rows) @ (means[c] @ columns) / WIDTH**0.5 + offsets[max(-8, min(8, c - r)) + 8] for c in others
        }
        ranked = sorted(others, key=lambda c: -scores[c].item())
        kept, left = ranked[: attention.keep - 1], ranked[attention.keep - 1 :]
        gates = {c: torch.zeros((), dtype=torch.float64) for c in (r, *kept)}
        if left and kept:
            middle = (scores[kept[-1]] + scores[left[0]]).detach() / 2
            for c in kept:
                soft = torch.sigmoid((scores[c] - middle) / attention.temperature)
                gates[c] = (1 + soft - soft.detach()).log()
        for i in places:
            for c, gate in gates.items():
                for j in spans[c]:
                    if j <= i or not causal:
                        bias[i, j] = gate
    return bias


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 6, 14, 31])
def test_groups_worked_out_one_by_one(n: int, keep: int, causal: bool) -> None:
    attention, (q, k, v) = built(keep, causal), drawn(n)
    got = attention(q, k, v, context(n, causal))
    terms = [by_group(attention, causal, k[b, head].detach(), head) for b in range(2) for head in range(2)]
    bias = torch.stack(terms).view(2, 2, n, n).repeat_interleave(2, dim=1)
    k_all, v_all = (x.repeat_interleave(2, dim=1) for x in (k, v))
    expected = (q @ k_all.mT / WIDTH**0.5 + bias).softmax(-1) @ v_all
    close(got, expected)
    weights = torch.randn_like(got)
    inputs = (q, k, v, *attention.parameters())
    found = (
        torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)
        for out in (got, expected)
    )
    for one, two in zip(*found, strict=True):
        close(one, two)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 3, 13])
def test_with_every_group_kept_it_is_full_attention(n: int, causal: bool) -> None:
    q, k, v = drawn(n)
    got = built(5, causal)(q, k, v, context(n, causal))
    close(got, F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))


@pytest.mark.parametrize("causal", [False, True])
def test_with_its_own_group_only_it_is_a_pattern_of_blocks(causal: bool) -> None:
    q, k, v = drawn(13)
    got = built(1, causal)(q, k, v, context(13, causal))
    close(got, af.attend(q, k, v, pattern=af.Block(GROUP), causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["rope", "alibi", "shaw", "nezha", "rope_value"])
def test_positions_are_those_of_the_tokens(position: str, causal: bool) -> None:
    n, attention = 14, built(9, causal)
    encoding = build_position(position, attention.site).double()
    for parameter in encoding.parameters():
        parameter.data.normal_()
    known = context(n, causal)
    bound = bind(encoding, verdict("learned_blocks", position, attention.site).forms, known.queries, known.keys)
    q, k, v = drawn(n)
    got = attention(q, k, v, Context(causal=causal, queries=known.queries, keys=known.keys, encoding=bound))
    close(got, af.attend(q, k, v, causal=causal, position=encoding))


def test_only_a_choice_has_a_gradient() -> None:
    scores = torch.randn(1, 1, 3, 6, dtype=torch.float64, requires_grad=True)
    allowed = torch.ones(1, 1, 3, 6, dtype=torch.bool)
    allowed[..., 1, 2:] = False  # two to choose from, two kept
    allowed[..., 2, :] = False
    chosen = choose(scores, allowed, 2, 1.0)
    assert chosen.held.sum(dim=-1).tolist() == [[[2, 2, 0]]]
    assert not chosen.gate.any()
    (grad,) = torch.autograd.grad(chosen.gate.sum(), scores)
    kept = scores[0, 0, 0].argsort(descending=True)[:2]
    assert (grad[0, 0, 0, kept] > 0).all()
    assert int((grad != 0).sum()) == 2


def test_the_network_is_trained() -> None:
    attention, (q, k, v) = built(2, False), drawn(14)
    grads = torch.autograd.grad(attention(q, k, v, context(14, False)).square().sum(), [*attention.parameters()])
    assert all(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("knob", ["group=0", "keep=-1"])
def test_sizes_below_1_are_refused(knob: str) -> None:
    with pytest.raises(SpecError, match=f"{knob}: expected greater than or equal to 1"):
        build_attention(f"learned_blocks({knob})", Site(8, 2))


def test_a_temperature_of_0_is_refused() -> None:
    with pytest.raises(SpecError, match=r"temperature=0\.0: expected greater than 0"):
        build_attention("learned_blocks(temperature=0.0)", Site(8, 2))


def test_a_second_sequence_is_refused() -> None:
    mixer = build_mixer("learned_blocks", "none", Site(8, 2))
    with pytest.raises(IncompatibleError, match="learned_blocks mixes one sequence with itself and takes no source"):
        mixer(torch.randn(1, 3, 8), source=torch.randn(1, 4, 8))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
