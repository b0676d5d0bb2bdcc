"""What methods say they cost is what is counted, within 5 %, with the products that torch's counter sees.

Most methods are counted as they run. Where an implementation masks away, pads or chunks more than its equation asks for, a plain
writing of the equation is counted instead, after it gave the same outputs: row by row over the keys that meet, or token by token
from a state. Fourier transforms, which the counter does not see, and causal forms that run under a mask are counted by hand.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.attention.base import Attention
from anyformer.compare.counted import counted
from anyformer.context import Context
from anyformer.mixer.base import Mixer
from anyformer.mixer.complex import Complex
from anyformer.mixer.longformer import Longformer
from anyformer.mixer.mla import MLA
from anyformer.mixer.mlp_mixer import unit_places
from anyformer.model.build import build_attention, build_mixer
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.leaves import SLOT_NAMES
from anyformer.pattern.read import pattern_of
from anyformer.registry import find, names
from anyformer.side import side
from anyformer.site import Site

D, H = 64, 2
SIZES = (96, 160)


def layer_of(spec: str, n: int, *, causal: bool = False, kv_heads: int = H) -> Mixer:
    return build_mixer(spec, "none", Site(D * H, H, causal=causal, kv_heads=kv_heads, max_length=n), bias=False).eval()


def near(operations: float, declared: float) -> None:
    assert operations / 2 == pytest.approx(declared, rel=0.05)


def said(layer: Mixer | Attention, n: int, m: int | None = None) -> int:
    cost = layer.cost()
    assert cost is not None
    return cost.multiply_adds(n, m)


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


@pytest.mark.parametrize("spec", EXECUTED)
def test_as_they_read_another_sequence(spec: str) -> None:
    layer = layer_of(spec, 160, kv_heads=1)
    if layer.cross:
        x, source = torch.randn(1, 96, D * H), torch.randn(1, 160, D * H)
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


def by_rows(products: list[tuple[Tensor, Tensor]], v: Tensor, allowed: Tensor) -> Tensor:
    """Softmax attention `[h n v]` row by row over the keys `[h n m]` that meet; several products are one score, their length."""
    out = v.new_zeros(*allowed.shape[:2], v.shape[-1])
    for head, row in allowed.any(dim=-1).nonzero().tolist():
        met = allowed[head, row]
        scores = torch.stack([k[head, met] @ q[head, row, :, None] for q, k in products])[..., 0]
        score = scores[0] if len(scores) == 1 else scores.norm(dim=0)
        out[head, row] = (torch.softmax(score, dim=-1)[None] @ v[head, met])[0]
    return out


PATTERNS = {
    "softmax": "Full()",
    "local": "local(7)",
    "strided": "strided(8)",
    "dilated": "dilated(4, 4, 3)",
    "block_local": "block_local(8)",
    "global_tokens": "global_tokens([0, 5])",
    "random": "random(5)",
    "per_head": "per_head((Local(7), 1), (Strided(8), 1))",
    "bigbird": "bigbird(block=8, random=1)",
    "sparse_transformer": "sparse_transformer",
    "a union": "Local(3) | Strided(16) | Global([0]) | Random(2)",
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_row_by_row(name: str, causal: bool) -> None:
    spec = PATTERNS[name]
    for n in (24, 40):
        attention = build_attention(spec, Site(D * H, H, causal=causal))
        q, k, v = torch.randn(3, H, n, D)
        allowed = pattern_of(spec).dense(n, heads=H, causal=causal).expand(H, -1, -1)
        if causal:
            allowed = allowed.tril()
        outs: list[Tensor] = []
        operations = counted(lambda: outs.append(by_rows([(q * D**-0.5, k)], v, allowed)))  # noqa: B023  # called here
        near(operations, said(attention, n))
        torch.testing.assert_close(
            outs[0][None], af.attend(q[None], k[None], v[None], pattern=pattern_of(spec), causal=causal)
        )


def heads(x: Tensor, count: int) -> Tensor:
    return x[0].unflatten(-1, (count, -1)).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_longformer_row_by_row(causal: bool) -> None:
    for n in (64, 96):
        layer, x = layer_of("longformer(window=12, max_globals=3)", n, causal=causal), torch.randn(1, n, D * H)
        assert isinstance(layer, Longformer)
        flags = torch.zeros(n, dtype=torch.bool).index_fill(0, torch.tensor([0, 20, 50]), True)
        offset = (torch.arange(n) - torch.arange(n)[:, None]).abs()
        local = ((offset <= 12) | flags).expand(H, n, n)
        wholly = flags[:, None].expand(H, n, n)

        def plain(
            layer: Longformer = layer,
            x: Tensor = x,
            flags: Tensor = flags,
            rows: Tensor = local,
            whole: Tensor = wholly,
        ) -> Tensor:
            q, k, v = (heads(each(x), H) for each in (layer.q, layer.k, layer.v))
            out = by_rows([(q * D**-0.5, k)], v, rows.tril() if causal else rows)
            if layer.for_globals is not None:
                q, k, v = (heads(layer.for_globals[name](x[:, flags] if name == "q" else x), H) for name in "qkv")
                out[:, flags] = by_rows([(q * D**-0.5, k)], v, whole[:, flags])
            return layer.o(out.transpose(0, 1).flatten(1))

        outs: list[Tensor] = []
        near(counted(lambda: outs.append(plain())), said(layer, n))  # noqa: B023  # called here
        torch.testing.assert_close(outs[0][None], layer(x, global_mask=flags[None]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["mla", "mla(content=32, latent=48, q_latent=40)"])
def test_mla_row_by_row(spec: str, causal: bool) -> None:
    for n in (24, 40):
        layer, x = layer_of(spec, n, causal=causal), torch.randn(1, n, D * H)
        assert isinstance(layer, MLA)
        allowed = torch.ones(H, n, n, dtype=torch.bool)

        def plain(layer: MLA = layer, x: Tensor = x, allowed: Tensor = allowed) -> Tensor:
            q = heads(layer.q(layer.q_norm(layer.q_down(x))), H)
            latents, shared = layer.down(x).split([layer.latent, D], dim=-1)
            k, v = heads(layer.up(layer.norm(latents)), H).chunk(2, dim=-1)
            k = torch.cat([k, shared.expand(H, -1, -1)], dim=-1)
            out = by_rows([(q * q.shape[-1] ** -0.5, k)], v, allowed.tril() if causal else allowed)
            return layer.o(out.transpose(0, 1).flatten(1))

        outs: list[Tensor] = []
        near(counted(lambda: outs.append(plain())), said(layer, n))  # noqa: B023  # called here
        torch.testing.assert_close(outs[0][None], layer(x))


@pytest.mark.parametrize("causal", [False, True])
def test_complex_row_by_row(causal: bool) -> None:
    for n in (24, 40):
        layer, x = layer_of("complex", n, causal=causal), torch.randn(1, n, D * H)
        assert isinstance(layer, Complex)
        allowed = torch.ones(H, n, n, dtype=torch.bool)

        def plain(layer: Complex = layer, x: Tensor = x, allowed: Tensor = allowed) -> Tensor:
            parts = x.unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)  # real parts, imaginary parts

            def projected(map: nn.Module) -> Tensor:
                real, imaginary = (heads(each[None], H) for each in map(parts))
                return torch.cat([real, imaginary], dim=-1)

            assert layer.k is not None
            q, k, v = (projected(each) for each in (layer.q, layer.k, layer.v))
            real, imaginary = k.chunk(2, dim=-1)
            q = q * D**-0.5
            out = by_rows(
                [(q, k), (q, torch.cat([imaginary, -real], dim=-1))], v, allowed.tril() if causal else allowed
            )
            out = torch.stack([part.transpose(0, 1).flatten(1) for part in out.chunk(2, dim=-1)])
            return torch.cat([*layer.o(out)], dim=-1)

        outs: list[Tensor] = []
        near(counted(lambda: outs.append(plain())), said(layer, n))  # noqa: B023  # called here


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


def _aft(n: int, rank: int) -> int:
    return sum(2 * (i + 1) * D * H + n * rank for i in range(n))


def _compressed(n: int, stride: int) -> int:
    """The convolutions, and for each token the slots that end at it or before, and the learned one."""
    return 2 * H * n * D**2 + sum(2 * H * D * ((i + 1) // stride + 1) for i in range(n))


def _sinkhorn(n: int, block: int) -> int:
    """For each token its own block up to itself and, after the first, a sorted one, mixed from the blocks before."""
    reads = sum(2 * H * D * (i % block + 1 + block * (i >= block)) for i in range(n))
    return reads + sum(2 * H * row * block * D for row in range(n // block))


def _learned_blocks(n: int, group: int, keep: int) -> int:
    """For each token its own group up to itself and up to keep - 1 groups before; for each group a score of those before."""
    reads = sum(2 * H * D * (i % group + 1 + group * min(keep - 1, i // group)) for i in range(n))
    return reads + sum(H * row * D + 2 * H * D**2 for row in range(n // group))


def _mlp_mixer(n: int, units: int) -> int:
    """For each unit the places up to its own, and for each place the units up to its own."""
    at = unit_places(n, units, torch.device("cpu")).tolist()
    return D * H * sum((place + 1) + (n - place) for place in at)


BY_HAND: dict[str, Callable[[int], int]] = {
    "aft(rank=8)": lambda n: _aft(n, 8),
    "aft(variant=conv)": lambda n: _aft(n, 0),
    "compressed": lambda n: _compressed(n, 4),
    "sinkhorn(block=8)": lambda n: _sinkhorn(n, 8),
    "learned_blocks(group=8, keep=3)": lambda n: _learned_blocks(n, 8, 3),
    "mlp_mixer": lambda n: _mlp_mixer(n, n),
}
"""Causal forms that run under a mask, or numbers without a matrix: what is left when the equation is read term by term."""


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
