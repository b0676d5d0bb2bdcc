"""The highest memory of a call, measured where it can be."""

import ctypes
import gc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import nn


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that `call` needs beyond what is held before it: the highest use during the call minus that of its start.

    On a CUDA device the allocator's own count; on Linux the kernel's high-water mark, reset before the call; elsewhere samples of
    the resident size, 1 ms apart. Run it once before, so that buffers which stay are not counted.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    _give_back()
    try:
        held = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to the resident size
    except OSError:  # not Linux, or a container that forbids it
        return _sampled(call)
    call()
    return max(_status("VmHWM") - held, 0)


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the weights, the buffers and the optimiser's state."""
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers(), *moments))


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def _give_back() -> None:
    """Return freed memory to the system, else the call would reuse it unseen."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _sampled(call: Callable[[], object]) -> int:
    process, done = psutil.Process(), threading.Event()
    held = highest = process.memory_info().rss

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return highest - held
