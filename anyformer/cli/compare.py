"""`anyformer compare`: the main job, with live progress."""

import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from anyformer.cli.report import show
from anyformer.compare import report
from anyformer.compare.process import Limits
from anyformer.compare.record import Trial
from anyformer.compare.run import Listener, Request, compare
from anyformer.compare.trial import Plan, read_sizes
from anyformer.errors import SpecError
from anyformer.model.build import short_name
from anyformer.spec import Items, Spec, parse

DEFAULT_PAIRS = (
    ("softmax", "none"),
    ("softmax", "rope"),
    ("softmax", "alibi"),
    ("linear", "rope"),
    ("local(32)", "rope"),
)
_RECALL = "mqar(vocab=32, length=32, pairs=4)"  # small enough that three minutes tell who can recall
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def run(
    attentions: list[str],
    positions: list[str],
    tasks: list[str],
    data: list[str],
    model: str,
    seeds: int,
    steps: int | None,
    budget: str,
    lengths: list[int],
    items: int,
    out: str,
    timeout: str,
    memory: float,
    device: str,
    precision: str,
    threads: int,
    baseline: str | None,
    retry_failed: bool,
    force: bool,
) -> int | None:
    """Compare, then write and print the report."""
    if bool(attentions) != bool(positions):
        missing, given = ("--position", "--attention") if attentions else ("--attention", "--position")
        raise SpecError(
            f"{given} needs {missing} beside it, for example {missing} {'none rope' if attentions else 'softmax'}"
        )
    console = Console()
    request = Request(
        pairs=_pairs(attentions, positions),
        tasks=tuple(_with_data(task, data) for task in tasks or _default_tasks(data)),
        sizes=read_sizes(model),
        seeds=seeds,
        steps=steps,
        budget=seconds(budget),
        lengths=tuple(lengths),
        items=items,
        limits=Limits(seconds=seconds(timeout), memory=int(memory * 2**30)),
        device=device,
        precision=precision,
        threads=threads,
        baseline=baseline,
        retry_failed=retry_failed,
        force=force,
        command=shlex.join(["anyformer", *sys.argv[1:]]),
    )
    try:
        with _Live(console) as listener:
            compare(request, out, listener)
    except KeyboardInterrupt:
        console.print("stopped; finished trials are kept, and the same command goes on from there")
        return 130
    show(report.write(out, baseline=baseline), Path(out), console)
    return 0


class _Live(Listener):
    """Progress on the terminal: a bar for all trials, a bar for the one that runs, a line for each that ended."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._bars = Progress(*columns, console=console, transient=True)
        self._all: TaskID | None = None
        self._one: TaskID | None = None

    def __enter__(self) -> "_Live":
        self._bars.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bars.stop()

    def notice(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)

    def planned(self, trials: int, finished: int, steps: int) -> None:
        already = f", {finished} of them finished before" if finished else ""
        self._console.print(f"{trials} trials of {steps} steps{already}", markup=False, highlight=False)
        self._all = self._bars.add_task("trials", total=trials, completed=finished)

    def started(self, plan: Plan) -> None:
        if self._one is not None:
            self._bars.remove_task(self._one)
        name = f"{short_name(plan.attention)} + {plan.position}, {plan.task}, seed {plan.seed}"
        self._one = self._bars.add_task(escape(name), total=plan.steps)

    def progress(self, plan: Plan, step: int, loss: float) -> None:
        if self._one is not None:
            self._bars.update(self._one, completed=step)

    def finished(self, record: Trial) -> None:
        if self._all is not None:
            self._bars.advance(self._all)
        quality = record.quality
        home = next((score.value for score in quality.scores if score.value is not None), None) if quality else None
        told = f"{home:.3f} {quality.metric}" if quality and home is not None else f"{record.status}: {record.reason}"
        self._console.print(f"{record.name}, {record.task}, seed {record.seed}: {told}", markup=False, highlight=False)


def seconds(text: str) -> float:
    """A length of time: `90`, `90s`, `3m` or `1h`; 0 is no limit.

    Raises:
        SpecError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None:
        raise SpecError(f"expected a time such as 90s, 3m or 1h, got {text!r}")
    return float(found.group(1)) * _UNITS[found.group(2) or "s"]


def _pairs(attentions: list[str], positions: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple((a, p) for a in attentions for p in positions) or DEFAULT_PAIRS


def _default_tasks(data: list[str]) -> list[str]:
    return ["text"] if data else ["text", _RECALL]


def _with_data(task: str, data: list[str]) -> str:
    spec = parse(task)
    if not data:
        return task
    if spec.name != "text" or any(name == "data" for name, _ in spec.knobs):
        raise SpecError(f"--data is what the task text reads; leave it out for --task {task!r}")
    return str(Spec(spec.name, spec.args, (*spec.knobs, ("data", Items(data)))))
