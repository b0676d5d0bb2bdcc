"""What a number was measured on."""

import hashlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import psutil
import torch

import anyformer
from anyformer.compare.record import Environment

_PACKAGES = ("torch", "numpy", "scipy", "lightning-fabric", "einops", "jaxtyping", "safetensors")


def environment(device: torch.device, calibration: tuple[float, ...] = ()) -> Environment:
    """This machine and these versions.

    Args:
        calibration: seconds of a fixed matrix product before each round of timing; a busy machine shows in their spread.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    versions |= {"anyformer": anyformer.__version__, "python": platform.python_version()}
    facts = {
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=True) or 0,
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    fixed = repr(sorted((facts | versions | {"memory": round(facts["memory"] / 2**30)}).items()))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Environment(
        fingerprint=hashlib.blake2b(fixed.encode(), digest_size=8).hexdigest(),
        versions=versions,
        notes={"instructions": torch.backends.cpu.get_cpu_capability()},
        load=load,
        shared=load is not None and load > 1.5 * facts["cores"],
        calibration=calibration,
        **facts,
    )


def busy() -> str:
    """What to say where other work keeps the machine busy before anything of ours runs, else ""."""
    load, cores = psutil.getloadavg()[0], psutil.cpu_count(logical=True) or 1
    if load <= cores:
        return ""
    return f"the machine is busy (load {load:.1f} on {cores} cores): times will be unsteady, least with --threads 1"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor()
