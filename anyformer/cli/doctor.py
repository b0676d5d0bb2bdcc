"""`anyformer doctor`: what this machine has, and what each missing part would bring."""

import importlib.metadata
import platform
import sys

import psutil
import torch
from rich.console import Console
from rich.table import Table

import anyformer
from anyformer.attention import _costs
from anyformer.attention._costs import Costs, costs, costs_file, keep

_EXTRAS = {
    "transformers": ("hf", "attentions inside Hugging Face models"),
    "datasets": ("hf", "tasks on Hugging Face data sets"),
    "torchdiffeq": ("ode", "gradients of floater(adjoint=True)"),
    "ray": ("ray", "comparisons spread over many machines"),
    "scikit-learn": ("vision", "the task digits"),
}
_VERSIONS = ("torch", "numpy", "scipy", "lightning-fabric", "safetensors", "matplotlib", "plotly")


def run(measure: bool) -> int | None:
    """Print the report, after measuring the costs of the ways through attention where that is asked for."""
    console = Console()
    if measure:
        with console.status("timing the ways through attention"):
            keep(_costs.measure())
    machine = Table(title="machine", title_justify="left", title_style="bold", box=None, show_header=False)
    for name, value in _machine().items():
        machine.add_row(name, value)
    console.print(machine)
    extras = Table(title="extras", title_justify="left", title_style="bold", box=None, show_header=False)
    for package, (extra, brings) in _EXTRAS.items():
        found = _version(package)
        state = found or f"missing; pip install 'anyformer\\[{extra}]'"
        extras.add_row(package, state, f"{'brings' if found else 'would bring'} {brings}")
    console.print(extras)
    paths = Table(title="fast paths", title_justify="left", title_style="bold", box=None, show_header=False)
    for name, state in _fast_paths().items():
        paths.add_row(name, state)
    console.print(paths)
    return 0


def _version(package: str) -> str:
    """The installed version of a package; "" where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _machine() -> dict[str, str]:
    memory = psutil.virtual_memory()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS)
    return {
        "anyformer": f"{anyformer.__version__}, Python {platform.python_version()} ({sys.executable})",
        "packages": versions,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": f"{psutil.cpu_count(logical=True)} logical cores, torch uses {torch.get_num_threads()} threads",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        "devices": ", ".join(_devices()),
    }


def _devices() -> list[str]:
    cuda = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    metal = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *cuda, *metal]


def _fast_paths() -> dict[str, str]:
    amx = torch.cpu._is_amx_tile_supported()
    cuda = torch.cuda.is_available()
    return {
        "fused attention (SDPA)": "present",
        "bfloat16 on AMX": "present"
        if amx
        else "missing; this processor has no AMX tiles, bfloat16 runs without a gain",
        "FlexAttention on a GPU": "present"
        if cuda
        else "missing; needs a CUDA device, attention runs on the processor",
        'choice of the way (impl="auto")': _choice(costs()),
    }


def _choice(found: Costs) -> str:
    source = (
        f"measured, {costs_file()}" if found != Costs() else "built in; anyformer doctor --measure times this machine"
    )
    return (
        f"a pair in a tile costs {found.tile:g} pairs of the fused kernel; "
        f"tiles for all pairs with a bias from {found.biased} tokens on, with learned terms from {found.learned} ({source})"
    )
