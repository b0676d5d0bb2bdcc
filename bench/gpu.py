"""Softmax over patterns on a GPU: checked against the reference, then timed against dense attention.

    python bench/gpu.py          # on a GPU, under four minutes
    python bench/gpu.py --cpu    # the checks only, small and without compiling

A line for each check begins with PASS or FAIL; the exit code is 1 if any failed, 2 without a GPU.
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.pattern.read import pattern_of
from anyformer.spec import parse

CHECKS = (  # pattern, position, causal, padded
    ("Local(100)", None, False, False),
    ("Local(100)", "alibi", True, True),
    ("Local(100)", "t5", False, False),
    ("Local(64) | Global([0])", "rope", False, True),
    ("Strided(16)", "alibi", True, False),
    ("bigbird(block=64, random=2)", None, False, False),
    ("PerHead((Local(64), 2), (Full(), 2))", None, True, False),
)
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # of the largest entry
TIMED = ("Local(256)", "Local(256) | Global([0])", "bigbird(block=64, random=3)")
LENGTHS = (1024, 4096, 16384, 65536)
SECONDS = 200  # no new timing begins later


def check(case: tuple[str, str | None, bool, bool], dtype: torch.dtype, impl: str, n: int, device: str) -> bool:
    """Print one line: forward and gradients against the reference in float32 on the same numbers."""
    text, name, causal, padded = case
    torch.manual_seed(0)
    shapes = ((2, 4, n, 64), (2, 2, n, 64), (2, 2, n, 64))
    given = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    position = None if name is None else af.build_position(name, af.Site(256, 4, kv_heads=2, causal=causal)).to(device)
    learned = [] if position is None else list(position.parameters())
    facts = {"pattern": pattern_of(parse(text)), "causal": causal, "position": position}
    facts["attention_mask"] = (torch.arange(n) < torch.tensor([[n], [n - n // 5]])).to(device) if padded else None
    differentiate = device == "cuda" or impl != "flex"
    seed = torch.randn(shapes[0], device=device)

    def results(impl: str, dtype: torch.dtype) -> list[Tensor]:
        with torch.set_grad_enabled(differentiate):
            inputs = [x.detach().to(dtype).requires_grad_(differentiate) for x in given]
            out = af.attend(*inputs, impl=impl, **facts)
            grads = torch.autograd.grad(out, [*inputs, *learned], seed.to(dtype)) if differentiate else ()
        return [out.detach(), *grads]

    try:
        found, expected = results(impl, dtype), results("reference", torch.float32)
        error = max(
            float((ours.float() - theirs).abs().max() / theirs.abs().max())
            for ours, theirs in zip(found, expected, strict=True)
        )
        passed, note = error <= BOUNDS[dtype], f"error {error:.1e}"
    except Exception as failure:  # one broken check must not hide the others
        passed, note = False, f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"
    what = "forward, gradients" if differentiate else "forward"
    print(f"{'PASS' if passed else 'FAIL'}  {impl:4}  {str(dtype)[6:]:8}  {text}  {name}  {what}: {note}", flush=True)
    return passed


def milliseconds(call, repeats: int = 10) -> float:
    """The shortest of some calls, on the device's own clock."""
    call(), call()
    best = float("inf")
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


def time_lengths(deadline: float) -> None:
    """Print milliseconds, forward and with gradients, of patterns and of dense attention (batch 1, 8 heads of 64, bfloat16)."""
    for n in LENGTHS:
        q, k, v = (torch.randn(1, 8, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        calls = {"dense": lambda: F.scaled_dot_product_attention(q, k, v)}  # noqa: B023  # called before the next round
        for text in TIMED:
            pattern = pattern_of(parse(text))
            calls[text] = lambda pattern=pattern: af.attend(q, k, v, pattern=pattern)  # noqa: B023
        dense = None
        for name, call in calls.items():
            if time.monotonic() > deadline:
                print(f"SKIP  {n}  {name}: out of time", flush=True)
                continue
            with torch.no_grad():
                forward = milliseconds(call)
            both = milliseconds(lambda: torch.autograd.grad(call().sum(), (q, k, v)))  # noqa: B023
            dense = (forward, both) if dense is None else dense
            ratio = f"{dense[0] / forward:.1f}x / {dense[1] / both:.1f}x dense"
            print(f"TIME  {n}  {name}: {forward:.3f} / {both:.3f} ms, {ratio}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the checks only, small and without compiling")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        print("no GPU here; --cpu runs the checks without one", file=sys.stderr)
        return 2
    device, n = ("cpu", 150) if arguments.cpu else ("cuda", 1000)
    if arguments.cpu:
        torch.compiler.set_stance("force_eager")
    began = time.monotonic()
    passed = [check(case, dtype, impl, n, device) for case in CHECKS for dtype in BOUNDS for impl in ("flex", "auto")]
    if not arguments.cpu:
        time_lengths(began + SECONDS)
    print(f"{sum(passed)} of {len(passed)} checks passed in {time.monotonic() - began:.0f} s")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
