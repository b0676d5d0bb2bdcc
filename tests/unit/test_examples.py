"""Examples and the README's Python run as they are written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    done = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.parametrize(
    "page", ["README.md", "README.zh-CN.md", "docs/extend.md", "docs/model.md", "docs/extend_context.md"]
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
