"""Compiling and exporting the fast paths and their composites."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from anyformer.ops.composite import window_attention_composite
from anyformer.ops.window import window_attention

pytestmark = pytest.mark.plain
WINDOW = {"left": 5, "right": 6, "scale": 0.3}


class Layer(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.bias = torch.nn.Parameter(torch.randn(2, 12))

    def forward(self, q, k, v, keep):
        return self.attend(q, k, v, **WINDOW, bias=self.bias, keep=keep)[0]


def inputs(n):
    return *(torch.randn(1, 2, n, 8) for _ in range(3)), torch.rand(1, n) < 0.8


@pytest.mark.parametrize("attend", [window_attention, window_attention_composite])
def test_exports_with_any_length(attend):
    layer, length = Layer(attend), torch.export.Dim.DYNAMIC
    exported = torch.export.export(
        layer, inputs(40), dynamic_shapes=({2: length}, {2: length}, {2: length}, {1: length})
    )
    for n in (3, 40, 77, 200):
        arguments = inputs(n)
        torch.testing.assert_close(exported.module()(*arguments), layer(*arguments), rtol=0, atol=1e-6)


def test_compiles_whole_with_at_most_two_graphs():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = Layer(window_attention)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (20, 33, 64, 100, 7):
        arguments = inputs(n)
        expected, result = (torch.autograd.grad(f(*arguments).sum(), layer.bias) for f in (layer, compiled))
        torch.testing.assert_close(result, expected)
    assert counter.frame_count <= 2
