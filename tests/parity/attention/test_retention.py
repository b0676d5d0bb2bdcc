"""retention against fla's parallel reference and the published recurrence, with its norm and gate, and in both directions."""

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
BARE = "retention(norm=False, gate=False)"


def layer(spec: str, position: str = "none", **facts: object) -> MultiHead:
    built = af.MultiHead(32, 4, attention=spec, position=position, **facts).double()
    built.o = torch.nn.Identity()  # the attention's own output, heads merged
    return built


def heads(built: MultiHead, x: Tensor) -> list[Tensor]:
    shared = built.site.groups
    q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (built.q, built.k, built.v))
    return [q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)]


def decayed(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    places = torch.arange(q.shape[2], dtype=torch.float64)
    gamma = (1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64)))[:, None, None]
    weights = q @ k.mT * 8**-0.5 * gamma ** (places[:, None] - places).abs()
    return (weights.tril() if causal else weights) @ v


def agree(out: Tensor, truth: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, truth)), **TIGHT)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_equals_fla(naive: Callable[[str], ModuleType], kv_heads: int) -> None:
    built = layer(BARE, causal=True, kv_heads=kv_heads).float()
    x = torch.randn(2, 75, 32, requires_grad=True)
    out, theirs = built(x), naive("retention").naive_retention(*heads(built, x)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, theirs, rtol=2e-6, atol=2e-6)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, theirs)), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [BARE, "retention"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["none", "rope", "transformer_xl"])
def test_equals_the_quadratic_form(position: str, causal: bool, spec: str) -> None:
    built = layer(spec, position, causal=causal)
    x = torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = heads(built, x)
    places = torch.arange(70)[None]
    if position == "rope":
        q, k = built.position.rotate(q, k, places, places)
    elif position == "transformer_xl":
        q, k = built.position.augment(q, k, places, places)
    truth = decayed(q, k, v, causal)
    if spec == "retention":
        truth = truth / (truth.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        truth = truth * F.silu(built.attention.get_submodule("gate")(x)).unflatten(-1, (4, 8)).transpose(1, 2)
    agree(built(x), truth.transpose(1, 2).flatten(2), x)


def test_outputs_do_not_depend_on_the_scale_of_values() -> None:
    built, x = layer("retention", causal=True), torch.randn(1, 20, 32, dtype=torch.float64)
    out = built(x)
    built.v.weight.data.mul_(0.1)
    built.v.bias.data.mul_(0.1)
    torch.testing.assert_close(built(x), out, rtol=1e-5, atol=1e-6)


def test_steps_equal_the_published_recurrence() -> None:
    built, x = layer(BARE, causal=True), torch.randn(1, 9, 32, dtype=torch.float64)
    cache, state = built.new_cache(1), torch.zeros(1, 4, 8, 8, dtype=torch.float64)
    q, k, v = heads(built, x)
    gamma = (1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64)))[:, None, None]
    for t in range(9):
        state = gamma * state + k[:, :, t, :, None] * v[:, :, t, None]
        right = (q[:, :, t : t + 1] * 8**-0.5) @ state
        torch.testing.assert_close(built(x[:, t : t + 1], cache=cache), right.transpose(1, 2).flatten(2), **TIGHT)


def test_documents_of_one_row_do_not_meet() -> None:
    for causal in (False, True):
        built, x = layer("retention", causal=causal), torch.randn(1, 12, 32, dtype=torch.float64)
        out = built(x, document_ids=torch.tensor([[3] * 5 + [1] * 7]))
        torch.testing.assert_close(out, torch.cat([built(x[:, :5]), built(x[:, 5:])], dim=1), rtol=1e-8, atol=1e-8)


def test_what_it_refuses() -> None:
    with pytest.raises(IncompatibleError, match="retention mixes one sequence with itself and takes no source"):
        layer("retention")(torch.zeros(1, 3, 32).double(), source=torch.zeros(1, 3, 32).double())
    attention = af.build_attention("retention", af.Site(32, 4, causal=True))
    q, tokens = torch.randn(1, 4, 5, 8), side(5, torch.device("cpu"))
    with pytest.raises(SpecError, match="retention reads its gates from the tokens"):
        attention(q, q, q, Context(causal=True, queries=tokens, keys=tokens))
