"""Complex attention against torch's complex numbers, and the laws of both products."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.complex import Complex, modulus
from anyformer.model.build import build_mixer

DIM, HEADS, WIDTH = 8, 2, 4


def built(knobs: str = "", position: str = "none", *, causal: bool = False, kv_heads: int | None = None) -> Complex:
    site = af.Site(DIM, HEADS, causal=causal, kv_heads=kv_heads, head_dim=WIDTH)
    mixer = build_mixer(f"complex({knobs})", position, site).double().eval()
    assert isinstance(mixer, Complex)
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return mixer


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, dim=-1))


def as_real(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], dim=-1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def brute(mixer: Complex, x: Tensor, *, causal: bool, turns: Tensor | None = None) -> Tensor:
    """The equation in complex128, one head after the other.

    Args:
        turns: Complex[n width/2], what rope multiplies the pairs of each part by.
    """
    z = as_complex(x)
    n = x.shape[1]

    def projected(name: str) -> Tensor:
        linear = getattr(mixer, name)
        return z @ linear.weight.mT.to(torch.complex128) + linear.bias * (1 + 1j)

    def turned(part: Tensor) -> Tensor:
        """Real vectors whose halves are the pairs that rope turns."""
        return part if turns is None else as_real(as_complex(part) * turns)

    q, k, v = (projected(name) for name in "qkv")
    heads = []
    for head in range(HEADS):
        place = head // (HEADS // mixer.site.kv_heads)
        own, other, value = (
            part[..., at * WIDTH : (at + 1) * WIDTH] for part, at in ((q, head), (k, place), (v, place))
        )
        own, other = (torch.complex(turned(part.real), turned(part.imag)) for part in (own, other))
        score = (own.conj() if mixer.conjugate else own) @ other.mT
        logits = score.abs() / WIDTH**0.5
        if causal:
            logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        heads.append(torch.softmax(logits, dim=-1).to(torch.complex128) @ value)
    merged = torch.cat(heads, dim=-1)
    return as_real(merged @ mixer.o.weight.mT.to(torch.complex128) + mixer.o.bias * (1 + 1j))


@pytest.mark.parametrize("position", ["none", "rope"])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("conjugate", [True, False])
def test_equals_complex_numbers(conjugate: bool, causal: bool, kv_heads: int, position: str) -> None:
    mixer = built(f"conjugate={conjugate}", position, causal=causal, kv_heads=kv_heads)
    waves = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = torch.arange(7)[:, None] * waves
    turns = torch.polar(torch.ones_like(angles), angles) if position == "rope" else None
    mine, other = (each.clone().requires_grad_() for each in [drawn(2, 7, DIM)] * 2)
    got, expected = mixer(mine), brute(mixer, other, causal=causal, turns=turns)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    weights = drawn(2, 7, DIM)
    names = [name for name, _ in mixer.named_parameters()]
    found = torch.autograd.grad((got * weights).sum(), [mine, *mixer.parameters()])
    wanted = torch.autograd.grad((expected * weights).sum(), [other, *mixer.parameters()])
    for name, one, two in zip(["x", *names], found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_equals_complex_numbers_in_single_precision() -> None:
    mixer = built().float()
    x = torch.randn(2, 7, DIM)
    torch.testing.assert_close(mixer(x).double(), brute(mixer.double(), x.double(), causal=False), rtol=0, atol=2e-5)


@pytest.mark.parametrize("frequencies", ["frequencies=dimension", "frequencies=both, vocab=7"])
def test_what_the_length_of_a_product_knows_of_positions(frequencies: str) -> None:
    """Of word-shared frequencies the difference with the conjugate and the sum without; of each word's own, neither."""
    position = af.build_position(f"complex_order({frequencies})", af.Site(DIM, 1)).double()
    torch.nn.init.normal_(position.frequencies)
    q, k, tokens = drawn(1, 5, DIM), drawn(1, 6, DIM), torch.tensor([[0, 1, 2, 3, 4, 5]])
    places = torch.arange(6)[None]

    def pairs(conjugate: bool, q_by: int, k_by: int) -> Tensor:
        placed = position.embed(q, places[:, :5] + q_by, tokens[:, :5]), position.embed(k, places + k_by, tokens)
        return modulus(placed[0][:, None], placed[1][:, None], conjugate=conjugate)

    both_ways = {(True, 13): "difference", (False, -13): "sum"}
    for conjugate, by in both_ways:
        start = pairs(conjugate, 20, 20)
        same = torch.allclose(start, pairs(conjugate, 33, 20 + by), rtol=0, atol=1e-10)
        assert same == (frequencies == "frequencies=dimension")
        assert not torch.allclose(start, pairs(conjugate, 33, 20 - by), rtol=0, atol=1e-2)


@pytest.mark.parametrize("conjugate", [True, False])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_what_turns_both_parts_alike_is_relative(pairing: str, conjugate: bool) -> None:
    mixer = built(f"conjugate={conjugate}", f"rope(pairing={pairing})")
    x, places = drawn(1, 6, DIM), torch.arange(6)[None]
    torch.testing.assert_close(mixer(x, positions=places), mixer(x, positions=places + 1000), rtol=0, atol=1e-9)


