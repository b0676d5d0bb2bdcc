"""Terms that only pairs know, under patterns: pieces of rows equal the dense reference, and no tensor of all pairs is made."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.attention import _pieces
from anyformer.attention._ways import ways
from anyformer.attention.softmax import attend_with_lse
from anyformer.context import Context
from anyformer.forms import Form
from anyformer.model.build import added_at_embedding, build_position, verdict
from anyformer.pattern.read import pattern_of
from anyformer.registry import names
from anyformer.side import side
from anyformer.site import Site
from anyformer.testing.largest import Largest

PATTERNS = (
    "Local(70)",
    "Local(9) | Global([0, -3])",
    "bigbird(block=16, random=1)",
    "PerHead((Local(5), 1), (Strided(7), 3))",
)
POSITIONS = ("fire", "swin_bias", "fox", "cope", "path", "shaw", "deberta", "tupe(relative=True)", "t5")
N = 200


def _layer(pattern: str, position: str, causal: bool, n: int, heads: int = 4) -> af.MultiHead:
    built = af.MultiHead(8 * heads, heads, attention=pattern, position=position, causal=causal, max_length=n)
    for parameter in built.parameters():
        parameter.data.normal_(std=0.3)
    return built


def _cases() -> list[tuple[str, str, bool]]:
    every = [(text, position, causal) for text in PATTERNS for position in POSITIONS for causal in (False, True)]
    gapless = {"cope": {("Local(70)", True)}, "path": {("Local(70)", True)}, "fox": {(text, True) for text in PATTERNS}}
    return [each for each in every if each[1] not in gapless or (each[0], each[2]) in gapless[each[1]]]


@pytest.mark.parametrize(("text", "position", "causal"), _cases())
def test_pieces_equal_the_reference(text: str, position: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = text.replace(", -3", "") if causal else text
    layer = _layer(pattern, position, causal, N).double()
    x = torch.randn(2, N, 32, dtype=torch.float64, requires_grad=True)
    places = torch.arange(N)
    positions = torch.stack([places // 16, places % 16], dim=-1)[None] if position == "swin_bias" else None
    keep = places < torch.tensor([[N], [N - 31]])
    leaves = [x, *(each for each in layer.parameters() if each.requires_grad)]
    found: list[list[Tensor]] = []
    for way in ("pieces", "written out"):
        monkeypatch.setattr(_pieces, "_WORTH", 0 if way == "pieces" else N * N + 1)
        monkeypatch.setattr(_pieces, "_PAIRS", 100_000)
        with ways() as taken:
            out = layer(x, attention_mask=keep, positions=positions)
        if way == "pieces" and (position, text) not in _BY_TILES:
            assert list(taken) == ["pieces"]
        grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True, materialize_grads=True)
        found.append([out, *grads])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


_BY_TILES = {(position, text) for position in ("shaw", "deberta", "t5", "tupe(relative=True)") for text in PATTERNS}


def test_the_users_own_mask_bias_and_softcap_and_fewer_queries() -> None:
    n, m = 150, 200
    pattern, tokens = pattern_of("Local(20) | Global([-1])"), side(m, torch.device("cpu"))
    q, k, v = (torch.randn(2, h, t, 6, dtype=torch.float64) for h, t in ((4, n), (2, m), (2, m)))
    context = Context(
        causal=False,
        queries=tokens.part(m - n, m),
        keys=tokens,
        pattern=pattern,
        mask=torch.rand(2, 1, n, m) < 0.8,
        bias=torch.randn(1, 4, n, m, dtype=torch.float64),
        softcap=2.0,
    )
    found = _pieces.run(q, k, v, context, 0.3, most=50_000)
    torch.testing.assert_close(found, attend_with_lse(q, k, v, context, 0.3)[0], rtol=1e-10, atol=1e-10)


def test_dropout_is_the_same_when_a_piece_is_computed_again() -> None:
    tokens = side(N, torch.device("cpu"))
    context = Context(causal=True, queries=tokens, keys=tokens, pattern=pattern_of("Local(40)"), dropout=0.5)
    q, k, v = (torch.randn(1, 1, N, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def out(v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return _pieces.run(q, k, v, context, 0.5, most=20_000)

    assert torch.autograd.gradcheck(lambda v: out(v)[:, :, ::50, :1], v, fast_mode=True)


def _in_windows() -> list[tuple[str, str, bool]]:
    """Every encoding that has a term of two tokens, in the direction that it has."""
    found = []
    for name in names("position"):
        both = verdict("Local(64)", name, Site(8, 1, causal=False)).runs
        encoding = build_position(name, Site(8, 1, causal=not both))
        if encoding.forms and not added_at_embedding(encoding) and Form.SHIFT not in encoding.forms[0]:
            found.append(("Local(64)", name, not both))
    return found


@pytest.mark.parametrize(
    ("pattern", "position", "causal"),
    [
        *_in_windows(),
        ("Local(64)", "rope(scaling=dynamic_ntk(factor=2))", False),
        ("Local(32) | Global([0])", "shaw", False),
        ("Local(32) | Global([0])", "swin_bias", False),
        ("bigbird", "fox", True),
    ],
)
def test_no_tensor_of_all_pairs_is_made(pattern: str, position: str, causal: bool) -> None:
    n = 3000
    places = torch.arange(n)
    layer = _layer(pattern, position, causal, n, heads=1)
    on_grid = layer.position.axes == 2
    positions = torch.stack([places // 60, places % 60], dim=-1)[None] if on_grid else None
    with Largest() as largest:
        layer(torch.randn(1, n, 8), positions=positions).sum().backward()
    assert largest.most < n * n
