"""The tree is the architecture: imports point down, siblings stay apart, a method is a file, a page and a parity test."""

import ast
import re
from pathlib import Path

import pytest

from anyformer.registry import KINDS, find, names

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anyformer"
# From the ground up; an import may point to the same or an earlier entry only. A tuple is one level.
LEVELS: list[tuple[str, ...]] = [
    ("typing", "errors"),
    ("spec",),
    ("registry", "site"),
    ("cost",),
    ("forms",),
    ("side",),
    ("context",),
    ("pattern", "ops"),
    ("position", "attention", "mixer"),
    ("model",),
    ("classify",),
    ("functional",),
    ("testing", "task", "probe"),
    ("compare",),
    ("cli",),
]
LEVEL = {name: level for level, entries in enumerate(LEVELS) for name in entries}
METHOD_FOLDERS = ("attention", "mixer", "position", "task")
FILES = sorted(PACKAGE.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, as dotted names without `anyformer.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("anyformer."):
            module = node.module.removeprefix("anyformer.")
            found |= {f"{module}.{each.name}" for each in node.names} | {module}
        elif isinstance(node, ast.Import):
            found |= {each.name.removeprefix("anyformer.") for each in node.names if each.name.startswith("anyformer.")}
    return found


def _top(dotted: str) -> str:
    return dotted.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own in ("__init__", "__main__"):
        return
    for dotted in _imports(path):
        assert _top(dotted) in LEVEL, f"{path.name} imports {dotted}, which stands in no level"
        assert LEVEL[_top(dotted)] <= LEVEL[own], f"{path.name} imports upwards: {dotted}"


@pytest.mark.parametrize("folder", METHOD_FOLDERS)
def test_a_method_imports_no_sibling(folder: str) -> None:
    methods = set(names(folder))
    for name in methods:
        path = PACKAGE / folder / f"{name}.py"
        siblings = {
            dotted
            for dotted in _imports(path)
            if dotted.split(".")[:1] == [folder] and dotted.split(".")[1:2] != [name]
        }
        assert not {each.split(".")[1] for each in siblings if "." in each} & methods, f"{name} imports {siblings}"


def test_positions_and_attentions_do_not_know_each_other() -> None:
    for folder, other in (
        ("position", "attention"),
        ("attention", "position"),
        ("position", "mixer"),
        ("attention", "mixer"),
    ):
        for path in (PACKAGE / folder).glob("*.py"):
            assert other not in {_top(dotted) for dotted in _imports(path)}, path


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in names(kind)])
def test_a_method_is_a_file_a_page_and_a_parity_test(kind: str, name: str) -> None:
    method = find(kind, name)
    assert method.name == name
    assert method.summary
    assert method.paper
    assert method.family
    assert len(method.knobs) <= 8
    assert (ROOT / "docs" / "methods" / kind / f"{name}.md").is_file()
    if kind != "task":  # a task is held to its oracle and its published statistics instead
        assert (ROOT / "tests" / "parity" / kind / f"test_{name}.py").is_file()


def test_no_file_and_no_function_has_lost_its_noun() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 350, f"{path} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert length <= 50, f"{path}: {node.name} has {length} lines"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_a_readme_names_every_method(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = [
        f"{kind} {name}" for kind in KINDS for name in names(kind) if name != "multihead" and f"`{name}`" not in text
    ]
    assert not missing


def test_every_page_stands_in_the_list_of_pages() -> None:
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {each.relative_to(ROOT / "docs").as_posix() for each in (ROOT / "docs").rglob("*.md")} == listed
