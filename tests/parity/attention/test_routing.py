"""Routing attention against `routing_transformer`, full attention, clusters made one by one, and the loss of spherical k-means."""

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from routing_transformer.routing_transformer import KmeansAttention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anyformer.attention.routing import Routing, nearest, nearest_centroids, pull, units
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer
from anyformer.side import Side, side
from anyformer.site import Site

WIDTH, HEADS = 6, 2


def tokens(n: int, **facts: Tensor) -> Side:
    return side(n, torch.device("cpu"), **facts)


def built(clusters: int, window: int | None = None, *, causal: bool = False, kv_heads: int = HEADS) -> Routing:
    site = Site(12, HEADS, head_dim=WIDTH, kv_heads=kv_heads, causal=causal, max_length=24)
    return Routing(site, clusters=clusters, window=window).double().eval()


def drawn(n: int, count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 2, HEADS, n, WIDTH, dtype=torch.float64).unbind(0))


def both(n: int) -> Context:
    return Context(causal=False, queries=tokens(n), keys=tokens(n))


@pytest.mark.parametrize(("clusters", "window", "n"), [(1, 12, 12), (3, 5, 12), (4, 3, 12), (3, 4, 7)])
def test_equals_the_package(clusters: int, window: int, n: int) -> None:
    attention = built(clusters, window)
    peer = KmeansAttention(clusters, window, HEADS, WIDTH).double().eval()
    peer.kmeans.means.copy_(F.normalize(attention.centroids.detach(), dim=-1))
    peer.kmeans.initted.fill_(True)
    mine, theirs = ([part.clone().requires_grad_() for part in drawn(n)] for _ in range(2))
    for one, two in zip(mine, theirs, strict=True):
        two.data.copy_(one.data)
    got, expected = attention(*mine, both(n)), peer(*theirs)[0]
    times = torch.zeros(2, HEADS, n, dtype=torch.float64)
    held = nearest(mine[0].detach(), attention.centroids.detach(), None, window).slots.flatten(2)
    times.scatter_add_(2, held, torch.ones_like(held, dtype=torch.float64))
    assert clusters == 1 or (times != 1).any()
    expected = expected * (1 + 1e-5 / times.clamp(min=1))[..., None]  # the package divides by the count plus that
    close(got, expected)
    weights = torch.randn_like(got)
    for one, two in zip(
        torch.autograd.grad((got * weights).sum(), mine),
        torch.autograd.grad((expected * weights).sum(), theirs),
        strict=True,
    ):
        close(one, two)


def test_one_cluster_is_full_attention() -> None:
    q, k, v = drawn(11)
    close(built(1)(q, k, v, both(11)), F.scaled_dot_product_attention(q, k, v))


def test_without_positions_order_does_not_matter() -> None:
    attention, order = built(3), torch.randperm(11)
    q, k, v = drawn(11)
    moved = attention(*(part[:, :, order] for part in (q, k, v)), both(11))
    close(moved, attention(q, k, v, both(11))[:, :, order])


def test_a_source_of_its_own_has_windows_of_its_own() -> None:
    attention, (q, k, v) = built(3), drawn(12)
    k, v = k[:, :, :7], v[:, :, :7]
    got = attention(q, k, v, Context(causal=False, queries=tokens(12), keys=tokens(7)))
    near = [units(x) @ units(attention.centroids.detach()).mT for x in (q, k)]
    for b in range(2):
        for h in range(HEADS):
            found: dict[int, list[Tensor]] = defaultdict(list)
            for c in range(3):
                queries, keys = (near[at][b, h, :, c].argsort(descending=True)[:size] for at, size in ((0, 4), (1, 3)))
                for i in queries.tolist():
                    found[i].append((k[b, h, keys] @ q[b, h, i] / WIDTH**0.5).softmax(0) @ v[b, h, keys])
            for i in range(12):
                close(got[b, h, i], torch.stack(found[i]).mean(0) if found[i] else torch.zeros(WIDTH).double())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [3, 7, 23])
