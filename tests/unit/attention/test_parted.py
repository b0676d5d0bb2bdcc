"""Heads with patterns of their own, columns side by side and looked-up keys equal the reference, and are taken where they pay."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.attention._columns import Columned, columned
from anyformer.attention._parted import choose
from anyformer.attention._ways import ways
from anyformer.attention.softmax import Impl
from anyformer.context import Context
from anyformer.pattern.base import Pattern
from anyformer.pattern.read import pattern_of
from anyformer.side import side

COLUMNS = (
    "Block(64) | Columns(64, 8)",
    "Local(20, 0) | Columns(50, 7)",
    "Columns(50, 7)",
    "RandomBlocks(64, 1) | Columns(50, 7)",
)
LOOKED_UP = ("Random(4, seed=0)", "Random(3, seed=1, mutual=True)", "Strided(200)")
BY_HEAD = (
    "PerHead((Local(16), 2), (Strided(32), 2))",
    "PerHead((Local(16) | Global([0, 7]), 1), (Random(4, seed=2), 2), (Full(), 1))",
)


def _compare(
    pattern: Pattern, n: int, *, way: str | None, impl: Impl = "auto", more: Sequence[Tensor] = (), **facts: Any
) -> None:
    """Forward and gradients, of `more` tensors too; `way` is that of the found ones."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, n, 4, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    with ways() as taken:
        found = af.attend(q, k, v, pattern=pattern, impl=impl, **facts)
    assert way is None or list(taken) == [way]
    wanted = af.attend(q, k, v, pattern=pattern, impl="reference", **facts)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    seed = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    grads = (torch.autograd.grad(out, (q, k, v, *more), seed) for out in (found, wanted))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def _facts(n: int) -> list[dict[str, Any]]:
    return [
        {},
        {"document_ids": (torch.arange(n) // 300).expand(2, -1)},
        {"attention_mask": torch.arange(n) < torch.tensor([[n], [n - 77]])},
        {"softcap": 3.0, "sink": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)},
    ]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("text", COLUMNS)
def test_columns_equal_the_reference(text: str, number: int) -> None:
    q, tokens = torch.empty(1, 4, 710, 4), side(710, torch.device("cpu"))
    path = choose(q, q, Context(causal=True, queries=tokens, keys=tokens, pattern=pattern_of(text)))
    assert isinstance(path, Columned)
    _compare(pattern_of(text), 710, way="block lists", causal=True, **_facts(710)[number])


@pytest.mark.parametrize("n", [1, 7, 16, 70])
def test_columns_at_any_length(n: int) -> None:
    assert columned(pattern_of("Block(16) | Columns(16, 4)")) is not None
    _compare(pattern_of("Block(16) | Columns(16, 4)"), n, way=None, impl="tiles", causal=True)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", LOOKED_UP)
def test_looked_up_keys_equal_the_reference(text: str, causal: bool, number: int) -> None:
    _compare(pattern_of(text), 600, way="union", causal=causal, **_facts(600)[number])


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", BY_HEAD)
def test_heads_with_patterns_of_their_own_equal_the_reference(text: str, causal: bool, number: int) -> None:
    _compare(pattern_of(text), 600, way="by head", causal=causal, **_facts(600)[number])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["rope", "alibi", "t5"])
def test_each_group_of_heads_has_its_own_bias(name: str, causal: bool) -> None:
    position = af.build_position(name, af.Site(16, 4, kv_heads=2, causal=causal, max_length=600)).double()
    weights = list(position.parameters())
    for each in weights:
        torch.nn.init.normal_(each)
    _compare(pattern_of(BY_HEAD[1]), 530, way="by head", more=weights, position=position, causal=causal)


@pytest.mark.parametrize(
    ("text", "n", "causal", "way"),
    [
        ("Random(16, seed=0)", 256, False, None),
        ("Random(16, seed=0)", 1024, False, "union"),
        ("Random(110, seed=0)", 1024, False, None),
        ("PerHead((Local(64), 1), (Strided(64), 1))", 256, False, None),
        ("PerHead((Local(64), 1), (Strided(64), 1))", 1024, False, "by head"),
        ("PerHead((Full(), 1), (Local(1000), 1))", 1024, False, None),
        ("Block(128) | Columns(128, 32)", 1024, True, "block lists"),
        ("Block(128) | Columns(128, 120)", 1024, False, None),
    ],
)
def test_taken_where_they_pay(text: str, n: int, causal: bool, way: str | None) -> None:
    q, tokens = torch.empty(1, 2, n, 4), side(n, torch.device("cpu"))
    path = choose(q, q, Context(causal=causal, queries=tokens, keys=tokens, pattern=pattern_of(text)))
    assert (None if path is None else path.name) == way


def test_what_is_looked_up_in_inference_serves_training_too() -> None:
    q, k, v = (torch.randn(1, 1, 601, 4) for _ in range(3))
    with torch.inference_mode():
        af.attend(q, k, v, pattern=pattern_of("Random(2, seed=9)"))
    q.requires_grad_()
    af.attend(q, k, v, pattern=pattern_of("Random(2, seed=9)")).sum().backward()
    assert q.grad is not None


def test_memory_follows_the_pairs() -> None:
    """30000 x 30000 pairs of one head would take 3.6 GB."""
    q, k, v = (torch.randn(1, 2, 30000, 4, requires_grad=True) for _ in range(3))
    for text in ("Random(4, seed=0)", "PerHead((Local(8), 1), (Random(2, seed=1), 1))"):
        af.attend(q, k, v, pattern=pattern_of(text)).sum().backward()
    assert q.grad is not None
    assert bool((q.grad != 0).any())
