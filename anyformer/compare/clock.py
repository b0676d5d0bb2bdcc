"""Seconds of calls, and of a fixed matrix product that shows how busy the machine is."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from anyformer.compare.record import Timing

_SIDE = 512  # of the matrix product


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, what it left running on the device included."""
    _synchronise(device)
    started = time.perf_counter()
    call()
    _synchronise(device)
    return time.perf_counter() - started


def timing(seconds: Sequence[float]) -> Timing:
    """Median, quartiles and minimum over rounds."""
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Timing(median=float(median), low=float(low), high=float(high), min=min(seconds), rounds=len(seconds))


def calibrate(device: torch.device) -> float:
    """Seconds of one fixed matrix product; they rise while others use the machine."""
    a = torch.ones(_SIDE, _SIDE, device=device)
    return seconds_of(lambda: a @ a, device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
