"""delta against fla's recurrence and its closed form, with its norm and gate, turned by a rotary encoding, and both ways."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.multihead import MultiHead
from anyformer.side import side

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
BARE = "delta(norm=False)"


def layer(spec: str, position: str = "none", **facts: object) -> MultiHead:
    built = af.MultiHead(32, 4, attention=spec, position=position, **facts).double()
    built.o = torch.nn.Identity()  # the attention's own output, heads merged
    return built


def heads(built: MultiHead, x: Tensor, most: float = 1.0) -> list[Tensor]:
    """q, k, v and beta, each with the query heads."""
    shared = built.site.groups
    q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (built.q, built.k, built.v))
    q, k = (F.silu(each) / F.silu(each).norm(dim=-1, keepdim=True) for each in (q, k))
    beta = most * torch.sigmoid(built.attention.get_submodule("beta")(x)).mT
    return [q, *(each.repeat_interleave(shared, 1) for each in (k, v, beta))]


def closed(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, own: int) -> Tensor:
    """tril(Q K^T, own) (I + tril(diag(beta) K K^T, -1))^-1 diag(beta) V."""
    beta = beta[..., None]
    system = torch.eye(k.shape[2], dtype=k.dtype) + (beta * (k @ k.mT)).tril(-1)
    return (q @ k.mT).tril(own) @ torch.linalg.inv(system) @ (beta * v) * 8**-0.5


def agree(out: Tensor, truth: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, truth)), **TIGHT)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_equals_fla(naive: Callable[[str], ModuleType], kv_heads: int) -> None:
    built = layer(BARE, causal=True, kv_heads=kv_heads).float()
    x = torch.randn(2, 75, 32, requires_grad=True)
    theirs = naive("delta_rule").delta_rule_recurrence(*(each.detach() for each in heads(built, x)))[0]
    torch.testing.assert_close(built(x), theirs.transpose(1, 2).flatten(2), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("spec", [BARE, "delta(negative=True, gate=True)"])
@pytest.mark.parametrize("position", ["none", "rope"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_the_closed_form(kv_heads: int, causal: bool, position: str, spec: str) -> None:
    built = layer(spec, position, causal=causal, kv_heads=kv_heads)
    x = torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    q, k, v, beta = heads(built, x, 2.0 if "negative" in spec else 1.0)
    if position == "rope":
        places = torch.arange(70)[None]
        q, k = built.position.rotate(q, k, places, places)
    truth = closed(q, k, v, beta, 0)
    if not causal:
        truth = truth + closed(*(each.flip(2) for each in (q, k, v, beta)), -1).flip(2)
    if spec != BARE:
        truth = truth / (truth.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        truth = truth * F.silu(built.attention.get_submodule("gate")(x)).unflatten(-1, (4, 8)).transpose(1, 2)
    agree(built(x), truth.transpose(1, 2).flatten(2), x)


def test_documents_of_one_row_do_not_meet() -> None:
    for causal in (False, True):
        built, x = layer("delta", causal=causal), torch.randn(1, 12, 32, dtype=torch.float64)
        out = built(x, document_ids=torch.tensor([[3] * 5 + [1] * 7]))
        torch.testing.assert_close(out, torch.cat([built(x[:, :5]), built(x[:, 5:])], dim=1), rtol=1e-8, atol=1e-8)


def test_what_it_refuses() -> None:
    with pytest.raises(IncompatibleError, match="delta mixes one sequence with itself and takes no source"):
        layer("delta")(torch.zeros(1, 3, 32).double(), source=torch.zeros(1, 3, 32).double())
    attention = af.build_attention("delta", af.Site(32, 4, causal=True))
    q, tokens = torch.randn(1, 4, 5, 8), side(5, torch.device("cpu"))
    with pytest.raises(SpecError, match="delta reads its gates from the tokens"):
        attention(q, q, q, Context(causal=True, queries=tokens, keys=tokens))
