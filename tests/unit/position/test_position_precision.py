"""Phases stay exact far out, in half precision, under autocast, and whatever came before."""

import pytest
import torch
from torch import Tensor

import anyformer as af

PLACES = torch.tensor([[0, 1, 255, 257, 2049, 4097, 32767, 131072, 1_000_000]])
HALF = [torch.bfloat16, torch.float16]
SINCE = ["nezha", "xlnet", "xlnet(clamp=4)", "deberta(span=4)", "kerple", "kerple(kind=power)", "sandwich"]
PHASED = [
    "rope",
    "rope(pairing=interleaved)",
    "sinusoidal(scale_tokens=False)",
    "sinusoidal(layout=t2t, scale_tokens=False)",
]


def placed(spec: str, x: Tensor, places: Tensor) -> Tensor:
    position = af.build_position(spec, af.Site(64, 1)).to(x.dtype)
    if position.name == "rope":
        return position.rotate(x[:, None], x[:, None], places, places)[0][:, 0]
    return position.embed(x, places, None)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("spec", PHASED)
def test_half_precision_at_every_position(spec: str, dtype: torch.dtype, ones: bool) -> None:
    x = (torch.ones(1, 9, 64) if ones else torch.randn(1, 9, 64)).to(dtype)
    exact = placed(spec, x.double(), PLACES)
    for here in (x, x.float()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under_autocast = placed(spec, here, PLACES)
        assert under_autocast.dtype == here.dtype
        assert torch.equal(under_autocast, placed(spec, here, PLACES))
    assert float((placed(spec, x, PLACES).double() - exact).abs().max()) <= 0.02
    assert float((placed(spec, x.float(), PLACES).double() - exact).abs().max()) <= 1e-6


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("shift", [1000, 30000])
def test_products_of_half_precision_queries_and_keys_ignore_a_shift(pairing: str, shift: int) -> None:
    position = af.build_position(f"rope(pairing={pairing})", af.Site(64, 1)).to(torch.bfloat16)
    q, k = torch.randn(2, 1, 1, 9, 64, dtype=torch.bfloat16)
    products = []
    for places in (PLACES, PLACES + shift):
        turned_q, turned_k = position.rotate(q, k, places, places - 3)
        products.append(turned_q.double() @ turned_k.double().mT)
    size = q.double().norm(dim=-1)[..., None] * k.double().norm(dim=-1)[..., None, :]
    assert float(((products[0] - products[1]) / size).abs().max()) < 0.01


def test_float32_angles_are_what_they_say() -> None:
    """The knob rounds: at a million tokens by hundredths of a radian, near the start not at all visibly."""
    x = torch.randn(1, 9, 64)
    gap = (placed("rope(angle_dtype=float32)", x, PLACES) - placed("rope", x, PLACES)).abs().amax(-1)[0]
    assert float(gap[2]) < 1e-4
    assert float(gap[-1]) > 1e-3


@pytest.mark.parametrize("spec", ["rope", "sinusoidal"])
def test_a_result_does_not_depend_on_what_came_before(spec: str) -> None:
    x, places = torch.randn(1, 9, 64), torch.arange(9)[None]
    position = af.build_position(spec, af.Site(64, 1))

    def run(x: Tensor, places: Tensor) -> Tensor:
        if spec == "rope":
            return position.rotate(x[:, None], x[:, None], places, places)[0]
        return position.embed(x, places, None)

    first = run(x, places)
    run(x[:, :3], places[:, :3] + 10**6)
    run(x.bfloat16(), places + 500)
    assert torch.equal(run(x, places), first)


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("spec", ["rope", "alibi", "t5", "shaw", "transformer_xl", *SINCE])
def test_a_layer_in_half_precision_far_out(spec: str, dtype: torch.dtype) -> None:
    layer = af.MultiHead(32, 4, position=spec, causal=True).to(dtype)
    exact = af.MultiHead(32, 4, position=spec, causal=True).double()
    exact.load_state_dict({name: tensor.double() for name, tensor in layer.state_dict().items()})
    x, places = torch.randn(1, 16, 32).to(dtype), torch.arange(16)[None] + 131_072
    out = layer(x, positions=places)
    assert out.dtype == dtype
    assert float((out.double() - exact(x.double(), positions=places)).abs().max()) < 1e-2