def test_causal_clusters_made_one_by_one(n: int, packed: bool) -> None:
    attention = built(3, 3, causal=True, kv_heads=1)
    documents = (torch.arange(n)[None] // 9) if packed else torch.zeros(1, n, dtype=torch.int64)
    row = tokens(n, documents=documents) if packed else tokens(n)
    q = torch.randn(1, HEADS, n, WIDTH, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 1, n, WIDTH, dtype=torch.float64, requires_grad=True)
    got = attention(q, q, v, Context(causal=True, queries=row, keys=row))
    rows = []
    for head in range(HEADS):
        members = defaultdict(list)
        units = F.normalize(attention.centroids[head].detach(), dim=-1)
        for i in range(n):
            held = members[int(documents[0, i]), int((units @ q[0, head, i].detach()).argmax())]
            seen = held[max(0, len(held) // 3 - 1) * 3 :] or [i]
            k = q[0, head, seen]
            rows.append(((k @ q[0, head, i]) / k.norm(dim=-1)).softmax(0) @ v[0, 0, seen])
            held.append(i)
    expected = torch.stack(rows).view(1, HEADS, n, WIDTH)
    close(got, expected)
    weights = torch.randn_like(got)
    for one, two in zip(*(torch.autograd.grad((x * weights).sum(), (q, v)) for x in (got, expected)), strict=True):
        close(one, two)


@pytest.mark.parametrize("causal", [False, True])
def test_in_training_centroids_have_the_gradient_of_k_means(causal: bool) -> None:
    attention = built(3, causal=causal).train()
    q, k, v = drawn(9)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    row = tokens(9, keep=keep)
    given = Context(causal=causal, queries=row, keys=row)
    k = q if causal else k
    real = [x.transpose(1, 2)[keep].transpose(0, 1) for x in ((q,) if causal else (q, k))]  # [h tokens d]
    cosine = F.cosine_similarity(torch.cat(real, dim=1)[:, :, None], attention.centroids[:, None], dim=-1)
    (expected,) = torch.autograd.grad((1 - cosine.amax(dim=-1)).mean(dim=1).sum(), attention.centroids)
    for factor in (1.0, 100.0):  # whatever the loss
        (got,) = torch.autograd.grad(factor * attention(q, k, v, given).sum(), attention.centroids)
        close(got, expected)
    v.requires_grad_()
    (got,) = torch.autograd.grad(
        checkpoint(attention, q, k, v, given, use_reentrant=False).sum(), attention.centroids
    )  # computed twice, added once
    close(got, expected)
    assert torch.equal(attention(q, k, v, given), attention.eval()(q, k, v, given))
    assert torch.autograd.grad(attention(q, k, v, given).sum(), attention.centroids, allow_unused=True) == (None,)


def test_centroids_find_the_clusters() -> None:
    centres = F.normalize(torch.tensor([[3.0, 1, 0], [-1, 2, 0], [0, -1, 4]]), dim=-1)
    x = F.normalize(centres.repeat(40, 1) + 0.05 * torch.randn(120, 3), dim=-1)[None, None].double()
    centroids = (centres + 0.5 * torch.randn(3, 3))[None].double()
    for _ in range(300):
        found = nearest_centroids(x, centroids, summed=True)
        centroids -= 0.3 * pull(found.sums, found.tokens, centroids)
    assert (F.normalize(centroids[0], dim=-1) * centres).sum(-1).min() > 0.999


@pytest.mark.parametrize(
    ("spec", "message"),
    [("routing(0)", "clusters=0: expected greater than or equal to 1"), ("routing(4, window=-1)", "window=-1")],
)
def test_bad_knobs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_attention(spec, Site(8, 2))


def test_causal_routing_refuses_a_second_sequence() -> None:
    mixer = build_mixer("routing", "none", Site(8, 2, causal=True))
    with pytest.raises(IncompatibleError, match="routing mixes one sequence with itself and takes no source"):
        mixer(torch.randn(1, 3, 8), source=torch.randn(1, 4, 8))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
