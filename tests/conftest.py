"""Every test runs on one thread, with shapes and types checked at run time.

Tests marked `plain` (most laws, compiling, exporting, messages about wrong types) run in a second process without those checks:
`ANYFORMER_PLAIN=1 pytest`.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["ANYFORMER_COSTS"] = "built-in"  # the same ways on every machine
PLAIN = os.environ.get("ANYFORMER_PLAIN") == "1"

if not PLAIN:
    import random

    shared, random.getrandbits = random.getrandbits, random.Random(0).getrandbits
    # looks at a random item of every tuple; with numbers of its own it leaves the shared ones alone
    import beartype.door  # noqa: F401

    random.getrandbits = shared
    from jaxtyping import install_import_hook

    install_import_hook("anyformer", "beartype.beartype")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if bool(item.get_closest_marker("plain")) == PLAIN]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def naive() -> Callable[[str], ModuleType]:
    """fla's plain torch reference of an operator, loaded by path: the package as a whole needs a GPU compiler."""

    def load(operator: str) -> ModuleType:
        root = importlib.util.find_spec("fla")
        assert root is not None
        assert root.origin is not None
        path = Path(root.origin).parent / "ops" / operator / "naive.py"
        spec = importlib.util.spec_from_file_location(f"fla_{operator}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
