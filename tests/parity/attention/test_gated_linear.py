"""gated_linear against fla's step by step reference and its quadratic form, with its norm and gate, and in both directions."""

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

TIGHT = {"rtol": 1e-10, "atol": 1e-11}
BARE = "gated_linear(rank=3, norm=False, gate=False)"


def layer(spec: str, **facts: object) -> MultiHead:
    built = af.MultiHead(32, 4, attention=spec, **facts).double()
    built.o = torch.nn.Identity()  # the attention's own output, heads merged
    return built


def heads(built: MultiHead, x: Tensor) -> list[Tensor]:
    """q, k, v and the log of the rates, each with the query heads."""
    shared = built.site.groups
    rate = F.logsigmoid(built.attention.get_submodule("rate")(x)) / 16
    q, *others = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (built.q(x), built.k(x), built.v(x), rate))
    return [q, *(each.repeat_interleave(shared, 1) for each in others)]


def agree(out: Tensor, truth: Tensor, x: Tensor, tolerance: dict = TIGHT) -> None:
    torch.testing.assert_close(out, truth, **tolerance)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, truth)), **tolerance)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_equals_fla(naive: Callable[[str], ModuleType], kv_heads: int) -> None:
    built = layer(BARE, causal=True, kv_heads=kv_heads).float()
    x = torch.randn(2, 75, 32, requires_grad=True)
    theirs = _recurrent(naive("gla"), *(each.transpose(1, 2) for each in heads(built, x)))
    torch.testing.assert_close(built(x), theirs, rtol=2e-5, atol=2e-5)


def _recurrent(peer: ModuleType, q: Tensor, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
    return peer.naive_recurrent_gla(q.detach(), k.detach(), v.detach(), fade.detach())[0].flatten(2)


@pytest.mark.parametrize("spec", [BARE, "gated_linear"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_the_quadratic_form(kv_heads: int, causal: bool, spec: str) -> None:
    built = layer(spec, causal=causal, kv_heads=kv_heads)
    x = torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    q, k, v, fade = heads(built, x)
    place = fade.cumsum(2)
    decay = torch.exp(-(place[:, :, :, None] - place[:, :, None]).abs())
    weights = torch.einsum("bhnd,bhmd,bhnmd->bhnm", q * 8**-0.5, k, decay)
    truth = (weights.tril() if causal else weights) @ v
    if spec == "gated_linear":
        truth = truth / (truth.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        truth = truth * F.silu(built.attention.get_submodule("gate")(x)).unflatten(-1, (4, 8)).transpose(1, 2)
    agree(built(x), truth.transpose(1, 2).flatten(2), x, {"rtol": 1e-9, "atol": 1e-10})


def test_documents_of_one_row_do_not_meet() -> None:
    for causal in (False, True):
        built, x = layer("gated_linear", causal=causal), torch.randn(1, 12, 32, dtype=torch.float64)
        out = built(x, document_ids=torch.tensor([[3] * 5 + [1] * 7]))
        torch.testing.assert_close(out, torch.cat([built(x[:, :5]), built(x[:, 5:])], dim=1), rtol=1e-8, atol=1e-8)


def test_what_it_refuses() -> None:
    with pytest.raises(IncompatibleError, match="gated_linear mixes one sequence with itself and takes no source"):
        layer("gated_linear")(torch.zeros(1, 3, 32).double(), source=torch.zeros(1, 3, 32).double())
    attention = af.build_attention("gated_linear", af.Site(32, 4, causal=True))
    q, tokens = torch.randn(1, 4, 5, 8), side(5, torch.device("cpu"))
    with pytest.raises(SpecError, match="gated_linear reads its gates from the tokens"):
        attention(q, q, q, Context(causal=True, queries=tokens, keys=tokens))
