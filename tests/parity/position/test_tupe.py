"""TUPE against the equation written out, its identities, and all its forms against one another."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyformer as af
from anyformer.position.base import Position

H, D, C = 3, 4, 12
SPECS = ["tupe", "tupe(cls=False)", "tupe(relative=True)", "tupe(relative=True, cls=False, buckets=8, max_distance=9)"]


def built(spec: str, *, causal: bool = False, kv_heads: int = H) -> Position:
    position = af.build_position(spec, af.Site(C, H, causal=causal, kv_heads=kv_heads, max_length=20)).double()
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    return position


def states(n: int = 5, m: int = 7) -> list[Tensor]:
    return [torch.randn(2, H, size, D, dtype=torch.float64, requires_grad=True) for size in (n, m, m)]


def plane(position: Position) -> Tensor:
    """P of every pair of positions, `[h 20 20]`: the table with a row before position 0, its first two scores the untied ones."""
    rows = F.layer_norm(position.table, (C,), position.norm.weight, position.norm.bias)
    queries, keys = (
        layer(rows).unflatten(-1, (H, D)).transpose(0, 1) for layer in (position.query, position.key)
    )  # [h rows d]
    scores = queries @ keys.mT
    if not position.cls:
        return scores
    of_class, to_class = scores[:, 0, 0], scores[:, 1, 1]
    inner = scores[:, 1:, 1:]
    inner = torch.cat([to_class[:, None, None].expand(H, 20, 1), inner[:, :, 1:]], dim=2)
    return torch.cat([of_class[:, None, None].expand(H, 1, 20), inner[:, 1:]], dim=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_outputs_and_gradients_are_the_equation(spec: str, causal: bool) -> None:
    position, (q, k, v) = built(spec, causal=causal), states(7, 7)
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [3, 0, 9, 2, 19, 4, 8]])
    logits = q @ k.mT / (2 * D) ** 0.5
    logits = logits + (plane(position) / (2 * D) ** 0.5)[:, places[:, :, None], places[:, None]].transpose(0, 1)
    if position.by_bucket is not None:
        offset = places[:, None, :] - places[:, :, None]
        half = af.build_position(
            f"t5(buckets={len(position.by_bucket) - 2 * position.cls}, max_distance={128 if position.cls else 9})",
            af.Site(C, H, causal=causal),
        )
        rows = half.bucket(offset)
        if position.cls:
            rows = rows.masked_fill(places[:, None, :] == 0, 32).masked_fill(places[:, :, None] == 0, 33)
        logits = logits + position.by_bucket[rows].movedim(-1, 1)
    if causal:
        logits = logits + torch.full((7, 7), -torch.inf).triu(1)
    expected = logits.softmax(-1) @ v
    ours = af.attend(q, k, v, causal=causal, position=position, q_positions=places, k_positions=places)
    probe, weights = torch.randn_like(v), [q, k, v, *position.parameters()]
    gradients = [torch.autograd.grad((out * probe).sum(), weights, retain_graph=True) for out in (ours, expected)]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


@torch.no_grad()
def test_positions_are_more_words() -> None:
    """Without a class token it is attention over words beside positions, with the factor of the double width."""
    position, (q, k, v) = built("tupe(cls=False)"), states()
    q_pos, k_pos = torch.randperm(20)[None, :5], torch.randperm(20)[None, :7]
    rows = position.norm(position.table)
    queries, keys = (
        layer(rows[positions[0]]).unflatten(-1, (H, D)).transpose(0, 1).expand(2, -1, -1, -1)
        for layer, positions in ((position.query, q_pos), (position.key, k_pos))
    )
    beside = F.scaled_dot_product_attention(torch.cat([q, queries], -1), torch.cat([k, keys], -1), v)
    ours = af.attend(q, k, v, position=position, q_positions=q_pos, k_positions=k_pos)
    torch.testing.assert_close(ours, beside, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_class_token_does_not_see_where_others_are() -> None:
    position, (q, k, _) = built("tupe"), states(20, 20)
    places = torch.arange(20)[None]
    scores = position.score(q, k, places, places)[0]
    assert torch.equal(scores[:, 0], scores[:, 0, :1].expand(H, 20))
    assert torch.equal(scores[:, 1:, 0], scores[:, 1:2, 0].expand(H, 19))
    assert float((scores[:, 0, 0] - scores[:, 1, 0]).abs().min()) > 1e-6
    assert max(int(torch.linalg.matrix_rank(each)) for each in scores) <= D + 2
    assert int(torch.linalg.matrix_rank(scores[0, 1:, 1:])) == D


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_tokens_permuted_with_their_positions(spec: str) -> None:
    position, (q, k, v) = built(spec), states(6, 6)
    places, order = torch.arange(6)[None], torch.tensor([3, 0, 5, 1, 4, 2])
    plain = af.attend(q, k, v, position=position)
    moved = af.attend(
        *(part[:, :, order] for part in (q, k, v)),
        position=position, q_positions=places[:, order], k_positions=places[:, order],
    )  # fmt: skip
    torch.testing.assert_close(moved, plain[:, :, order], rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("spec", ["tupe", "tupe(cls=False)"])
def test_columns_are_the_score(spec: str, kv_heads: int) -> None:
    position, (q, k, _) = built(spec, kv_heads=kv_heads), states()
    k = k[:, :kv_heads]
    q_pos, k_pos = torch.tensor([[0, 1, 5, 2, 0], [7, 0, 1, 3, 4]]), torch.tensor([[3, 0, 2, 1, 0, 8, 19]])
    wide_q, wide_k = position.augment(q, k, q_pos, k_pos)
    repeated = k.repeat_interleave(H // kv_heads, dim=1)
    score = position.score(q, repeated, q_pos, k_pos)
    assert wide_q.shape[-1] == wide_k.shape[-1] == 2 * D + 2 * position.cls
    torch.testing.assert_close(
        (wide_q @ wide_k.mT) * position.scale(D), (q @ repeated.mT) * position.scale(D) + score, rtol=0, atol=1e-12
    )


def test_the_bias_by_offset_is_the_bias() -> None:
    position = built(SPECS[3])
    expected = position.bias(torch.arange(H)[:, None], torch.tensor(15), 15 + torch.arange(-14, 5))
    assert torch.equal(position.offsets(-14, 4), expected)


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_absolute_and_ends_with_its_table(spec: str) -> None:
    layer = af.MultiHead(C, H, position=spec, max_length=20).double()
    for parameter in layer.position.parameters():
        nn.init.normal_(parameter)
    x, places = torch.randn(1, 5, C, dtype=torch.float64), torch.arange(5)[None]
    assert not layer.position.relative
    assert float((layer(x, positions=places + 7) - layer(x, positions=places)).abs().max()) > 1e-3
    with pytest.raises(af.SpecError, match="tupe: position 20 needs a table of at least 21 rows, this one has 20"):
        layer(x, positions=places + 16)
    with pytest.raises(af.SpecError, match="tupe: expected positions from 0, got -1"):
        layer(x, positions=places - 1)
