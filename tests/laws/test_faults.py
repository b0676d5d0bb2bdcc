"""A law that cannot break proves nothing: each is shown a method that breaks it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anyformer import registry
from anyformer.attention.base import Attention
from anyformer.attention.softmax import Softmax, attend
from anyformer.context import Context
from anyformer.ops.softmax import repeat_heads
from anyformer.testing import laws

FAULTS: dict[str, tuple[Callable, str, str]] = {}


def fault(law: str, position: str = "none") -> Callable[[Callable], Callable]:
    """Name the law that a forward breaks."""

    def keep(forward: Callable) -> Callable:
        FAULTS[forward.__name__] = (forward, law, position)
        return forward

    return keep


@fault("D01")
def sees_the_future(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    out = attend(q, k, v, context)
    return out + 1e-3 * repeat_heads(v, q.shape[1])[:, :, -1:] if q.shape[2] == v.shape[2] else out


@fault("D02")
def sees_padding(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    return attend(q, k, v, context) + 1e-6 * repeat_heads(v, q.shape[1]).mean(dim=2, keepdim=True)


@fault("D07")
def counts_the_keys(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    return attend(q, k, v, context) * (1 + 1e-3 * q.shape[2])


@fault("D10")
def draws_in_eval(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    return attend(q, k, v, context) * (1 + 1e-3 * torch.rand(()))


@fault("D12")
def wants_even_lengths(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    assert q.shape[2] % 2 == 0
    return attend(q, k, v, context)


@fault("D16")
def indexes_slots(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    return attend(q, k, v, context) * torch.linspace(1, 2, q.shape[2], dtype=q.dtype)[:, None]


@fault("P01", "rope")
def reads_the_position(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    return attend(q, k, v, context) * (1 + context.queries.positions[:, None, :, None].to(q.dtype) / 100)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_breaks_its_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    body, law, position = FAULTS[name]

    class Faulty(Attention):
        summary, paper, family = "a fault", "none", ("full",)
        forms = Softmax.forms
        decodes = "cache"

        def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
            return body(q, k, v, context)

    Faulty.name = name
    registry.register(Faulty)
    case = laws.Case(name, position, causal=law in ("D01", "D07"))
    results = {each.law.name: each.status for each in laws.examine(case)}
    assert results[law] == "broken", results
