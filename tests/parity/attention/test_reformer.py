"""Reformer against `reformer_pytorch` and Hugging Face where one bucket holds all, and against sets of pairs found one by one."""

import warnings
from collections import defaultdict

import pytest
import torch
from torch import Tensor
from transformers.models.reformer.configuration_reformer import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

import anyformer as af
from anyformer.attention import _chunks
from anyformer.attention._chunks import attend_chunks, cut, meets
from anyformer.attention.reformer import Reformer, hashed, sizes
from anyformer.context import Context, Encoding
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer, build_position, verdict
from anyformer.position.bind import bind
from anyformer.side import Side, side
from anyformer.site import Site

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from reformer_pytorch.reformer_pytorch import FullQKAttention, LSHAttention

WIDTH, HEADS = 6, 2


def tokens(n: int, **facts: Tensor) -> Side:
    return side(n, torch.device("cpu"), **facts)


def built(causal: bool = False, bucket: int = 3, rounds: int = 3, kv_heads: int = HEADS) -> Reformer:
    site = Site(12, HEADS, head_dim=WIDTH, kv_heads=kv_heads, causal=causal, max_length=24)
    return Reformer(site, bucket=bucket, rounds=rounds).double()


def one_bucket(causal: bool, n: int) -> Reformer:
    attention = built(causal, bucket=n, rounds=1)
    attention.rows.zero_()
    return attention


def drawn(n: int, count: int = 2) -> list[Tensor]:
    return list(torch.randn(count, 2, HEADS, n, WIDTH, dtype=torch.float64).unbind(0))


def unscaled(n: int) -> Encoding:
    """The package divides the product with a key of length 1 by sqrt(d) once more."""
    return Encoding(scale=1 / WIDTH)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("peer", [FullQKAttention, LSHAttention])
