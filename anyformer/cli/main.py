"""The command line: one file a verb, imported when it runs, so that help costs no torch."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from anyformer.errors import IncompatibleError, SpecError, StoreError, TaskError

app = typer.Typer(
    name="anyformer",
    help="Any attention x any position encoding, compared honestly on quality, speed and memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SEVERAL = ("--attention", "--position", "--task", "--data", "--lengths", "--peer", "--depths")
"""Options that take several values in a row: `--attention softmax linear`."""


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeat an option for each of its values: `--position none rope` becomes `--position none --position rope`."""
    spreading, result = "", []
    for argument in arguments:
        if argument.startswith("-") and not argument[1:2].isdigit():
            option = argument.split("=", 1)[0]
            spreading = option if option in SEVERAL and "=" not in argument else ""
            result.append(argument)
            fresh = True
        elif spreading and not fresh:
            result += [spreading, argument]
        else:
            result.append(argument)
            fresh = False
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake of the user's ends with one message and exit code 2."""
    try:
        app(spread(sys.argv[1:] if arguments is None else arguments))
    except (SpecError, IncompatibleError, TaskError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _verb(name: str, *arguments: object) -> None:
    raise typer.Exit(import_module(f"anyformer.cli.{name}").run(*arguments) or 0)


@app.command()
def compare(
    attention: Annotated[list[str] | None, typer.Option(help="specs of attentions, several after one option")] = None,
    position: Annotated[list[str] | None, typer.Option(help="specs of position encodings")] = None,
    task: Annotated[list[str] | None, typer.Option(help="specs of tasks: text, mqar, listops, digits")] = None,
    data: Annotated[list[str] | None, typer.Option(help="files and folders of your own text")] = None,
    model: Annotated[str, typer.Option(help="sizes shared by all, for example 'model(dim=128, depth=4)'")] = "model()",
    seeds: Annotated[int, typer.Option(min=1, help="repetitions with other weights and another order of the data")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="training steps of every trial, instead of a budget")] = None,
    budget: Annotated[
        str, typer.Option(help="time for everything; all trials then train on equally many tokens")
    ] = "3m",
    lengths: Annotated[list[int] | None, typer.Option(min=1, help="tokens at which to score and to time")] = None,
    items: Annotated[int, typer.Option(min=1, help="test items scored at each length")] = 96,
    out: Annotated[
        str, typer.Option(help="folder of the results; the same folder goes on where it stopped")
    ] = "runs/first",
    timeout: Annotated[str, typer.Option(help="longest time of one trial; 0: no limit")] = "0",
    memory: Annotated[float, typer.Option(min=0, help="most memory of one trial in GiB; 0: no limit")] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps")] = "auto",
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed, ...")] = "32-true",
    threads: Annotated[int, typer.Option(min=0, help="processor threads; 0: torch's choice")] = 0,
    baseline: Annotated[str | None, typer.Option(help="method that the others are compared with")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run failed trials again")] = False,
    force: Annotated[bool, typer.Option("--force", help="mix results on different data in one folder")] = False,
) -> None:
    """Train a grid of (attention x position) and report it."""
    lists = [attention or [], position or [], task or [], data or []]
    rest = (items, out, timeout, memory, device, precision, threads, baseline, retry_failed, force)
    _verb("compare", *lists, model, seeds, steps, budget, lengths or [], *rest)


@app.command()
def bench(
    attention: Annotated[list[str] | None, typer.Option(help="specs of attentions, several after one option")] = None,
    position: Annotated[list[str] | None, typer.Option(help="specs of position encodings")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="hf-longformer, hf-bigbird, lucidrains-local, lucidrains-linear")
    ] = None,
    lengths: Annotated[list[int] | None, typer.Option(min=1, help="tokens at which to time")] = None,
    heads: Annotated[int, typer.Option(min=1, help="heads")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="width of a head")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="sequences at once")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--both", help="look back only, or in both directions")] = False,
    what: Annotated[str, typer.Option(help="attention: on q, k and v; layer: with its projections")] = "attention",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    threads: Annotated[int, typer.Option(min=0, help="processor threads; 0: torch's choice")] = 0,
    seconds: Annotated[float, typer.Option(help="about how long the rounds of one length take")] = 20.0,
    out: Annotated[str, typer.Option(help="a new folder for the results; runs/bench-DATE-TIME if left out")] = "",
) -> None:
    """Find the length from which an attention is faster than dense attention on this machine."""
    lists = [attention or [], position or [], peer or [], lengths or []]
    _verb("bench", *lists, heads, head_dim, batch, causal, what, dtype, threads, seconds, out)


