"""A formula is one text, read by people and evaluated; every attention and mixer has one, and its page shows it."""

import re
from pathlib import Path

import pytest
import torch

from anyformer.attention.base import Attention
from anyformer.cost import LEGEND, Cost, evaluate, meetings, symbols
from anyformer.mixer.base import Mixer
from anyformer.model.build import build_attention, build_mixer
from anyformer.registry import find, names
from anyformer.site import Site

METHODS = [(kind, name) for kind in ("attention", "mixer") for name in names(kind) if name != "multihead"]
PAGES = Path(__file__).parents[2] / "docs" / "methods"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 n m d", 2 * 6 * 4 * 8),
        ("3/2 n^2", 54),
        ("n^(1/2) n^(1/2)", 6),
        ("n (m + 2 d) d - n", 6 * 20 * 8 - 6),
        ("n m d / block", 64),
        ("n d^2 / block^2 / 2", 21 + 1 / 3),
        ("log2(d) n", 18),
        ("n log2(n + 2)", 18),
        ("0", 0),
    ],
)
def test_a_formula_means_what_is_printed(text: str, value: float) -> None:
    values = {"n": 6, "m": 4, "d": 8, "block": 3}
    assert evaluate(text, values) == pytest.approx(value, rel=1e-12)
    assert symbols(text) <= set(values)


@pytest.mark.parametrize("text", ["2 n +", "n.d", "n[0]", "2 $ n", "log2(", "", "n, d", "n == d"])
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is no formula; write one such as '2 h n m d'")):
        evaluate(text, {"n": 1, "d": 1})


def test_a_symbol_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'2 q n': expected a value for 'q', got n, m"):
        evaluate("2 q n", {"n": 1, "m": 2})


def test_meetings_are_counted_as_masks_have_them() -> None:
    for n, m in ((5, 5), (1, 5), (3, 5), (5, 3), (0, 4)):
        mask = torch.arange(m) <= torch.arange(n)[:, None] + m - n
        assert meetings(n, m, causal=True) == int(mask.sum())
        assert meetings(n, m, causal=False) == n * m


def test_a_cost_reads_its_site() -> None:
    site = Site(96, 8, kv_heads=2, causal=True, max_length=9)
    cost = Cost(site, "2 pairs d + c k m", memory="h n max_length", again="pairs d")
    assert cost.multiply_adds(7) == 2 * 8 * 28 * 12 + 96 * 2 * 7
    assert cost.numbers(7) == 8 * 7 * 9
    assert cost.repeated(1, 7) == 8 * 7 * 12


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_method_says_what_it_costs(kind: str, name: str, causal: bool) -> None:
    target = find(kind, name).target  # type: ignore[arg-type]
    assert "Cost:" not in (__import__(target.__module__, fromlist=["_"]).__doc__ or ""), "said twice"
    site = Site(64, 4, kv_heads=2, causal=causal and target.causal, max_length=64)
    layer = build_mixer(name, "none", site)
    own = build_attention(name, site) if kind == "attention" else layer
    for cost in (own.cost(), layer.cost()):
        assert cost is not None
        for text in (cost.products, cost.memory, cost.again):
            assert symbols(text) <= {*LEGEND, *cost.sizes, *find(kind, name).knobs}  # type: ignore[arg-type]
            assert set(cost.sizes) <= {*LEGEND, *find(kind, name).knobs}  # type: ignore[arg-type]
        assert 0 < cost.multiply_adds(32) < cost.multiply_adds(64)
        assert 0 < cost.numbers(32) <= cost.numbers(64)
        assert 0 <= cost.repeated(64) < cost.multiply_adds(64)


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_page_shows_the_formula(kind: str, name: str) -> None:
    """Both directions, with default knobs."""
    target = find(kind, name).target  # type: ignore[arg-type]
    page = (PAGES / kind / f"{name}.md").read_text()
    for causal in {False, target.causal}:
        site = Site(256, 4, causal=causal)
        own = build_attention(name, site) if kind == "attention" else build_mixer(name, "none", site)
        cost = own.cost()
        assert cost is not None
        assert f"`{cost.products}`" in page, f"{kind}/{name}.md: expected `{cost.products}` under Cost"


def test_a_method_may_keep_silent() -> None:
    site = Site(8, 1)
    assert Attention(site).cost() is None
    assert Mixer(site).cost() is None