def test_in_one_bucket_it_equals_the_package(peer: type, causal: bool) -> None:
    n = 10
    more = {"bucket_size": n // 2, "n_hashes": 1} if peer is LSHAttention else {}
    other = peer(causal=causal, **more)
    mine, theirs = ([part.clone().requires_grad_() for part in drawn(n)] for _ in range(2))
    for one, two in zip(mine, theirs, strict=True):
        two.data.copy_(one.data)
    weights = torch.randn(2, HEADS, n, WIDTH, dtype=torch.float64)
    given = Context(causal=causal, queries=tokens(n), keys=tokens(n), encoding=unscaled(n))
    got = one_bucket(causal, n)(mine[0], mine[0], mine[1], given)
    expected = other(*(part.flatten(0, 1) for part in theirs))[0].unflatten(0, (2, HEADS))
    found, right = (
        torch.autograd.grad((out * weights).sum(), inputs) for out, inputs in ((got, mine), (expected, theirs))
    )
    for one, two in zip((got, *found), (expected, *right), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=2e-6)  # the package hashes in float32


@pytest.mark.parametrize("causal", [False, True])
def test_in_one_bucket_it_equals_hugging_face(causal: bool) -> None:
    n, dim = 8, HEADS * WIDTH
    config = ReformerConfig(
        num_hashes=1,
        lsh_attn_chunk_length=n // 2,
        num_buckets=2,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        hidden_size=dim,
        num_attention_heads=HEADS,
        attention_head_size=WIDTH,
        is_decoder=causal,
        lsh_attention_probs_dropout_prob=0.0,
    )
    peer = LSHSelfAttention(config, 0).eval()
    layer = build_mixer(f"reformer(bucket={n}, rounds=1)", "none", Site(dim, HEADS, causal=causal), bias=False)
    layer.get_buffer("attention.rows").zero_()
    peer.query_key.weight.data.copy_(layer.get_parameter("q.weight"))
    peer.value.weight.data.copy_(layer.get_parameter("v.weight"))
    layer.get_parameter("o.weight").data.copy_(torch.eye(dim))
    x = torch.randn(2, n, dim)
    assert torch.allclose(layer(x), peer(x).hidden_states, rtol=0, atol=2e-6)


def met(attention: Reformer, q: Tensor, causal: bool, documents: list[int]) -> list[list[set[int]]]:
    """The slots that each token of the only row reads, by head: chunks of each bucket made token by token."""
    buckets = hashed(q, attention.rows, attention.sizes)[0].tolist()
    n, found = q.shape[2], []
    for head in range(HEADS):
        sets: list[set[int]] = [set() for _ in range(n)]
        for at in range(attention.rounds):
            members = defaultdict(list)
            for j in range(n):
                members[documents[j], buckets[head][at][j]].append(j)
            for held in members.values():
                for rank, i in enumerate(held):
                    mine = rank // attention.bucket
                    seen = held[max(0, mine - 1) * attention.bucket : (mine + 1) * attention.bucket]
                    sets[i] |= {j for j in seen if (j < i if causal else j != i)}
        found.append([each or {i} for i, each in enumerate(sets)])
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [2, 6, 7, 23])
def test_sets_of_pairs_found_one_by_one(n: int, causal: bool, packed: bool) -> None:
    attention = built(causal, kv_heads=1)
    documents = torch.arange(n)[None] // 9 if packed else torch.zeros(1, n, dtype=torch.int64)
    row = tokens(n, documents=documents) if packed else tokens(n)
    q = torch.randn(1, HEADS, n, WIDTH, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 1, n, WIDTH, dtype=torch.float64, requires_grad=True)
    got = attention(q, q, v, Context(causal=causal, queries=row, keys=row))
    rows = []
    for head, sets in enumerate(met(attention, q, causal, documents[0].tolist())):
        for i, seen in enumerate(sets):
            slots = sorted(seen)
            k = q[0, head, slots]
            logits = (k @ q[0, head, i]) / k.norm(dim=-1)
            rows.append(logits.softmax(0) @ v[0, 0, slots])
    expected = torch.stack(rows).view(1, HEADS, n, WIDTH)
    close(got, expected)
    weights = torch.randn_like(got)
    for one, two in zip(*(torch.autograd.grad((x * weights).sum(), (q, v)) for x in (got, expected)), strict=True):
        close(one, two)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "position", ["rope", "alibi", "t5", "shaw", "nezha", "deberta", "transformer_xl", "rope_value"]
)
def test_chunks_equal_all_pairs_with_every_form_of_position(position: str, causal: bool) -> None:
    n, attention = 19, built(causal)
    site = attention.site
    encoding = build_position(position, site).double()
    for parameter in encoding.parameters():
        parameter.data.normal_()
    forms = verdict("reformer", position, site).forms
    keep = torch.arange(n) < torch.tensor([[n], [11]])
    row = tokens(n, keep=keep)
    q, v = (part.requires_grad_() for part in drawn(n))
    given = Context(causal=causal, queries=row, keys=row, encoding=bind(encoding, forms, row, row))
    chunks = attention(q, q, v, given)
    found = []
    for out in (chunks, by_all_pairs(attention, q, v, given)):
        real = out * keep[:, None, :, None]
        found.append([real, *torch.autograd.grad(real.square().sum(), (q, v, *encoding.parameters()))])
    for one, two in zip(*found, strict=True):
        close(one, two)


def by_all_pairs(attention: Reformer, q: Tensor, v: Tensor, given: Context) -> Tensor:
    """The same through a cache that holds all tokens, where every pair is looked at."""
    cached = Context(
        causal=given.causal,
        queries=given.queries,
        keys=given.keys,
        encoding=given.encoding,
        cache=af.MultiHead(12, HEADS, causal=True).new_cache(2),
    )
    return attention(q, q, v, cached)


