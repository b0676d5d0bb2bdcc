"""Lists of blocks as one node of a graph: equal to the dense reference, whole when compiled, and no more than two graphs."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import anyformer as af
from anyformer.attention._listed import Listed, listed, listed_forward
from anyformer.context import Context
from anyformer.forms import Form
from anyformer.pattern.read import pattern_of
from anyformer.position.bind import bind
from anyformer.side import side

PATTERNS = ("bigbird(block=8)", "Strided(5)", "PerHead((Local(3) | Global([-1]), 1), (Block(9), 1))")


def _inputs(n: int, m: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(2, h, t, 6, dtype=dtype, requires_grad=True) for h, t in ((2, n), (1, m), (1, m))]


def _t5() -> torch.nn.Module:
    position = af.build_position("t5", af.Site(16, 2)).double()
    torch.nn.init.normal_(next(position.parameters()))
    return position


@pytest.mark.parametrize(("n", "m"), [(50, 50), (20, 41)])
@pytest.mark.parametrize("text", PATTERNS)
def test_the_node_equals_the_reference(text: str, n: int, m: int) -> None:
    pattern, position, (q, k, v) = pattern_of(text), _t5(), _inputs(n, m, torch.float64)
    tokens = side(m, q.device)
    queries = tokens.part(m - n, m)
    encoding = bind(position, (Form.TOEPLITZ,), queries, tokens)
    context = Context(causal=False, queries=queries, keys=tokens, pattern=pattern, encoding=encoding, softcap=3.0)
    out, lse = listed(Listed(pattern, 8), q, k, v, context, 0.4, want_lse=True)
    expected = af.attend_with_lse(q, k, v, pattern=pattern, position=position, scale=0.4, softcap=3.0)
    torch.testing.assert_close((out, lse), expected, rtol=1e-10, atol=1e-10)
    probes, leaves = [torch.randn_like(each) for each in expected], (q, k, v, *position.parameters())
    for found, wanted in zip(*(torch.autograd.grad(x, leaves, probes) for x in ((out, lse), expected)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.plain
def test_opcheck() -> None:
    q, k, v = _inputs(20, 41, torch.float64)
    keep, bias = torch.rand(2, 41) < 0.8, torch.randn(2, 60, dtype=torch.float64, requires_grad=True)
    lengths, documents = keep.sum(1), torch.zeros(2, 41, dtype=torch.long)
    plain = ("Strided(5) | Global([-1])", 8, 0, False, 0.4, 2.0, 0.2, True)
    torch.library.opcheck(listed_forward, (q, k, v, keep, documents, bias, lengths, torch.tensor(5), *plain))
    torch.library.opcheck(listed_forward, (q, k, v, *[None] * 5, "Strided(5)", 8, 0, True, 0.4, 0.0, 0.0, False))


@pytest.mark.plain
def test_a_padded_call_compiles_whole_and_at_most_twice() -> None:
    torch._dynamo.reset()
    pattern, counter = pattern_of("Strided(7) | Global([0])"), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, keep: af.attend(q, q, q, pattern=pattern, attention_mask=keep), backend=counter, fullgraph=True
    )
    for n in (520, 640, 1001):
        q, keep = torch.randn(2, 2, n, 8, requires_grad=True), torch.arange(n) < torch.tensor([[n], [n - 9]])
        expected = af.attend(q, q, q, pattern=pattern, attention_mask=keep, impl="reference")
        found = compiled(q, keep)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(out.sin().sum(), q)[0] for out in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("Strided(4)", 30),
        ("Strided(4)", 700),
        ("bigbird(block=8)", 600),
        ("Local(3) | Strided(9) | Random(2, seed=0)", 900),
    ],
)
def test_what_inference_leaves_behind_serves_training(text: str, n: int) -> None:
    layer, x = af.MultiHead(16, 2, attention=text), torch.randn(1, n, 16)
    with torch.inference_mode():
        told = layer(x)
    out = layer(x)
    out.sum().backward()
    torch.testing.assert_close(out, told.clone(), rtol=0, atol=0)
