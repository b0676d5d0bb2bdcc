"""What lectures on efficient attention claim, measured."""

import pytest
import torch

import anyformer as af
from anyformer.compare.counted import counted
from anyformer.mixer.synthesizer import Synthesizer
from anyformer.model.build import build_mixer
from anyformer.model.explain import calls_of, weights
from anyformer.ops.linear import linear_attention

KEY, VALUE = 24, 40  # d and d'
CROSSING = 2 * KEY * VALUE // (KEY + VALUE)


@pytest.mark.parametrize("n", [CROSSING // 2, CROSSING, 4 * CROSSING])
def test_without_softmax_the_order_of_the_product_is_free(n: int) -> None:
    """(d + d') N^2 multiplications with the weights first, 2 d d' N with the values first: equal at N = 2 d d' / (d + d')."""
    q, k = torch.randn(2, n, KEY, dtype=torch.float64)
    v = torch.randn(n, VALUE, dtype=torch.float64)
    torch.testing.assert_close((q @ k.T) @ v, q @ (k.T @ v), rtol=1e-10, atol=1e-10)
    weights_first, values_first = counted(lambda: (q @ k.T) @ v), counted(lambda: q @ (k.T @ v))
    assert weights_first == 2 * (KEY + VALUE) * n**2
    assert values_first == 2 * 2 * KEY * VALUE * n
    assert (values_first < weights_first) == (n > CROSSING)
    assert (values_first == weights_first) == (n == CROSSING)


def test_linear_attention_takes_the_cheaper_order() -> None:
    n = 8 * CROSSING
    q, k = torch.rand(2, 1, 1, n, KEY, dtype=torch.float64)
    v = torch.randn(1, 1, n, VALUE, dtype=torch.float64)
    out = linear_attention(q, k, v, causal=False, normalise=False)
    torch.testing.assert_close(out, q @ k.mT @ v, rtol=1e-10, atol=1e-10)
    sums = counted(lambda: linear_attention(q, k, v, causal=False, normalise=False))
    assert 2 * KEY * VALUE * n <= sums / 2 <= 1.05 * 2 * KEY * VALUE * n


@pytest.mark.parametrize("causal", [False, True])
def test_a_random_synthesizer_weighs_all_inputs_alike(causal: bool) -> None:
    """The dense one makes its weights of each token, yet never compares two."""
    one, other = torch.randn(2, 1, 12, 32)
    site = af.Site(32, 2, causal=causal, max_length=16)
    for spec, alike in (("synthesizer(dense=none, random=full)", True), ("synthesizer(dense=full)", False)):
        layer = build_mixer(spec, "none", site)
        assert isinstance(layer, Synthesizer)
        places = torch.arange(12)[None]
        seen = [torch.softmax(layer.logits(x, None, places, 12), dim=-1) for x in (one, other)]
        assert torch.equal(*seen) == alike
        mixed = torch.cat([one[:, :6], other[:, 6:]], dim=1)  # half of the tokens of each
        torch.testing.assert_close(
            torch.softmax(layer.logits(mixed, None, places, 12), dim=-1)[0, :, :6], seen[0][0, :, :6]
        )


def test_a_pure_global_token_lets_the_others_meet_nobody_else() -> None:
    n = 10
    assert af.Global([3]).dense(n)[0].sum(dim=1).tolist() == [1, 1, 1, n, 1, 1, 1, 1, 1, 1]
    layer = af.MultiHead(16, 2, attention="Global([3])").eval()
    x = torch.randn(1, n, 16)
    (call,) = calls_of(layer, lambda: layer(x))
    taken = weights(call, range(n), None)[0]
    others = [row for row in range(n) if row != 3]
    torch.testing.assert_close(taken[:, others, 3], torch.ones(2, n - 1))
    assert (taken[:, 3] > 0).all()
    moved = x.clone()
    moved[:, 7] += 1.0
    with torch.no_grad():
        changed = (layer(moved) != layer(x)).any(dim=-1)[0].tolist()
        assert [at for at, each in enumerate(changed) if each] == [
            3
        ]  # not even 7 itself: it reads the global token only
        twice = (layer(layer(moved)) != layer(layer(x))).any(dim=-1)[0]
    assert twice.all()  # through the global token, in two layers
