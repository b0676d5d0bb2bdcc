"""CoPE against x-transformers, and pair by pair with windows and padding."""

import math
import warnings

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError

with warnings.catch_warnings():  # it uses torch.jit.script, which torch deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from x_transformers.x_transformers import CoPE


def built(positions: int, *, heads: int = 2, width: int = 4) -> torch.nn.Module:
    position = af.build_position(f"cope(positions={positions})", af.Site(heads * width, heads, causal=True))
    torch.nn.init.normal_(position.table)
    return position


@pytest.mark.parametrize("positions", [1, 3, 20])
def test_outputs_and_gradients_of_x_transformers(positions: int) -> None:
    ours, theirs = built(positions), CoPE(4, 2, positions)
    theirs.pos_emb.data.copy_(ours.table.detach())
    q, k, v, probe = torch.randn(4, 2, 2, 9, 4)
    inputs = [each.requires_grad_() for each in (q, k, v)]
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / 2).masked_fill(future, -torch.finfo(torch.float32).max)
    expected = (logits + theirs(q, logits)).masked_fill(future, -torch.inf).softmax(-1) @ v
    found = af.attend(q, k, v, causal=True, position=ours)
    results = [
        (out, *torch.autograd.grad((out * probe).sum(), (*inputs, table)))
        for out, table in ((found, ours.table), (expected, theirs.pos_emb))
    ]
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6 * max(1.0, float(other.detach().abs().max())))


def by_pair(q: Tensor, k: Tensor, v: Tensor, table: Tensor, meets: list[list[int]]) -> Tensor:
    """One head; `meets` lists the keys of each query, in their order."""
    rows, last = [], len(table) - 1
    for i, keys in enumerate(meets):
        logits = [float(q[i] @ k[j]) / math.sqrt(q.shape[1]) for j in keys]
        gates = [1 / (1 + math.exp(-each)) for each in logits]
        scored = []
        for at in range(len(keys)):
            count = min(sum(gates[at:]), last)
            below = math.floor(count)
            vector = table[below] * (1 - count + below) + table[min(below + 1, last)] * (count - below)
            scored.append(logits[at] + float(q[i] @ vector))
        rows.append(torch.tensor(scored, dtype=torch.float64).softmax(0) @ v[keys])
    return torch.stack(rows)


def test_a_window_counts_within_the_window() -> None:
    position = built(3).double()
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    meets = [list(range(max(0, i - 2), i + 1)) for i in range(8)]
    found = af.attend(q, k, v, causal=True, pattern=af.Local(2), position=position).detach()
    for head in range(2):
        expected = by_pair(q[0, head], k[0, head], v[0, head], position.table.detach(), meets)
        torch.testing.assert_close(found[0, head], expected, rtol=0, atol=1e-10)


def test_hidden_keys_and_other_documents_count_for_nothing() -> None:
    position = built(4).double()
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    keep, documents = torch.tensor([[1, 0, 1, 1, 1, 1]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
    meets = [[0], [0], [0, 2], [0, 2, 3], [4], [4, 5]]
    found = af.attend(q, k, v, causal=True, attention_mask=keep, document_ids=documents, position=position).detach()
    for head in range(2):
        expected = by_pair(q[0, head], k[0, head], v[0, head], position.table.detach(), meets)
        torch.testing.assert_close(found[0, head], expected, rtol=0, atol=1e-10)


def test_it_starts_without_a_term() -> None:
    position = af.build_position("cope", af.Site(8, 2, causal=True))
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    torch.testing.assert_close(
        af.attend(q, k, v, causal=True, position=position), af.attend(q, k, v, causal=True), rtol=0, atol=1e-6
    )


def test_refusals() -> None:
    with pytest.raises(IncompatibleError, match="cope is defined for causal attention only"):
        af.MultiHead(8, 2, position="cope")
    message = (
        r"softmax cannot use cope \(row\): its pattern leaves out keys between query and key; use local\(...\) or no"
    )
    with pytest.raises(IncompatibleError, match=message):
        af.MultiHead(8, 2, attention="strided(2)", position="cope", causal=True)
    q = torch.randn(1, 2, 6, 4)
    for pattern in (af.Strided(2), af.Local(2) | af.Global([0]), af.PerHead((af.Local(2), 1), (af.Strided(2), 1))):
        with pytest.raises(IncompatibleError, match=message):
            af.attend(q, q, q, causal=True, pattern=pattern, position=built(3))
    heads = af.PerHead((af.Local(2), 1), (af.Local(4), 1))
    assert af.attend(q, q, q, causal=True, pattern=heads, position=built(3)).shape == q.shape
