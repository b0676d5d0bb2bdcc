"""Attentions over the pairs that meet: a plain writing of the equation, row by row, is counted after it gave the same outputs."""

import pytest
import torch
from counting import PATTERNS, D, H, layer_of, near, said
from torch import Tensor, nn

import anyformer as af
from anyformer.compare.counted import counted
from anyformer.mixer.complex import Complex
from anyformer.mixer.longformer import Longformer
from anyformer.mixer.mla import MLA
from anyformer.model.build import build_attention
from anyformer.pattern.read import pattern_of
from anyformer.site import Site


def by_rows(products: list[tuple[Tensor, Tensor]], v: Tensor, allowed: Tensor) -> Tensor:
    """Softmax attention `[h n v]` row by row over the keys `[h n m]` that meet; several products are one score, their length."""
    out = v.new_zeros(*allowed.shape[:2], v.shape[-1])
    for head, row in allowed.any(dim=-1).nonzero().tolist():
        met = allowed[head, row]
        scores = torch.stack([k[head, met] @ q[head, row, :, None] for q, k in products])[..., 0]
        score = scores[0] if len(scores) == 1 else scores.norm(dim=0)
        out[head, row] = (torch.softmax(score, dim=-1)[None] @ v[head, met])[0]
    return out


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
