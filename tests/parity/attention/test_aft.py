"""AFT against the paper's equation written out, the identity with a softmax over keys, and causal rows against plain ones."""

import pytest
import torch
from torch import Tensor

from anyformer.attention import aft
from anyformer.attention.aft import AFT
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer, check
from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer
from anyformer.side import side
from anyformer.site import Site

HEADS, WIDTH, LONGEST = 2, 4, 40
SPECS = ["aft(rank=3)", "aft(variant=local, window=3, rank=3)", "aft(variant=simple)", "aft(variant=conv, window=3)"]


def built(spec: str, *, causal: bool = False, kv_heads: int = HEADS) -> AFT:
    site = Site(HEADS * WIDTH, HEADS, causal=causal, kv_heads=kv_heads, max_length=LONGEST)
    attention = build_attention(spec, site).double()
    assert isinstance(attention, AFT)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight)
    return attention


def facts(n: int, *, causal: bool, keep: Tensor | None = None) -> Context:
    tokens = side(n, torch.device("cpu"), keep=keep)
    return Context(causal=causal, queries=tokens, keys=tokens)


def bias(attention: AFT, h: int, i: int, j: int) -> Tensor:
    """w_ij of one head, from the paper."""
    near = abs(i - j) < attention.window
    if attention.variant == "conv":
        return attention.bias[0][h, j - i + attention.window - 1] if near else torch.zeros(()).double()
    if attention.variant == "simple" or (attention.variant == "local" and not near):
        return torch.zeros(()).double()
    return attention.bias[0][i] @ attention.bias[1][j]


def from_the_paper(attention: AFT, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], *, causal: bool) -> Tensor:
    out = []
    for b, length in enumerate(lengths):
        heads = []
        for h in range(HEADS):
            key, value = (part[b, h // (HEADS // part.shape[1])] for part in (k, v))
            rows = []
            for i in range(q.shape[2]):
                seen = range(min(i + 1, length) if causal else length)
                weights = [torch.exp(key[j] + bias(attention, h, i, j)) for j in seen]
                total = sum(weights, torch.zeros(WIDTH).double())
                mixed = sum(
                    (weight * value[j] for weight, j in zip(weights, seen, strict=True)), torch.zeros(WIDTH).double()
                )
                rows.append(torch.sigmoid(q[b, h, i]) * mixed / total)
            heads.append(torch.stack(rows))
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_equation_written_out(spec: str, causal: bool, kv_heads: int) -> None:
    attention = built(spec, causal=causal, kv_heads=kv_heads)
    n, lengths = 19, [19, 7]
    keep = torch.arange(n) < torch.tensor(lengths)[:, None]
    parts = [torch.randn(2, heads, n, WIDTH, dtype=torch.float64) for heads in (HEADS, kv_heads, kv_heads)]
    weights = torch.randn(2, HEADS, n, WIDTH, dtype=torch.float64)
    results = []
    for run in (
        lambda *qkv: attention(*qkv, facts(n, causal=causal, keep=keep)),
        lambda *qkv: from_the_paper(attention, *qkv, lengths, causal=causal),
    ):
        attention.zero_grad()
        leaves = [part.clone().requires_grad_() for part in parts]
        out = run(*leaves) * keep[:, None, :, None]  # a row of padding holds anything
        (out * weights).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves), *(weight.grad for weight in attention.parameters())])
    for got, expected in zip(*results, strict=True):
        close(got, expected)


def test_simple_is_one_softmax_over_the_keys_of_each_channel() -> None:
    q, k, v = torch.randn(3, 2, HEADS, 9, WIDTH, dtype=torch.float64)
    expected = torch.sigmoid(q) * (torch.softmax(k, dim=2) * v).sum(dim=2, keepdim=True)
    close(built("aft(variant=simple)")(q, k, v, facts(9, causal=False)), expected)


def test_a_window_as_long_as_the_sequence_makes_local_full() -> None:
    q, k, v = torch.randn(3, 2, HEADS, 9, WIDTH, dtype=torch.float64)
    local, full = built("aft(variant=local, window=9, rank=3)"), built("aft(rank=3)")
    full.load_state_dict(local.state_dict())
    close(local(q, k, v, facts(9, causal=False)), full(q, k, v, facts(9, causal=False)))


@pytest.mark.parametrize("spec", SPECS)
def test_a_causal_row_is_the_last_row_of_its_own_past(spec: str) -> None:
    causal, plain = built(spec, causal=True), built(spec)
    plain.load_state_dict(causal.state_dict())
    q, k, v = torch.randn(3, 1, HEADS, 35, WIDTH, dtype=torch.float64)
    out = causal(q, k, v, facts(35, causal=True))
    for n in (1, 16, 17, 35):
        parts = [part[:, :, :n] for part in (q, k, v)]
        close(out[:, :, n - 1], plain(*parts, facts(n, causal=False))[:, :, -1])


