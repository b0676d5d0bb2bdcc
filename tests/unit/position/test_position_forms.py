"""Every form of a term says the same: grids, gathers and single pairs; tables, columns and scores."""

import math

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.forms import Form
from anyformer.ops.offset_waves import cheap_span
from anyformer.position.base import Position
from anyformer.registry import names

SITE = af.Site(24, 6)
BIASED = [
    "alibi",
    "t5",
    "t5(buckets=8, max_distance=10)",
    "kerple",
    "kerple(kind=power)",
    "sandwich",
    "tupe(relative=True, cls=False)",
]


def built(spec: str, *, causal: bool = False, site: af.Site | None = None) -> Position:
    site = site or af.Site(24, 6, causal=causal)
    return af.build_position(spec, site).double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", BIASED)
def test_bias_agrees_on_grids_gathers_and_single_pairs(spec: str, causal: bool) -> None:
    position = built(spec, causal=causal)
    head, q_pos, k_pos = torch.arange(6), torch.randint(0, 300, (2, 5)), torch.randint(0, 300, (2, 7))
    grid = position.bias(head[:, None, None], q_pos[:, None, :, None], k_pos[:, None, None, :])
    assert grid.shape == (2, 6, 5, 7)
    picked = torch.randint(0, 7, (2, 6, 5))
    gathered = position.bias(head[:, None], q_pos[:, None], k_pos[:, None].expand(2, 6, 7).gather(2, picked))
    assert torch.equal(gathered, grid.gather(3, picked[..., None])[..., 0])
    for index in ((0, 0, 0, 0), (1, 5, 4, 6), (1, 2, 3, 4)):
        b, h, i, j = index
        assert torch.equal(position.bias(head[h], q_pos[b, i], k_pos[b, j]), grid[index])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", BIASED)
def test_offsets_are_the_bias(spec: str, causal: bool) -> None:
    position = built(spec, causal=causal)
    table = position.offsets(-130, 140)
    here = torch.tensor(1000)
    expected = position.bias(torch.arange(6)[:, None], here, here + torch.arange(-130, 141))
    assert torch.equal(table, expected)


def test_what_is_apart_reads_nothing_of_query_and_key() -> None:
    found = []
    for name in names("position"):
        position = built(name, causal=True)
        if any(Form.APART in term for term in position.forms):
            found.append(name)
            places, others = torch.arange(5)[None], torch.arange(7)[None]
            scores = [position.score(*states(), places, others) for _ in range(2)]
            assert torch.equal(*scores)
            filled = position.score(*(x * torch.nan for x in states()), places, others)
            assert torch.equal(filled, scores[0])
    assert found == ["tupe"]


def test_alibi_rates_are_the_bias() -> None:
    position = built("alibi")
    faded = torch.exp(-position.rates()[:, None] * 5)
    bias = position.bias(torch.arange(6)[:, None], torch.tensor([9]), torch.tensor([4]))
    torch.testing.assert_close(faded, bias.exp(), rtol=1e-14, atol=0)
    assert position.rates().tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def states(n: int = 5, m: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, n, 4, dtype=torch.float64), torch.randn(2, 6, m, 4, dtype=torch.float64)


def test_shaw_score_and_value_are_the_written_out_sums() -> None:
    """Against the paper's form, with a vector for every pair."""
    position = built("shaw(left=2, right=3)")
    q, k = states()
    q_pos, k_pos = torch.randint(0, 9, (2, 5)), torch.randint(0, 9, (1, 7))
    row = (k_pos[:, None, :] - q_pos[:, :, None]).clamp(-2, 3) + 2
    by_pair = torch.einsum("bhnd,bnmd->bhnm", q, position.key_table[row]) * 4**-0.5
    torch.testing.assert_close(position.score(q, k, q_pos, k_pos), by_pair, rtol=0, atol=1e-12)
    weights = torch.rand(2, 6, 5, 7, dtype=torch.float64)
    summed = torch.einsum("bhnm,bnmd->bhnd", weights, position.value_table[row])
    torch.testing.assert_close(position.value(weights, q_pos, k_pos), summed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["shaw(left=2, right=3)", "transformer_xl"])