def test_what_comes_later_moves_no_chunk() -> None:
    def pairs(buckets: Tensor, n: int, keep: Tensor | None = None) -> Tensor:
        number = cut(buckets, keep, 4)[1]
        return meets(number[..., :n, None], number[..., None, :n])

    buckets = torch.randint(3, (1, 1, 2, 40))
    for n in (1, 13, 39):
        other = torch.cat([buckets[..., :n], torch.randint(3, (1, 1, 2, 40 - n))], dim=-1)
        keep = (torch.arange(40) < n)[None]
        assert torch.equal(pairs(other, n), pairs(buckets, n))
        assert torch.equal(pairs(other, n, keep), pairs(buckets, n))
        padded = cut(other, keep, 4)[1]
        assert not meets(padded[..., None], padded[..., None, :])[..., n:].any()


def test_rounds_computed_again_have_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, n = built(), 23
    q, v = (part.requires_grad_() for part in drawn(n))
    given = Context(causal=False, queries=tokens(n), keys=tokens(n))
    found = []
    for held in (2**24, 0):
        monkeypatch.setattr(_chunks, "_HELD", held)
        found.append(torch.autograd.grad(attention(q, q, v, given).square().sum(), (q, v)))
    for one, two in zip(*found, strict=True):
        close(one, two)


def test_with_every_pair_in_reach_rounds_change_nothing() -> None:
    q, v = drawn(9)
    row = tokens(9)
    given = Context(causal=False, queries=row, keys=row)
    alike = torch.zeros(2, HEADS, 4, 9, dtype=torch.int64)
    outs = []
    for rounds in (1, 4):
        order, chunk = cut(alike[:, :, :rounds], None, 9)
        outs.append(attend_chunks(q, q, v, order, chunk, given, WIDTH**-0.5, 9))
    close(outs[1], outs[0])


def test_a_token_alone_in_its_buckets_reads_itself() -> None:
    attention, n = built(rounds=1), 7
    q, v = drawn(n)
    row = tokens(n)
    buckets = torch.tensor([0, 1, 1, 1, 1, 1, 1]).expand(2, HEADS, 1, n)
    order, chunk = cut(buckets, None, attention.bucket)
    out = attend_chunks(
        q, q, v, order, chunk, Context(causal=False, queries=row, keys=row), WIDTH**-0.5, attention.bucket
    )
    close(out[:, :, 0], v[:, :, 0])
    assert not torch.allclose(out[:, :, 1], v[:, :, 1])


@pytest.mark.parametrize(
    ("buckets", "found"), [(2, (2,)), (64, (64,)), (66, (10, 8)), (256, (16, 16)), (2048, (46, 46))]
)
def test_many_buckets_are_named_by_two_hashes(buckets: int, found: tuple[int, ...]) -> None:
    assert sizes(buckets) == found
    x = torch.randn(1, 1, 4000, 16, dtype=torch.float64)
    named = hashed(x, torch.randn(1, 1, sum(found) // 2, 16, dtype=torch.float64), found)
    assert 0 <= int(named.min()) <= int(named.max()) < max(buckets, found[0] * found[-1])


def test_hashes_are_a_function_of_the_seed() -> None:
    rows = [Reformer(Site(12, 2, seed=seed, layer=layer)).rows for seed, layer in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[3])
    assert "rows" in dict(Reformer(Site(12, 2)).named_buffers())


def test_keys_have_no_projection() -> None:
    names = dict(build_mixer("reformer", "none", Site(12, 2, kv_heads=1), qk_norm=True).named_parameters())
    assert not [name for name in names if name.startswith("k")]


def test_bad_knobs_and_a_second_sequence_are_refused() -> None:
    for spec, knob in (("reformer(bucket=0)", "bucket=0"), ("reformer(rounds=-1)", "rounds=-1")):
        with pytest.raises(SpecError, match=f"{knob}: expected greater than or equal to 1"):
            build_attention(spec, Site(8, 2))
    with pytest.raises(IncompatibleError, match="reformer mixes one sequence with itself and takes no source"):
        build_mixer("reformer", "none", Site(8, 2))(torch.randn(1, 3, 8), source=torch.randn(1, 4, 8))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
