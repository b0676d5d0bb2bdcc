"""What methods say they cost is what is counted, within 5 %, with the products that torch's counter sees.

Most methods are counted as they run. Where an implementation masks away, pads or chunks more than its equation asks for, a plain
writing of the equation is counted instead, after it gave the same outputs: row by row over the keys that meet, or token by token
from a state. Fourier transforms, which the counter does not see, and causal forms that run under a mask are counted by hand.
"""

from dataclasses import replace

import pytest
import torch
from counting import BY_HAND, PATTERNS, D, H, layer_of, near, said
from torch import Tensor, nn

import anyformer as af
from anyformer.compare.counted import counted
from anyformer.context import Context
from anyformer.mixer.base import Mixer
from anyformer.model.build import build_attention, build_mixer
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.leaves import SLOT_NAMES
from anyformer.registry import find, names
from anyformer.side import side
from anyformer.site import Site

SIZES = (96, 160)


EXECUTED = [
    "aft(rank=8)",
    "aft(variant=local, rank=8)",
    "aft(variant=conv)",
    "compressed",
    "cosformer",
    "efficient",
    "entmax",
    "entmax(alpha=2.0)",
    "inducing",
    "learned_blocks(group=8)",
    "linear",
    "linformer(rank=16)",
    "linformer(rank=16, sharing=kv)",
    "nystrom(landmarks=8)",
    "nystrom(landmarks=8, kernel=0)",
    "performer(features=128)",
    "performer(features=128, kernel=hyperbolic)",
    "reformer(bucket=8, rounds=2)",
    "rfa",
    "routing(clusters=8)",
    "routing(clusters=8, window=16)",
    "sinkhorn(block=8)",
    "softmax",
    "taylor",
    "taylor(width=64)",
    "threshold",
    "threshold(rule=mass)",
    "topk",
    "amlp",
    "amlp(toeplitz=True)",
    "conv",
    "gmlp",
    "gru",
    "gru(width=24)",
    "mlp_mixer",
    "synthesizer",
    "synthesizer(dense=factorised)",
    "synthesizer(dense=none, random=full)",
    "synthesizer(dense=none, random=factorised)",
    "synthesizer(random=factorised, dot=True)",
]
"""Counted as they run, looking both ways."""


@pytest.mark.parametrize("kv_heads", [H, 1])
@pytest.mark.parametrize("spec", EXECUTED)
def test_as_they_run(spec: str, kv_heads: int) -> None:
    for n in SIZES:
        layer, x = layer_of(spec, n, kv_heads=kv_heads), torch.randn(1, n, D * H)
        near(counted(lambda layer=layer, x=x: layer(x)), said(layer, n))


@pytest.mark.parametrize("spec", ["reformer(bucket=8, rounds=2)", "routing(clusters=8)", "conv", "gru"])
def test_as_they_run_when_causal(spec: str) -> None:
    for n in SIZES:
        layer, x = layer_of(spec, n, causal=True), torch.randn(1, n, D * H)
        near(counted(lambda layer=layer, x=x: layer(x)), said(layer, n))


@pytest.mark.parametrize("spec", [spec for spec in EXECUTED if layer_of(spec, 160, kv_heads=1).cross])
def test_as_they_read_another_sequence(spec: str) -> None:
    layer, x, source = layer_of(spec, 160, kv_heads=1), torch.randn(1, 96, D * H), torch.randn(1, 160, D * H)
    near(counted(lambda: layer(x, source=source)), said(layer, 96, 160))


STEPS = [
    "cosformer",
    "efficient",
    "linear",
    "performer(features=128)",
    "rfa",
    "rfa(gate=True)",
    "taylor",
    "retention",
    "retention(gate=False)",
    "gated_linear",
    "delta",
    "delta(gate=True)",
    "softmax",
    "entmax",
    "threshold",
    "topk",
    "amlp",
    "gmlp",
    "synthesizer",
    "synthesizer(random=factorised, dot=True)",
]
"""Counted token by token, as their causal equations are written: each token reads a state, or the keys up to itself."""


def by_steps(layer: Mixer, x: Tensor) -> tuple[int, Tensor]:
    cache, outs = layer.new_cache(1), []
    operations = counted(lambda: outs.extend(layer(x[:, i : i + 1], cache=cache) for i in range(x.shape[1])))
    return operations, torch.cat(outs, dim=1)