def test_tables_by_offset_are_the_score(spec: str) -> None:
    position = built(spec)
    q, k = states()
    index = torch.arange(7) - torch.arange(5)[:, None] + 4  # [n m]
    tables = position.tables(-4, 6)
    asked = q if tables.shift is None else q + tables.shift[:, None]
    looked_up = torch.einsum("bhnd,hnmd->bhnm", asked, tables.keys[:, index]) * 0.5
    if tables.shift is not None:
        looked_up = looked_up + torch.einsum("hd,bhmd->bhm", tables.shift, k)[:, :, None] * 0.5
    if tables.bias is not None:
        looked_up = looked_up + tables.bias[:, index]
    score = position.score(q, k, torch.arange(5)[None], torch.arange(7)[None])
    torch.testing.assert_close(score, looked_up, rtol=0, atol=1e-11)


@pytest.mark.parametrize("spread", [1, 100_000])
def test_transformer_xl_columns_are_the_score(spread: int) -> None:
    """Near positions go by offset, scattered ones by the identity; both are the equation written out pair by pair."""
    position = built("transformer_xl")
    for bias in (position.u, position.v):
        torch.nn.init.normal_(bias)
    q, k = states()
    q_pos, k_pos = torch.randint(0, 9, (2, 5)) * spread, torch.randint(0, 9, (1, 7)) * spread
    scores = position.score(q, k, q_pos, k_pos)
    angles = (q_pos[:, :, None] - k_pos[:, None, :])[..., None] * 10000.0 ** (-torch.arange(0, 24, 2).double() / 24)
    keys = torch.cat([angles.sin(), angles.cos()], dim=-1) @ position.w.weight.mT
    placed = torch.einsum("bhnd,bnmhd->bhnm", q + position.v[:, None], keys.unflatten(-1, (6, 4)))
    content = torch.einsum("hd,bhmd->bhm", position.u, k)[:, :, None]
    torch.testing.assert_close(scores, (placed + content) / 2, rtol=0, atol=1e-9)
    wide_q, wide_k = position.augment(q, k, q_pos, k_pos)
    torch.testing.assert_close(wide_q @ wide_k.mT / 2, q @ k.mT / 2 + scores, rtol=0, atol=1e-9)


def test_sinusoids_of_the_offset_take_the_cheaper_way() -> None:
    x, near = torch.randn(2, 6, 40, 4), torch.arange(40)[None]
    assert cheap_span(x, 64, near + 10**6, near + 10**6) == (-39, 39)
    assert cheap_span(x, 64, near * 1000, near * 1000) is None
    assert cheap_span(x[:1, :, :1], 64, near[:, -1:], near) is None


@pytest.mark.parametrize("width", [1, 2, 3, 15, 16])
@pytest.mark.parametrize("layout", ["paper", "concat", "t2t"])
def test_sinusoids_fill_any_width(layout: str, width: int) -> None:
    position = af.build_position(f"sinusoidal(layout={layout}, scale_tokens=False)", af.Site(width, 1))
    out = position.embed(torch.zeros(1, 5, width), torch.arange(5)[None], None)
    assert out.shape == (1, 5, width)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_sinusoids_of_the_paper_channel_by_channel(width: int) -> None:
    position = af.build_position("sinusoidal(base=100, scale_tokens=False)", af.Site(width, 1))
    out = position.embed(torch.zeros(1, 4, width, dtype=torch.float64), torch.tensor([[0, 1, 9, 10**6]]), None)[0]
    for row, place in enumerate((0, 1, 9, 10**6)):
        for channel in range(width):
            wave = math.sin if channel % 2 == 0 else math.cos
            angle = place * 100.0 ** (-2 * (channel // 2) / width)
            assert abs(float(out[row, channel]) - wave(angle)) < 1e-9


def test_paper_and_concat_hold_the_same_waves() -> None:
    x, places = torch.zeros(1, 9, 14, dtype=torch.float64), torch.arange(9)[None]
    paper, concat = (
        af.build_position(f"sinusoidal(layout={layout})", af.Site(14, 1)).embed(x, places, None)
        for layout in ("paper", "concat")
    )
    assert torch.equal(paper[..., 0::2], concat[..., :7])
    assert torch.equal(paper[..., 1::2], concat[..., 7:])


def test_a_product_of_sinusoids_depends_on_the_offset_only() -> None:
    position = af.build_position("sinusoidal", af.Site(32, 1))
    far = torch.tensor([[0, 5, 10**6, 10**6 + 5]])
    code = position.embed(torch.zeros(1, 4, 32, dtype=torch.float64), far, None)[0]
    torch.testing.assert_close(code[0] @ code[1], code[2] @ code[3], rtol=0, atol=1e-9)
    torch.testing.assert_close(code.square().sum(-1), torch.full((4,), 16.0, dtype=torch.float64), rtol=0, atol=1e-12)


def test_rotation_is_a_rotation() -> None:
    position = built("rope")
    q, k = states(4, 4)
    at = lambda p: torch.full((1, 4), p)  # noqa: E731
    turned, _ = position.rotate(q, k, at(11), at(0))
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1), rtol=1e-12, atol=0)
    twice, unmoved = position.rotate(turned, k, at(31), at(0))
    torch.testing.assert_close(twice, position.rotate(q, k, at(42), at(0))[0], rtol=0, atol=1e-12)
    assert torch.equal(unmoved, k)


