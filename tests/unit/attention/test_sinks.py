"""A sink, a key of value 0 whose logit each head learns, is the same on every way that softmax attention takes."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.attention import _pieces, _tiles
from anyformer.attention._ways import ways
from anyformer.errors import SpecError
from anyformer.pattern.read import pattern_of

N, M = 37, 41
WAYS = {
    "Local(5)": "windows",
    "Local(4) | Global([0, -1, 7])": "windows",
    "Local(2) | Flagged()": "windows",
    "Strided(5)": "block lists",
    "bigbird(block=8, random=1)": "block lists",
    "PerHead((Local(2), 1), (Strided(3) | Global([0]), 3))": "block lists",
}
UNIONS = ("Local(3) | Strided(8) | Global([0, 7]) | Random(1, seed=1)", "Strided(8) | Random(1, seed=2, mutual=True)")


def _operands(n: int = N, m: int = M) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = ((2, 4, n, 8), (2, 2, m, 8), (2, 2, m, 6), (4,))
    q, k, v, sink = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v, sink


def _by_hand(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the keys and one more column, whose weight nobody reads."""
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    column = sink[:, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1] @ v


def _same(found: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    probe = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, probe) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(9, 9), (3, 9), (1, 4), (0, 3)])
def test_all_pairs_equal_the_closed_form(impl: str, causal: bool, n: int, m: int) -> None:
    q, k, v, sink = _operands(n, m)
    allowed = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else torch.ones(n, m, dtype=torch.bool)
    found = af.attend(q, k, v, causal=causal, sink=sink, impl=impl)
    expected = _by_hand(q, k, v, sink, allowed)
    if n:
        _same(found, expected, q, k, v, sink)
    assert found.shape == expected.shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", WAYS)
def test_tiles_equal_the_closed_form(text: str, causal: bool) -> None:
    pattern = pattern_of(text.replace(", -1", "") if causal else text)
    keep = torch.arange(M) < torch.tensor([[M], [M - 7]])
    flags = torch.zeros(2, M, dtype=torch.bool)
    flags[:, 20] = True
    q, k, v, sink = _operands()
    facts = {"pattern": pattern, "causal": causal, "attention_mask": keep, "global_mask": flags, "sink": sink}
    with ways() as taken:
        found = af.attend(q, k, v, impl="tiles", **facts)
    assert list(taken) == [WAYS[text]]
    ones = torch.eye(M, dtype=torch.float64).expand(2, 2, M, M)
    allowed = af.attend(q, k, ones, impl="reference", **facts) != 0
    _same(found, _by_hand(q, k, v, sink, allowed), q, k, v, sink)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", UNIONS)