def test_projections_decide_whether_embedded_waves_are_relative() -> None:
    """Real matrices that mix channels of different frequencies lose the law; where channels stay apart it holds."""
    site = af.Site(DIM, 1, head_dim=DIM // 2)
    mixer = build_mixer("complex", "none", site, bias=False).double()
    assert isinstance(mixer, Complex)
    position = af.build_position("complex_order", site).double()
    x, places = drawn(1, 6, DIM), torch.arange(6)[None]

    def weights(by: int) -> Tensor:
        z = position.embed(x, places + by, None)
        q, k = (as_real(as_complex(z) @ each.weight.mT.to(torch.complex128)) for each in (mixer.q, mixer.k))
        return modulus(q[:, None], k[:, None], conjugate=True)

    assert not torch.allclose(weights(0), weights(9), rtol=0, atol=1e-3)
    for each in (mixer.q, mixer.k):
        torch.nn.init.eye_(each.weight)
    torch.testing.assert_close(weights(0), weights(9), rtol=0, atol=1e-6)  # frequencies begin in float32


@pytest.mark.parametrize("conjugate", [True, False])
def test_the_length_has_a_gradient_at_zero(conjugate: bool) -> None:
    q, k = torch.zeros(1, 1, 2, 4, requires_grad=True), torch.ones(1, 1, 3, 4, requires_grad=True)
    length = modulus(q, k, conjugate=conjugate)
    assert float(length.detach().max()) < 1e-18
    for gradient in torch.autograd.grad(length.sum(), [q, k]):
        assert not gradient.any()


def test_gradient_of_the_length() -> None:
    q, k = drawn(1, 2, 3, 4).requires_grad_(), drawn(1, 2, 5, 4).requires_grad_()
    for conjugate in (True, False):
        assert torch.autograd.gradcheck(lambda q, k, own=conjugate: modulus(q, k, conjugate=own), (q, k))


def test_patterns_and_biases_see_the_same_scores() -> None:
    whole, local = built(position="alibi"), built("attention=local(2)", "alibi")
    local.load_state_dict(whole.state_dict())
    x = drawn(1, 9, DIM)
    heads = whole(x)
    assert not torch.allclose(heads, local(x), rtol=0, atol=1e-3)
    torch.testing.assert_close(built_like(whole, "attention=local(9)")(x), heads, rtol=0, atol=1e-10)
    torch.testing.assert_close(built_like(whole, "attention=topk(9)")(x), heads, rtol=0, atol=1e-10)


def built_like(mixer: Complex, knobs: str) -> Complex:
    other = built(knobs, mixer.position.name)
    other.load_state_dict(mixer.state_dict())
    return other


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("complex", "ok"),
        ("complex(attention=local(4))", "ok"),
        ("complex(attention=bigbird(block=4))", "ok"),
        ("complex(attention=reformer)", "ok"),
        ("complex(attention=linformer)", "abs"),
        ("complex(attention=nystrom)", None),
        ("complex(attention=linear)", None),
        ("complex(attention=aft)", None),
    ],
)
def test_which_attentions_weigh_lengths(attention: str, expected: str | None) -> None:
    if expected is not None:
        assert af.check(attention, "complex_order").kind == "ok"
        assert af.check(attention, "rope").kind == expected
        return
    with pytest.raises(IncompatibleError, match=r"reads no score of a single pair.* use softmax, a pattern"):
        af.check(attention, "complex_order")


def test_lengths_over_mixed_keys() -> None:
    """Linformer: the same equation over learned mixtures of keys and values."""
    mixer = built("attention=linformer(rank=3)")
    x = drawn(2, 7, DIM)
    first, second = (mix[:, :7].to(torch.complex128) for mix in mixer.attention.mixes)  # h n r
    heads = {
        name: (
            as_complex(x) @ getattr(mixer, name).weight.mT.to(torch.complex128) + getattr(mixer, name).bias * (1 + 1j)
        )
        for name in "qkv"
    }
    q, k, v = (heads[name].unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for name in "qkv")
    k, v = (torch.einsum("bhnd,hnr->bhrd", part, mix) for part, mix in ((k, first), (v, second)))
    weights = torch.softmax((q.conj() @ k.mT).abs() / WIDTH**0.5, dim=-1).to(torch.complex128)
    merged = (weights @ v).transpose(1, 2).flatten(2)
    expected = as_real(merged @ mixer.o.weight.mT.to(torch.complex128) + mixer.o.bias * (1 + 1j))
    torch.testing.assert_close(mixer(x), expected, rtol=0, atol=1e-10)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="complex: real and imaginary parts need an even dim, got 5"):
        build_mixer("complex", "none", af.Site(5, 1))
    with pytest.raises(IncompatibleError, match=r"complex cannot use shaw.*such as complex_order, rope or alibi"):
        af.check("complex", "shaw")
    with pytest.raises(SpecError, match=r"attention.*expected an attention such as softmax, local\(64\) or reformer"):
        af.check("complex(attention=3)", "none")
    with pytest.raises(SpecError, match="no attention named 'sofmax'"):
        af.check("complex(attention=sofmax)", "none")
