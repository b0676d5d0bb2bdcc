"""Browser tests need chromium. Without it they are not collected; where CI=true its absence is a failure."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HERE = Path(__file__).parent

if CHROMIUM is None and os.environ.get("CI") != "true":
    collect_ignore_glob = ["test_*.py"]


sys.path += [str(HERE), str(HERE.parent / "unit" / "compare")]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if CHROMIUM is None:
        pytest.fail("these tests need chromium: apt-get install chromium")
    from chromium import Browser

    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as running:
        yield running