@pytest.mark.parametrize("spec", SPECS)
def test_a_huge_key_of_the_future_moves_nothing_in_single_precision(spec: str) -> None:
    attention = built(spec, causal=True).float()
    q, k, v = torch.randn(3, 1, HEADS, 35, WIDTH)
    out = attention(q, k, v, facts(35, causal=True))
    for t in (3, 17, 33):
        later = torch.cat([k[:, :, : t + 1], k[:, :, t + 1 :] + 1e4], dim=2)
        assert torch.equal(attention(q, later, v, facts(35, causal=True))[:, :, : t + 1], out[:, :, : t + 1])


def test_a_bias_by_offset_enters_the_exponent() -> None:
    mixer = build_mixer("aft(variant=simple)", "alibi", Site(8, HEADS)).double().eval()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    q, k, v = (getattr(mixer, name)(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for name in "qkv")
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    weights = torch.softmax(k[:, :, None] - (slopes[:, None, None] * distance)[None, ..., None], dim=3)
    out = torch.sigmoid(q) * (weights * v[:, :, None]).sum(dim=3)
    close(mixer(x), mixer.get_submodule("o")(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["tupe", "tupe(relative=True)", "tupe(relative=True, cls=False)"])
def test_scores_of_positions_alone_enter_the_exponent(position: str, causal: bool) -> None:
    mixer = build_mixer("aft(variant=simple)", position, Site(8, HEADS, causal=causal, kv_heads=1)).double().eval()
    for weight in mixer.position.parameters():
        torch.nn.init.normal_(weight)
    x, places, heads = torch.randn(1, 6, 8, dtype=torch.float64), torch.arange(6), torch.arange(HEADS)
    q, k, v = (getattr(mixer, name)(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for name in "qkv")
    empty = torch.zeros(1, HEADS, 6, WIDTH, dtype=torch.float64)
    w = mixer.position.score(empty, empty, places[None], places[None])
    if "relative" in position:
        w = w + mixer.position.bias(heads[:, None, None], places[:, None], places)
    w = w.masked_fill(places > places[:, None], -torch.inf) if causal else w
    weights = torch.softmax(k[:, :, None] + w[..., None], dim=3)
    out = torch.sigmoid(q) * (weights * v[:, :, None]).sum(dim=3)
    expected = mixer.get_submodule("o")(out.transpose(1, 2).flatten(2))
    close(mixer(x), expected)
    used = list(mixer.position.parameters())
    probe = torch.randn_like(expected)
    gradients = [torch.autograd.grad((each * probe).sum(), used) for each in (mixer(x), expected)]
    for got, right in zip(*gradients, strict=True):
        close(got, right)


@pytest.mark.parametrize("variant", ["full", "local"])
def test_more_tokens_than_it_was_built_for_are_refused(variant: str) -> None:
    part = torch.randn(1, HEADS, LONGEST + 1, WIDTH, dtype=torch.float64)
    text = (
        "aft was built for at most 40 tokens, got 41; build with max_length=41, shorten the input, or use variant=conv"
    )
    with pytest.raises(SpecError, match=text):
        built(f"aft(variant={variant})")(part, part, part, facts(LONGEST + 1, causal=False))


def test_its_rows_can_be_explained_and_its_scores_have_no_terms() -> None:
    model = Transformer(
        ModelConfig(
            vocab=7, dim=8, depth=1, heads=2, attention="aft(rank=3)", position="alibi", head="mlm", max_length=16
        )
    )
    tokens = torch.randint(7, (1, 9))
    (found,) = model.explain(tokens, [4])
    assert torch.allclose(found.sum(dim=-1), torch.ones(1), atol=1e-5)
    with pytest.raises(IncompatibleError, match="aft scores no pairs of query and key"):
        model.explain_terms(tokens, [4])


def test_what_it_refuses() -> None:
    for knob in ("variant=none", "window=0", "rank=0"):
        with pytest.raises(SpecError, match="expected"):
            build_attention(f"aft({knob})", Site(8, 2))
    for name in ("rope", "shaw", "nezha", "deberta", "transformer_xl", "xlnet", "irpe", "decomposed_rel"):
        with pytest.raises(
            IncompatibleError, match="its queries meet no keys, so there is no product to rotate or score"
        ):
            check("aft", name)
    x = torch.randn(1, 4, 8)
    with pytest.raises(IncompatibleError, match="mixes one sequence with itself and takes no source"):
        build_mixer("aft", "none", Site(8, 2))(x, source=x)


def test_rows_of_a_block_are_written_out() -> None:
    """The faster sums against the pairs, for more queries than keys as well."""
    k, v = torch.randn(2, 1, HEADS, 20, WIDTH, dtype=torch.float64)
    for n in (5, 20, 30):
        w = torch.randn(1, HEADS, n, 20, dtype=torch.float64)
        allowed = (torch.arange(20) <= torch.arange(n)[:, None] + 20 - n)[None, None]
        for given in (w, None):
            expected = aft.written_out(k, v, given, allowed)
            close(aft.averaged_causally(k, v, given, None, n), expected)
            close(aft.averaged(k, v, given, None, n), aft.written_out(k, v, given, torch.ones_like(allowed)))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
