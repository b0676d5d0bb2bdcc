"""Memory grows with the length, not with its square."""

import subprocess
import sys

import pytest

PROBE = """
import re, sys, torch
from anyformer.ops.blocks import block_attention
from anyformer.ops.window import window_attention

def window(q, k, v, n):
    bias = torch.zeros(2, 129, requires_grad=True)
    return window_attention(q, k, v, left=64, right=64, bias=bias, scale=0.2)

def blocks(q, k, v, n):
    rows = torch.arange(n // 64)
    keys = (rows[:, None] + torch.arange(-1, 2)) % len(rows)
    offsets = torch.arange(len(rows) + 1)[None] * 3
    return block_attention(q, k, v, block=64, offsets=offsets, keys=keys.flatten(), scale=0.2)

def peak():  # not getrusage, which begins at the parent's
    return int(re.search("VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
attend = {"window": window, "blocks": blocks}[sys.argv[1]]
tensors = [torch.randn(1, 2, 65536, 32, requires_grad=True) for _ in range(3)]
start, n = peak(), int(sys.argv[2])
part = [x[:, :, :n].detach().requires_grad_() for x in tensors]
attend(*part, n)[0].sum().backward()
print((peak() - start) * 1024, 3 * tensors[0].nbytes)
"""


def measured(layout: str, n: int) -> tuple[int, int]:
    """Bytes above the inputs, and of the inputs; in a process of its own, since what a shorter call frees leaves holes."""
    done = subprocess.run([sys.executable, "-c", PROBE, layout, str(n)], capture_output=True, text=True, check=True)
    extra, inputs = map(int, done.stdout.split())
    return extra, inputs


@pytest.mark.parametrize("layout", ["window", "blocks"])
def test_peak_memory_is_linear(layout):
    small, half, whole = (measured(layout, n) for n in (256, 32768, 65536))
    growth, inputs = (whole[0] - small[0]) / (half[0] - small[0]), (whole[0] - small[0]) / whole[1]
    assert growth < 2.3, "twice the length"
    assert inputs < 4, "peak above the inputs, in units of the three inputs"
