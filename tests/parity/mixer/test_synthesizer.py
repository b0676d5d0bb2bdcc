"""Synthesizer against the paper's equations written out entry by entry, torch's attention, and what its parts may depend on."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.synthesizer import Synthesizer
from anyformer.model.build import build_mixer
from anyformer.site import Site

DIM, HEADS, WIDTH, LONGEST = 12, 4, 3, 11
SPECS = [
    "synthesizer",
    "synthesizer(dense=factorised)",
    "synthesizer(dense=none, random=full)",
    "synthesizer(dense=none, random=factorised, rank=3)",
    "synthesizer(dense=none, random=fixed)",
    "synthesizer(dense=full, random=factorised, dot=True)",
]


def built(spec: str, *, causal: bool = False, kv_heads: int = HEADS, dropout: float = 0.0) -> Synthesizer:
    site = Site(DIM, HEADS, causal=causal, kv_heads=kv_heads, max_length=LONGEST)
    mixer = build_mixer(spec, "none", site, dropout=dropout).double().eval()
    assert isinstance(mixer, Synthesizer)
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return mixer


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, WIDTH)).transpose(-2, -3)


def score(mixer: Synthesizer, x: Tensor, h: int, i: int, j: int) -> Tensor:
    """S_ij of one head and one row [n c], from the paper."""
    parts = []
    if mixer.dense is not None:
        dense = mixer.dense
        token = torch.relu(x[i] @ dense.hidden.weight.T + dense.hidden.bias)[h * WIDTH : (h + 1) * WIDTH]
        vectors = [token @ w[h] + b[h] for w, b in zip(dense.out, dense.out_bias, strict=True)]
        # 11 places as 3 times 4
        parts.append(vectors[0][j] if len(vectors) == 1 else vectors[0][j // 4] * vectors[1][j % 4])
    if mixer.random is not None:
        tables = list(mixer.random.table)
        parts.append(tables[0][h, i, j] if len(tables) == 1 else tables[0][h, i] @ tables[1][h, j])
    if mixer.q is not None and mixer.k is not None:
        part = slice(h * WIDTH, (h + 1) * WIDTH)
        parts.append(mixer.q(x[i])[part] @ mixer.k(x[j])[part] * WIDTH**-0.5)
    shares = torch.ones(1).double() if mixer.shares is None else mixer.shares.exp() / mixer.shares.exp().sum()
    return sum((share * part for share, part in zip(shares, parts, strict=True)), torch.zeros(()).double())


def written_out(mixer: Synthesizer, x: Tensor, lengths: list[int], *, causal: bool) -> Tensor:
    rows = []
    for row, length in zip(x, lengths, strict=True):
        v, out = heads(mixer.v(row), HEADS), []
        for i in range(length):
            seen = range(i + 1 if causal else length)
            each = []
            for h in range(HEADS):
                weights = torch.softmax(torch.stack([score(mixer, row, h, i, j) for j in seen]), dim=0)
                each.append(weights @ v[h, : len(seen)])
            out.append(mixer.o(torch.cat(each)))
        out += [torch.zeros(DIM).double()] * (len(row) - length)
        rows.append(torch.stack(out))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_equation_written_out(spec: str, causal: bool) -> None:
    mixer, x = built(spec, causal=causal), torch.randn(2, 7, DIM, dtype=torch.float64)
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    weights = torch.randn_like(x)
    grads = []
    for run in (lambda x: mixer(x, attention_mask=keep), lambda x: written_out(mixer, x, [7, 4], causal=causal)):
        mixer.zero_grad()
        x = x.detach().requires_grad_()
        out = run(x)
        (out * weights).sum().backward()
        grads.append([out, x.grad, *(weight.grad for weight in mixer.parameters() if weight.requires_grad)])
    for got, expected in zip(*grads, strict=True):
        close(got, expected)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_with_the_whole_share_on_products_it_is_full_attention(causal: bool, kv_heads: int) -> None:
    mixer = built("synthesizer(dense=full, random=full, dot=True)", causal=causal, kv_heads=kv_heads)
    assert mixer.shares is not None
    assert mixer.q is not None
    assert mixer.k is not None
    mixer.shares.data.copy_(torch.tensor([-80.0, -80.0, 0.0]))
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    q, k, v = heads(mixer.q(x), HEADS), heads(mixer.k(x), kv_heads), heads(mixer.v(x), kv_heads)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    close(mixer(x), mixer.o(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("spec", SPECS)
def test_with_scores_of_zero_it_is_the_mean_of_the_real_values(spec: str) -> None:
    mixer, x = built(spec), torch.randn(2, 7, DIM, dtype=torch.float64)
    for part in (mixer.dense, mixer.random, mixer.q):
        if part is not None:
            for weight in part.parameters():
                weight.data.zero_()
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    out = mixer(x, attention_mask=keep)
    for row, length in ((0, 7), (1, 4)):
        close(out[row, :length], mixer.o(mixer.v(x[row, :length]).mean(0)).expand(length, -1))


def test_random_scores_depend_on_nothing_and_dense_ones_on_their_token_only() -> None:
    one, other = torch.randn(2, 1, 7, DIM, dtype=torch.float64)
    places = torch.arange(7)[None]
    for spec in ("synthesizer(dense=none, random=full)", "synthesizer(dense=none, random=factorised)"):
        mixer = built(spec)
        assert torch.equal(mixer.logits(one, None, places, 7), mixer.logits(other, None, places, 7))
    for spec in ("synthesizer", "synthesizer(dense=factorised)"):
        mixer = built(spec)
        mixed = torch.cat([one[:, :3], other[:, 3:]], dim=1)
        scores = [mixer.logits(x, None, places, 7) for x in (one, other, mixed)]
        assert not torch.allclose(scores[0], scores[1], atol=1e-3)
        close(scores[2], torch.cat([scores[0][:, :, :3], scores[1][:, :, 3:]], dim=2))


def test_fixed_scores_get_no_gradient_and_are_saved() -> None:
    mixer = built("synthesizer(dense=none, random=fixed)")
    mixer(torch.randn(1, 5, DIM, dtype=torch.float64)).sum().backward()
    assert mixer.random is not None
    assert mixer.random.table[0].grad is None
    assert "random.table.0" in mixer.state_dict()


def test_each_row_of_a_batch_drops_weights_of_its_own() -> None:
    mixer = built("synthesizer(dense=none, random=full)", dropout=0.5).train()
    x = torch.randn(1, 7, DIM, dtype=torch.float64).expand(2, -1, -1)
    out = mixer(x)
    assert not torch.allclose(out[0], out[1])


def test_what_it_refuses() -> None:
    site = Site(DIM, HEADS, max_length=LONGEST)
    with pytest.raises(
        SpecError, match="expected at least one part besides dot, got dense=none and random=none; use dense=full"
    ):
        build_mixer("synthesizer(dense=none)", "none", site)
    with pytest.raises(SpecError, match=r"random=none, dot; use dense=full.*for dot alone use softmax"):
        build_mixer("synthesizer(dense=none, dot=True)", "none", site)
    with pytest.raises(SpecError, match="rank=0: expected"):
        build_mixer("synthesizer(rank=0)", "none", site)
    with pytest.raises(
        SpecError, match="synthesizer was built for at most 11 tokens, got 12; build with max_length=12"
    ):
        built("synthesizer")(torch.randn(1, 12, DIM, dtype=torch.float64))
    with pytest.raises(
        IncompatibleError, match=r"synthesizer cannot use alibi.*use an encoding added at the embedding"
    ):
        build_mixer("synthesizer", "alibi", site)
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    with pytest.raises(IncompatibleError, match="mixes one sequence with itself and takes no source"):
        built("synthesizer")(x, source=x)


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