def test_rotation_turns_by_plus_the_angle() -> None:
    position = af.build_position("rope", af.Site(2, 1))
    x = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    turned, _ = position.rotate(x, x, torch.tensor([[1]]), torch.tensor([[0]]))
    expected = torch.stack([torch.ones((), dtype=torch.float64).cos(), torch.ones((), dtype=torch.float64).sin()])
    torch.testing.assert_close(turned[0, 0, 0], expected, rtol=0, atol=1e-15)


def test_pairings_are_one_another_with_channels_permuted() -> None:
    q, k = states()
    q_pos, k_pos = torch.randint(0, 99, (2, 5)), torch.randint(0, 99, (2, 7))
    order = torch.tensor([0, 2, 1, 3])
    half = built("rope").rotate(q[..., order], k[..., order], q_pos, k_pos)
    interleaved = built("rope(pairing=interleaved)").rotate(q, k, q_pos, k_pos)
    for one, other in zip(half, interleaved, strict=True):
        torch.testing.assert_close(one, other[..., order], rtol=0, atol=1e-14)


def test_offered_forms() -> None:
    forms = {name: af.build_position(name, SITE).forms for name in ("none", "learned", "sinusoidal", "rope")}
    assert forms == {
        "none": (),
        "learned": ((Form.EMBED,),),
        "sinusoidal": ((Form.EMBED,),),
        "rope": ((Form.ROTATE,),),
    }
    assert built("alibi").forms == ((Form.TOEPLITZ, Form.BIAS, Form.DECAY),)
    assert built("t5").forms == ((Form.TOEPLITZ, Form.BIAS),)
    assert built("shaw").forms == ((Form.TABLE, Form.SCORE, Form.CLIPPED), (Form.VALUE, Form.CLIPPED))
    assert built("shaw(keys=False)").forms == ((Form.VALUE, Form.CLIPPED),)
    assert built("shaw(values=False)").forms == ((Form.TABLE, Form.SCORE, Form.CLIPPED),)
    for name in ("transformer_xl", "xlnet"):
        assert built(name).forms == ((Form.AUGMENT, Form.TABLE, Form.SCORE),)
    assert built("xlnet(clamp=2)").forms == built("deberta").forms == ((Form.TABLE, Form.SCORE, Form.CLIPPED),)
    assert built("nezha").forms == ((Form.TABLE, Form.SCORE, Form.CLIPPED), (Form.VALUE, Form.CLIPPED))
    assert built("kerple").forms == ((Form.TOEPLITZ, Form.BIAS),)
    assert built("sandwich").forms == ((Form.TOEPLITZ, Form.BIAS, Form.AUGMENT),)
    places = (Form.AUGMENT, Form.SCORE, Form.APART)
    assert built("tupe").forms == (places,)
    assert built("tupe(relative=True)").forms == (places, (Form.BIAS,))
    assert built("tupe(relative=True, cls=False)").forms == (places, (Form.TOEPLITZ, Form.BIAS))
    assert built("rope_value").forms == ((Form.TURN,),)
    assert built("rope_value(scores=True)").forms == ((Form.TURN,), (Form.ROTATE,))
