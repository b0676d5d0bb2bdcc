"""PaTH against flash-linear-attention's reference, and against its product of matrices, pair by pair."""

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError
from anyformer.position import path
from anyformer.side import side


def drawn(n: int, m: int, width: int = 4) -> tuple[Tensor, ...]:
    q, k, w = (torch.randn(1, 2, size, width, dtype=torch.float64) for size in (n, m, m))
    return q, k, F.normalize(w, dim=-1), 2 * torch.rand(1, 2, m, dtype=torch.float64)


def written_out(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """One matrix for each token, one product for each pair."""
    (b, h, n, d), m = q.shape, k.shape[2]
    out = q.new_zeros(b, h, n, m)
    for head in range(h):
        steps = [
            torch.eye(d, dtype=q.dtype) - beta[0, head, t] * torch.outer(w[0, head, t], w[0, head, t]) for t in range(m)
        ]
        for i in range(n):
            seen = q[0, head, i]
            for j in range(i + m - n, -1, -1):
                out[0, head, i, j] = k[0, head, j] @ seen
                seen = steps[j] @ seen
    return out


@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 7), (1, 9), (3, 8), (70, 70), (5, 131), (66, 200), (3, 2)])
def test_products_of_reflections(n: int, m: int) -> None:
    inputs = [each.requires_grad_() for each in drawn(n, m)]
    seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    found = path.products(*inputs).masked_fill(~seen, 0.0)
    expected = written_out(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    if m <= 70:
        probe = torch.randn_like(found)
        results = [
            torch.autograd.grad((out * probe).sum(), inputs, materialize_grads=True) for out in (found, expected)
        ]
        torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def test_their_order_matters() -> None:
    q, k, w, beta = drawn(5, 5)
    turned = written_out(q, k, w.flip(2), beta.flip(2))
    assert float((path.products(q, k, w, beta) - turned).abs().max()) > 0.1


def layer(attention: str = "softmax", *, dtype: torch.dtype = torch.float32, taps: int = 3) -> af.MultiHead:
    spec = f"path(rank=5, taps={taps})"
    return af.MultiHead(16, 4, kv_heads=2, attention=attention, position=spec, causal=True).to(dtype)


@pytest.mark.parametrize("n", [9, 70])
def test_outputs_and_gradients_of_flash_linear_attention(naive: Callable[[str], ModuleType], n: int) -> None:
    built, probe = layer(), torch.randn(2, n, 16)
    x = torch.randn(2, n, 16, requires_grad=True)
    projected = [each(x).unflatten(-1, (-1, 4)) for each in (built.q, built.k, built.v)]
    facts = built.position.prepare(x, side(n, x.device), None)
    w, beta = facts[..., :8].unflatten(-1, (2, 4)), facts[..., 8:]
    attend = naive("path_attn").naive_path_attn
    theirs = built.o(attend(*projected, w, beta, torch.zeros(2, n, 4), scale=0.5, chunk_size=16).flatten(2))
    asked = (x, built.position.taps, built.position.up.weight, built.position.strength.weight)
    results = [(out, *torch.autograd.grad((out * probe).sum(), asked)) for out in (built(x), theirs)]
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=2e-6, atol=2e-6 * max(1.0, float(other.detach().abs().max())))


@pytest.mark.parametrize("taps", [1, 3])
def test_directions_and_strengths(taps: int) -> None:
    built = layer(dtype=torch.float64, taps=taps)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    facts = built.position.prepare(x, side(6, x.device), None).detach()[0]
    raw = (x[0] @ built.position.down.weight.T @ built.position.up.weight.T).detach()
    weights = built.position.taps.detach()
    for t in range(6):
        mixed = sum(weights[:, back] * raw[t - back] for back in range(min(taps, t + 1)))
        for head in range(2):
            u = [value / (1 + math.exp(-value)) for value in mixed[4 * head : 4 * head + 4].tolist()]
            length = math.sqrt(sum(value * value for value in u))
            assert facts[t, 4 * head : 4 * head + 4].tolist() == pytest.approx([value / length for value in u])
            score = float((built.position.strength(x[0, t])[head]).detach())
            assert float(facts[t, 8 + head]) == pytest.approx(2 / (1 + math.exp(-score)))


def test_documents_of_one_row_are_apart_in_one_pass_and_step_by_step() -> None:
    built, x = layer(dtype=torch.float64), torch.randn(1, 9, 16, dtype=torch.float64)
    documents = torch.tensor([[4] * 5 + [6] * 4])
    alone = torch.cat([built(x[:, :5]), built(x[:, 5:])], dim=1)
    torch.testing.assert_close(built(x, document_ids=documents), alone, rtol=0, atol=1e-10)
    cache = built.new_cache(1)
    steps = [built(x[:, t : t + 1], document_ids=documents[:, : t + 1], cache=cache) for t in range(9)]
    torch.testing.assert_close(torch.cat(steps, dim=1), alone, rtol=0, atol=1e-10)


def test_a_window_with_a_cache_that_forgets() -> None:
    built, x, steps = layer("local(2)", dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64), []
    cache = built.new_cache(2)
    for t in range(9):
        steps.append(built(x[:, t : t + 1], cache=cache))
    assert cache.slots["facts"].shape[1] < 9
    torch.testing.assert_close(torch.cat(steps, dim=1), built(x), rtol=0, atol=1e-10)


def test_refusals() -> None:
    with pytest.raises(IncompatibleError, match="path is defined for causal attention only"):
        af.MultiHead(8, 2, position="path")
    with pytest.raises(IncompatibleError, match=r"softmax cannot use path \(row\): its pattern leaves out keys"):
        af.MultiHead(8, 2, attention="strided(2)", position="path", causal=True)