def test_unions_equal_the_closed_form(text: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, value in (("_BLOCK", 4), ("_SPARSE", 0.0), ("LOOKED_UP", 0.0)):
        monkeypatch.setattr(_tiles, constant, value)
    union = _tiles._union
    monkeypatch.setattr(_tiles, "_union", lambda *facts: union(*facts[:-1], torch.inf))
    q, k, v, sink = _operands(61, 61)
    with ways() as taken:
        found = af.attend(q, k, v, pattern=pattern_of(text), causal=causal, sink=sink, impl="tiles")
    assert list(taken) == ["union"]
    allowed = pattern_of(text).dense(61, heads=4, causal=causal)
    _same(found, _by_hand(q, k, v, sink, allowed), q, k, v, sink)


@pytest.mark.parametrize("position", ["none", "alibi", "t5", "shaw", "transformer_xl", "deberta"])
@pytest.mark.parametrize("text", ["Local(5)", "Local(3, 1)"])
def test_terms_by_offset_equal_the_reference(text: str, position: str) -> None:
    """A sink lies on no offset: what an encoding adds to a whole row has to stay in the row's scores."""
    q, k, v, sink = _operands(M)
    v = torch.randn(2, 2, M, 8, dtype=torch.float64, requires_grad=True)
    encoding = af.build_position(position, af.Site(32, 4, kv_heads=2)).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    tiles, reference = (
        af.attend(q, k, v, pattern=pattern_of(text), position=encoding, sink=sink, impl=impl)
        for impl in ("tiles", "reference")
    )
    _same(tiles, reference, q, k, v, sink, *encoding.parameters())


@pytest.mark.parametrize("position", ["fire", "fox", "swin_bias", "shaw"])
def test_pieces_equal_the_reference(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, n = "softmax(pattern=PerHead((Local(5), 1), (Strided(7), 3)), sink=True)", 200
    layer = af.MultiHead(32, 4, attention=text, position=position, causal=position == "fox", max_length=n).double()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3)
    x, places = torch.randn(2, n, 32, dtype=torch.float64, requires_grad=True), torch.arange(n)
    grid = torch.stack([places // 16, places % 16], dim=-1)[None] if position == "swin_bias" else None
    keep, outs = places < torch.tensor([[n], [n - 31]]), []
    for way in ("pieces", "written out"):
        monkeypatch.setattr(_pieces, "_WORTH", 0 if way == "pieces" else n * n + 1)
        monkeypatch.setattr(_pieces, "_PAIRS", 100_000)
        with ways() as taken:
            outs.append(layer(x, attention_mask=keep, positions=grid))
        assert list(taken) == [way] or position == "fox"
    leaves = [each for each in layer.parameters() if torch.autograd.grad(outs[0].sum(), each, retain_graph=True)]
    _same(outs[0], outs[1], x, *leaves)


@pytest.mark.parametrize("impl", ["reference", "torch", "tiles"])
def test_a_query_that_may_look_nowhere_gives_exactly_nothing(impl: str) -> None:
    q, k, v, sink = _operands(M)
    keep = (torch.arange(M) >= 20) & torch.tensor([[True], [False]])
    garbage = torch.where(keep[:, None, :, None], torch.zeros(()), torch.tensor(torch.nan)).double()
    found = af.attend(q, k + garbage, v + garbage, pattern=af.Local(5), attention_mask=keep, sink=sink, impl=impl)
    assert not found[1].any()
    assert not found[0, :, :15].any()
    q_grad, sink_grad = torch.autograd.grad(found[:, :, :15].sum() + found[1].sum(), (q, sink))
    assert not q_grad.any()
    assert not sink_grad.any()


@pytest.mark.parametrize("impl", ["reference", "torch", "tiles"])
def test_a_sink_that_takes_nothing_is_none(impl: str) -> None:
    q, k, v, _ = _operands(M)
    keep = torch.tensor([[True], [False]]).expand(2, M)
    facts = {"pattern": af.Local(5) | af.Global([0]), "attention_mask": keep, "impl": impl}
    sink = torch.full((4,), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(
        af.attend(q, k, v, sink=sink, **facts), af.attend(q, k, v, **facts), rtol=1e-12, atol=1e-12
    )


def test_scores_of_zero_leave_a_share_for_each_key_and_the_sink() -> None:
    q, k, v, _ = _operands()
    ones, sink = torch.ones_like(v), torch.zeros(4, dtype=torch.float64)
    for impl in ("reference", "torch"):
        found = af.attend(q, k, ones, scale=0.0, sink=sink, impl=impl)
        torch.testing.assert_close(found, torch.full_like(found, M / (M + 1)), rtol=1e-12, atol=0)


def test_flex_refuses_it() -> None:
    q, k, v, sink = (x.detach() for x in _operands())
    with pytest.raises(SpecError, match="no dropout, no sink and no mask"):
        af.attend(q, k, v, pattern=af.Local(3), sink=sink, impl="flex")


@pytest.mark.parametrize("text", ["softmax(sink=True)", "softmax(pattern=Local(6, 0) | Global([0]), sink=True)"])
def test_step_by_step_equals_the_whole(text: str) -> None:
    layer = af.MultiHead(16, 4, kv_heads=2, attention=text, position="rope", causal=True).double()
    torch.nn.init.normal_(layer.attention.sink)
    x, cache = torch.randn(2, 20, 16, dtype=torch.float64), layer.new_cache(2)
    steps = [layer(part, cache=cache) for part in x.split([7, 1, 1, 4, 7], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), layer(x), rtol=1e-10, atol=1e-10)


def test_explained_weights_leave_the_share_of_the_sink() -> None:
    config = af.ModelConfig(vocab=8, dim=16, depth=1, heads=2, attention="softmax(pattern=Local(2), sink=True)")
    model = af.Transformer(config)
    told = model.explain(torch.randint(8, (1, 9)), rows=[0, 4, 8], heads=[0, 1])[0].sum(dim=-1)
    assert bool(((told > 0) & (told < 1)).all())


@pytest.mark.plain
@pytest.mark.parametrize("text", ["Local(5) | Global([0])", "Strided(7) | Global([0])"])
def test_compiled_it_is_the_same(text: str) -> None:
    torch._dynamo.reset()
    layer = af.MultiHead(16, 2, attention=f"softmax(pattern={text}, sink=True)").double()
    torch.nn.init.normal_(layer.attention.sink)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, leaves = torch.randn(1, 600, 16, dtype=torch.float64), tuple(layer.parameters())
    outs = [compiled(x), layer(x)]
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in outs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pattern", [None, "local(4)", "bigbird(block=8, random=1)"])
@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_a_sink_of_another_precision(pattern: str | None, dtype: torch.dtype, other: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 4, 40, 8, dtype=dtype) for _ in range(3))
    sink = torch.randn(4).to(other)
    facts = {"pattern": pattern, "impl": "auto" if pattern is None else "tiles"}
    torch.testing.assert_close(af.attend(q, k, v, sink=sink, **facts), af.attend(q, k, v, sink=sink.to(dtype), **facts))
