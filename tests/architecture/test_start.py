"""What starting costs, and that the command line's options are a decision."""

import subprocess
import sys

import typer

from anyformer.cli.main import app


def _fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_help_and_names_do_not_import_torch() -> None:
    code = """
import sys
import anyformer
from anyformer.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
import anyformer.registry as registry
registry.names("position")
print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "False"
    assert "compare" in done.stdout


def test_every_public_name_resolves() -> None:
    code = "import anyformer; print(all(getattr(anyformer, name) is not None for name in anyformer.__all__))"
    assert _fresh(code).strip() == "True"


def test_options_are_frozen() -> None:
    command = typer.main.get_command(app)
    found = {
        name: sorted(option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts))
        for name, verb in command.commands.items()
    }
    assert found == OPTIONS


OPTIONS = {
    "compare": [
        "--attention",
        "--baseline",
        "--budget",
        "--data",
        "--device",
        "--force",
        "--items",
        "--lengths",
        "--memory",
        "--model",
        "--out",
        "--position",
        "--precision",
        "--retry-failed",
        "--seeds",
        "--steps",
        "--task",
        "--threads",
        "--timeout",
    ],
    "bench": [
        "--attention",
        "--batch",
        "--both",
        "--causal",
        "--dtype",
        "--head-dim",
        "--heads",
        "--lengths",
        "--out",
        "--peer",
        "--position",
        "--seconds",
        "--threads",
        "--what",
    ],
    "report": ["--baseline", "folder"],
    "list": ["--both", "--causal", "--matrix", "--reasons", "kind", "wildcard"],
    "show": ["--both", "--causal", "--heads", "--length", "--lengths", "--out", "spec"],
    "check": ["--both", "--causal", "attention", "position"],
    "probe": ["--depths", "--out", "--quick", "--seeds", "--size", "--steps", "experiment"],
    "doctor": ["--measure"],
}
