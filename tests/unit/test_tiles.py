"""Softmax through tiles equals the dense reference: every pattern, every encoding by offset, masks, documents, n != m."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.attention import _tiles
from anyformer.attention._band import Window, _reach
from anyformer.attention._tiles import choose
from anyformer.attention._ways import ways
from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.pattern.read import pattern_of
from anyformer.position.bind import bind
from anyformer.side import side
from anyformer.spec import parse

PATTERNS = (
    "Local(5)",
    "Local(3, 0)",
    "Local(200)",
    "Local(4) | Global([0, -1, 7])",
    "Local(2) | Flagged()",
    "Strided(5)",
    "Dilated(2, 1, 3)",
    "Block(9)",
    "Local(2) | Strided(4) | Global([0]) | Random(2, seed=3)",
    "bigbird(block=8, random=1)",
    "sparse_transformer(length=6, summary=2)",
    "PerHead((Local(2), 1), (Strided(3) | Global([0]), 3))",
)
POSITIONS = ("none", "alibi", "t5", "shaw", "transformer_xl", "deberta")


def _qkv(n: int, m: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, 4, n, 8), (2, 2, m, 8), (2, 2, m, 6))
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def _encoding(name: str, causal: bool) -> torch.nn.Module:
    position = af.build_position(name, af.Site(32, 4, kv_heads=2, causal=causal)).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def _compare(q: Tensor, k: Tensor, v: Tensor, extra: list[Tensor], **facts: object) -> None:
    outs = [af.attend(q, k, v, impl=impl, **facts) for impl in ("tiles", "reference")]  # type: ignore[arg-type]
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, (q, k, v, *extra), seed, allow_unused=True) for out in outs]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if ours is None else ours,
            torch.zeros(()) if theirs is None else theirs,
            rtol=1e-8,
            atol=1e-9,
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize(("n", "m"), [(37, 37), (20, 37), (1, 9), (129, 129)])
def test_every_pattern(text: str, causal: bool, n: int, m: int) -> None:
    if causal and "-1" in text:
        text = text.replace(", -1", "")
    keep = torch.arange(m) < torch.tensor([[m], [max(m - 6, 1)]])
    flags = torch.zeros(2, m, dtype=torch.bool)
    flags[0, [0, m // 2]] = True
    flags[1, m - 1] = True
    q, k, v = _qkv(n, m)
    _compare(q, k, v, [], pattern=pattern_of(parse(text)), causal=causal, attention_mask=keep, global_mask=flags)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize(
    "text", ["Local(5)", "Local(3, 1)", "Local(4) | Global([0, 6])", "Strided(4)", "bigbird(block=8)"]
)
def test_every_encoding_by_offset(text: str, name: str, causal: bool) -> None:
    q, k, v = _qkv(40, 40)
    v = torch.randn(2, 2, 40, 8, dtype=torch.float64, requires_grad=True)
    position = _encoding(name, causal)
    facts = {"pattern": pattern_of(parse(text)), "causal": causal, "position": position}
    by_vectors = name in ("shaw", "transformer_xl", "deberta")
    if by_vectors and text not in ("Local(5)", "Local(3, 1)"):
        with pytest.raises(SpecError, match='impl="tiles" needs'):
            af.attend(q, k, v, impl="tiles", **facts)
        return
    _compare(q, k, v, list(position.parameters()), **facts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "none"])
def test_all_pairs(name: str, causal: bool) -> None:
    position = _encoding(name, causal)
    for n, m in ((140, 140), (9, 150)):
        q, k, v = _qkv(n, m)
        v = torch.randn(2, 2, m, 8, dtype=torch.float64, requires_grad=True)
        _compare(q, k, v, list(position.parameters()), causal=causal, position=position)
        keep = torch.arange(m) >= torch.tensor([[3], [m - 2]])
        _compare(q, k, v, list(position.parameters()), causal=causal, position=position, attention_mask=keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_what_a_steep_bias_makes_unreachable_is_not_computed(causal: bool, dtype: torch.dtype) -> None:
    """The penalty of the steepest head, 0.25 a token, hides all keys from some hundred tokens on."""
    q, k, v = _qkv(1500, 1500, dtype)
    q, k, v = (x[:1, :, :, :2].detach().requires_grad_() for x in (q, k, v))
    tokens = side(1500, q.device)
    encoding = bind(_encoding("alibi", causal), {Form.TOEPLITZ}, tokens, tokens)
    context = Context(causal=causal, queries=tokens, keys=tokens, encoding=encoding)
    path = choose(q, k, context)
    assert path is not None
    (window,) = path.ways
    assert isinstance(window, Window)
    reach = _reach(window, encoding.offsets(-window.left, window.right), q, k, context, 0.7)
    assert reach is not None
    assert reach[0] < 600 if dtype == torch.float32 else reach[0] >= 1499
    assert reach == sorted(reach)
    _compare_paths(q, k, v, causal)


def _compare_paths(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    outs = [af.attend(q, k, v, impl=impl, causal=causal, position="alibi") for impl in ("auto", "reference")]
    exact = torch.finfo(q.dtype).eps * 20
    torch.testing.assert_close(*outs, rtol=exact, atol=exact)
    seed = torch.randn_like(outs[0])
    for ours, theirs in zip(*(torch.autograd.grad(out, (q, k, v), seed) for out in outs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=100 * exact, atol=100 * exact)


def test_a_hidden_token_may_read_beyond_the_reach() -> None:
    """A query whose own key and all near keys are hidden reads the far ones, whatever its bias says."""
    q, k, v = _qkv(8, 4000)
    keep = (torch.arange(4000) < 2).expand(2, -1)
    _compare(q, k, v, [], causal=True, position="alibi", attention_mask=keep)
    out = af.attend(q, k, v, impl="tiles", causal=True, position="alibi", attention_mask=keep)
    assert bool((out != 0).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["none", "alibi", "t5"])
@pytest.mark.parametrize(
    "text",
    [
        "Local(3) | Strided(8)",
        "Local(3) | Strided(8) | Global([0, 7]) | Random(1, seed=1)",
        "Strided(8) | Random(1, seed=2, mutual=True)",
        "Local(2) | Strided(12) | Strided(8)",
    ],
)
def test_a_union_of_parts_that_each_take_their_own_way(
    text: str, name: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("_BLOCK", 4), ("_SPARSE", 0.0), ("LOOKED_UP", 0.0)):
        monkeypatch.setattr(_tiles, constant, value)
    union = _tiles._union
    monkeypatch.setattr(_tiles, "_union", lambda *facts: union(*facts[:-1], torch.inf))
    n = 61
    q, k, v = _qkv(n, n)
    position = None if name == "none" else _encoding(name, causal)
    facts = {"pattern": pattern_of(parse(text)), "causal": causal, "position": position}
    extra = [] if position is None else list(position.parameters())
    with ways() as seen:
        _compare(q, k, v, extra, **facts)
    assert list(seen) == ["union", "written out"]
    _compare(q, k, v, extra, document_ids=(torch.arange(n) // 25).expand(2, -1), **facts)
    short = torch.arange(n) < torch.tensor([[n], [n - 9]])
    _compare(q, k, v, extra, attention_mask=short, **facts)


def test_documents() -> None:
    q, k, v = _qkv(40, 40)
    documents = torch.tensor([[0] * 15 + [1] * 25, [2] * 40])
    for text in ("Local(6) | Global([0])", "bigbird(block=8)"):
        _compare(q, k, v, [], pattern=pattern_of(parse(text)), document_ids=documents, causal=True)


def test_a_layer_with_padding_on_any_side() -> None:
    layer = af.MultiHead(32, 4, attention="Local(3) | Global([0])", position="alibi", max_length=512).double()
    x = torch.randn(2, 400, 32, dtype=torch.float64)
    keep = torch.rand(2, 400) > 0.3
    out = layer(x, attention_mask=keep)
    for row in range(2):
        alone = layer(x[row : row + 1, keep[row]])
        torch.testing.assert_close(out[row : row + 1, keep[row]], alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("text", "n", "kind"),
    [
        ("Local(64)", 100, None),
        ("Local(64)", 4096, "windows"),
        ("Local(64) | Global([0])", 4096, "windows"),
        ("Local(3000)", 4096, None),
        ("bigbird(block=64)", 4096, "block lists"),
        ("bigbird(block=64)", 256, None),
        ("Strided(2)", 512, "block lists"),
        ("Full()", 4096, None),
        ("Local(64) | Strided(32)", 4096, "union"),
        ("Local(32) | Strided(32) | Global([0]) | Random(2, seed=1)", 2048, "union"),
        ("Strided(32) | Random(2, seed=1)", 2048, "union"),
    ],
)
def test_tiles_where_they_pay(text: str, n: int, kind: str | None) -> None:
    q = torch.empty(1, 2, n, 4)
    tokens = side(n, q.device)
    path = choose(q, q, Context(causal=False, queries=tokens, keys=tokens, pattern=pattern_of(parse(text))))
    assert (None if path is None else path.name) == kind


def test_memory_follows_the_window() -> None:
    q, k, v = (torch.randn(1, 2, 20000, 16) for _ in range(3))
    out = af.attend(q, k, v, pattern=af.Local(32) | af.Global([0]))  # 20000 x 20000 pairs would need 1.6 GB a head
    right = af.attend(q[:, :, 9990:10010], k[:, :, 9900:10100], v[:, :, 9900:10100], mask=_near(), impl="reference")
    without_global = af.attend(q, k, v, pattern=af.Local(32))[:, :, 9990:10010]
    torch.testing.assert_close(without_global, right, rtol=0, atol=1e-5)
    assert out.shape == q.shape


def _near() -> Tensor:
    return ((torch.arange(200) - torch.arange(90, 110)[:, None]).abs() <= 32)[None, None]


@pytest.mark.parametrize(
    "text", ["Local(2) | Global([-1])", "Local(3) | Global([0, -2])", "Block(7) | Local(2) | Global([-1])"]
)
@pytest.mark.parametrize(("n", "m"), [(40, 40), (25, 40)])
def test_places_from_the_end_where_padding_is_not_on_the_right(text: str, n: int, m: int) -> None:
    keep = torch.ones(2, m, dtype=torch.bool)
    keep[0, :11], keep[1, 9:17], keep[1, -4:] = False, False, False
    _compare(*_qkv(n, m), [], pattern=pattern_of(text), attention_mask=keep)