@app.command()
def report(
    folder: Annotated[str, typer.Argument(help="a folder that compare wrote")],
    baseline: Annotated[str | None, typer.Option(help="method that the others are compared with")] = None,
) -> None:
    """Write a run's table, chart and page again."""
    _verb("report", folder, baseline)


@app.command("list")
def list_(
    kind: Annotated[
        str, typer.Argument(help="attention, position, task, mixer or pattern; all of them if left out")
    ] = "",
    wildcard: Annotated[str, typer.Argument(help="names to show, for example 'big*'")] = "*",
    matrix: Annotated[
        bool, typer.Option("--matrix", help="which position encodings compose with which attentions")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal/--both", help="the matrix for causal or for bidirectional models")
    ] = False,
    reasons: Annotated[bool, typer.Option("--reasons", help="say why each refused pair is refused")] = False,
) -> None:
    """List methods by family, or print the composition matrix."""
    _verb("list", kind, wildcard, matrix, causal, reasons)


@app.command()
def show(
    spec: Annotated[str, typer.Argument(help="a method or a pattern, for example bigbird or 'Local(64)|Global([0])'")],
    length: Annotated[int, typer.Option(min=1, help="tokens of the picture; an encoding is built for so many")] = 128,
    causal: Annotated[
        bool, typer.Option("--causal/--both", help="draw the causal or the bidirectional form, and say what that costs")
    ] = False,
    heads: Annotated[
        int | None, typer.Option(min=1, help="heads to draw and to count; 1, of an encoding 4, if left out")
    ] = None,
    lengths: Annotated[list[int] | None, typer.Option(min=1, help="tokens at which to say what it costs")] = None,
    out: Annotated[
        str, typer.Option(help="where to write the picture (PNG); pattern.png or NAME.png if left out")
    ] = "",
) -> None:
    """Show what a method is, what it costs and what it looks like, or draw a pattern."""
    _verb("show", spec, length, causal, heads, lengths or [], out)


@app.command()
def check(
    attention: Annotated[str, typer.Argument(help="spec of an attention, a mixer or a pattern")],
    position: Annotated[str, typer.Argument(help="spec of a position encoding")] = "none",
    causal: Annotated[
        bool | None, typer.Option("--causal/--both", help="one direction only; both are checked if left out")
    ] = None,
) -> None:
    """Whether two methods compose and obey the laws."""
    _verb("check", attention, position, causal)


@app.command()
def probe(
    experiment: Annotated[
        str, typer.Argument(help="cnn-padding: what zero padding tells a convolutional network about positions")
    ],
    out: Annotated[str, typer.Option(help="folder of the results")] = "runs/probe",
    seeds: Annotated[int, typer.Option(min=1, help="repetitions with other images and weights")] = 1,
    depths: Annotated[list[int] | None, typer.Option(min=1, help="numbers of convolutions to compare (2 4 6)")] = None,
    size: Annotated[int | None, typer.Option(min=4, help="width and height of an image in pixels (20)")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="steps of training a network (150)")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="tiny sizes where none are given, to see that it runs")
    ] = False,
) -> None:
    """Where a network knows positions from: an experiment with a table and pictures."""
    _verb("probe", experiment, out, seeds, depths, size, steps, quick)


@app.command()
def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="time the ways through attention once, and choose by that from now on")
    ] = False,
) -> None:
    """Print what this machine has."""
    _verb("doctor", measure)