@pytest.mark.parametrize("kv_heads", [H, 1])
@pytest.mark.parametrize("spec", STEPS)
def test_token_by_token(spec: str, kv_heads: int) -> None:
    for n in (8, 14):
        layer, x = layer_of(spec, n, causal=True, kv_heads=kv_heads), torch.randn(1, n, D * H)
        operations, out = by_steps(layer, x)
        near(operations, said(layer, n))
        torch.testing.assert_close(out, layer(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "features"), [("retention", 0), ("gated_linear", 0), ("delta", 0), ("rfa(features=32, gate=True)", 32)]
)
def test_token_by_token_in_both_directions(spec: str, features: int) -> None:
    """Two passes, but every linear layer and all features once."""
    for n in (8, 14):
        layer, x = layer_of(spec, n, causal=True), torch.randn(1, n, D * H)
        maps = [part for part in layer.modules() if isinstance(part, nn.Linear)]
        once = sum(2 * n * part.in_features * part.out_features for part in maps) + 2 * n * 2 * H * features * D
        near(by_steps(layer, x)[0] + by_steps(layer, x.flip(1))[0] - once, said(layer_of(spec, n), n))


def transformed(x: Tensor) -> tuple[Tensor, int]:
    """The discrete Fourier transform of the last axis of complex numbers, halved again and again, and its operations.

    A complex product takes six operations, a complex sum two.
    """
    n = x.shape[-1]
    if n == 1:
        return x, 0
    (even, first), (odd, second) = transformed(x[..., ::2]), transformed(x[..., 1::2])
    turned = torch.exp(-2j * torch.pi * torch.arange(n // 2, dtype=torch.float64) / n) * odd
    return torch.cat([even + turned, even - turned], dim=-1), first + second + 10 * turned.numel()


def test_fnet_by_hand() -> None:
    """Two rows of real numbers go through one complex transform; of what comes out only half the channels are needed."""
    for n in (256, 512):
        layer, x = layer_of("fnet", n), torch.randn(1, n, D * H, dtype=torch.float64)
        c = D * H
        _, packed = transformed(torch.complex(x[0, ::2], x[0, 1::2]))
        rows, _ = transformed(x[0] + 0j)
        half, over_tokens = transformed(rows[:, : c // 2 + 1].mT)
        torch.testing.assert_close(half.mT.real, layer(x)[0, :, : c // 2 + 1])
        near(packed + over_tokens, said(layer, n))


@pytest.mark.parametrize("spec", BY_HAND)
def test_causal_by_hand(spec: str) -> None:
    for n in (256, 512):
        site = Site(D * H, H, causal=True, max_length=n)
        kind = next(kind for kind in ("attention", "mixer") if spec.partition("(")[0] in names(kind))
        own = build_attention(spec, site) if kind == "attention" else build_mixer(spec, "none", site)
        near(2 * BY_HAND[spec](n), said(own, n))


@pytest.mark.parametrize("causal", [False, True])
def test_aft_without_a_bias_sums_its_keys_once(causal: bool) -> None:
    """A product and a sum for numerator and denominator of each key and channel: no matrix to be counted."""
    layer = build_attention("aft(variant=simple)", Site(D * H, H, causal=causal))
    assert said(layer, 100) == 2 * 100 * D * H


def test_every_method_is_counted() -> None:
    """In the direction it has: none is left out."""
    methods = {name for kind in ("attention", "mixer") for name in names(kind)} - {"multihead"}
    rows = {"longformer", "mla", "complex"}
    both = {spec.partition("(")[0] for spec in EXECUTED} | rows | {"retention", "gated_linear", "delta", "fnet"}
    assert both == methods
    causal = {spec.partition("(")[0] for spec in (*STEPS, *BY_HAND)} | rows | {"reformer", "routing", "conv", "gru"}
    assert causal == {name for name in methods if _causal(name)}
    assert set(PATTERNS) >= {*SLOT_NAMES, *names("pattern")}


def _causal(name: str) -> bool:
    return next(find(kind, name) for kind in ("attention", "mixer") if name in names(kind)).target.causal  # type: ignore[attr-defined]


def test_a_wrong_formula_is_noticed() -> None:
    layer, x = layer_of("performer(features=128)", 96), torch.randn(1, 96, D * H)
    operations, cost = counted(lambda: layer(x)), layer.cost()
    assert cost is not None
    for wrong in (cost.products.replace("2 features", "features", 1), cost.products + " + h n m d"):
        with pytest.raises(AssertionError):
            near(operations, replace(cost, products=wrong).multiply_adds(96))


def test_operators_of_our_own_are_looked_into() -> None:
    """A window costs what its tiles cost, not what the whole mask would; a fused kernel counts as written out."""
    q, k, v = torch.randn(3, 1, 1, 512, D)
    window = counted(lambda: af.attend(q, k, v, pattern=af.Local(8)))
    dense = counted(lambda: af.attend(q, k, v))
    assert dense == 4 * 512**2 * D
    assert 4 * 512 * 17 * D <= window < dense / 4
    tokens = side(512, torch.device("cpu"))
    running = build_attention("linear", Site(D, 1, causal=True))
    states = counted(lambda: running(q, k, v, Context(causal=True, queries=tokens, keys=tokens)))
    assert 4 * 512 * D**2 <= states < dense / 4


def test_repeated_heads_are_no_product() -> None:
    assert counted(lambda: repeat_heads(torch.randn(1, 1, 4, 4), 2)) == 0
