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
start, extra = peak(), []
for n in (256, 32768, 65536):
    part = [x[:, :, :n].detach().requires_grad_() for x in tensors]
    attend(*part, n)[0].sum().backward()
    extra.append(peak() - start)
print((extra[2] - extra[0]) / (extra[1] - extra[0]), (extra[2] - extra[0]) * 1024 / (3 * tensors[0].nbytes))
"""


@pytest.mark.parametrize("layout", ["window", "blocks"])
def test_peak_memory_is_linear(layout):
    done = subprocess.run([sys.executable, "-c", PROBE, layout], capture_output=True, text=True, check=True)
    growth, inputs = map(float, done.stdout.split())
    assert growth < 2.3, "twice the length"
    assert inputs < 4, "peak above the inputs, in units of the three inputs"
