"""The driver: from a grid to a folder of results. It alone writes; every trial is a process of its own."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from anyformer.compare.budget import FEWEST, PlanFile, affordable, budget_text, rounded
from anyformer.compare.costs import measure_all
from anyformer.compare.environment import busy
from anyformer.compare.lines import label, reference_lines, trial_line
from anyformer.compare.process import Limits, Outcome, run
from anyformer.compare.quality import open_fabric
from anyformer.compare.record import Record, Trial, key_of
from anyformer.compare.speed import Measured
from anyformer.compare.store import RESULTS, Store, read
from anyformer.compare.text import listing
from anyformer.compare.trial import Plan, Sizes, build_task, grid, verdict_in_a_row
from anyformer.compare.worker import Job, Kind
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Verdict
from anyformer.model.build import verdict, with_head
from anyformer.site import Site
from anyformer.task.base import Task

_TIMING = 0.16  # share of a budget that goes into timing


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compared.

    Args:
        pairs: an attention and a position each; lists in knobs stand for grids.
        tasks: specs; likewise.
        sizes: the shared model and optimiser.
        seeds: how many.
        steps: training steps of every trial; None: as many as the budget pays for.
        budget: seconds for everything together.
        lengths: tokens at which quality and costs are measured, beside each task's trained length; empty: each task's own.
        items: test items scored at each length.
        limits: of one trial.
        device, precision: as Lightning Fabric names them.
        threads: threads of torch; 0: torch's own choice.
        baseline: name of the method that a report is to compare the others with; checked before anything is trained.
        retry_failed: run trials again that failed before.
        force: mix results on different data in one folder.
        command: the command line, for the record.
    """

    pairs: tuple[tuple[str, str], ...]
    tasks: tuple[str, ...]
    sizes: Sizes = field(default_factory=Sizes)
    seeds: int = 1
    steps: int | None = None
    budget: float = 180.0
    lengths: tuple[int, ...] = ()
    items: int = 96
    limits: Limits = field(default_factory=Limits)
    device: str = "auto"
    precision: str = "32-true"
    threads: int = 0
    baseline: str | None = None
    retry_failed: bool = False
    force: bool = False
    command: str = ""


class Listener:
    """What hears of the progress of a comparison; every method may be overridden."""

    def notice(self, text: str) -> None:
        """Something worth a line."""

    def planned(self, trials: int, finished: int, steps: int) -> None:
        """How many trials there are in all, how many an earlier run finished, and how many steps each trains."""

    def started(self, plan: Plan) -> None:
        """A trial begins."""

    def progress(self, plan: Plan, step: int, loss: float) -> None:
        """A trial has trained `step` steps."""

    def finished(self, record: Trial) -> None:
        """A trial has its line."""


def compare(request: Request, folder: str | Path, listener: Listener) -> tuple[Record, ...]:
    """Run every trial of the grid that has no result in `folder` yet, one after the other.

    Returns:
        All records of the folder.

    Raises:
        SpecError, TaskError: a spec, a size, the device or the budget is wrong, a task has no data.
        StoreError: the folder cannot be used. All of these before anything is trained.
        IncompatibleError: no pair of the grid composes.
    """
    started = time.monotonic()
    if request.steps is None and request.budget <= 0:
        raise SpecError("--budget: expected a time above 0, such as 3m; or give --steps")
    device = open_fabric(request.device, request.precision).device.type
    tasks = {text: build_task(text) for text in grid(request.tasks, "task")}
    cells, refused = _cells(request, tasks)
    _check_baseline(request, [*cells, *(plan for plan, _ in refused)], Path(folder))
    with Store.open(folder) as store:
        for text in filter(None, (*store.notices, busy())):
            listener.notice(text)
        for text, task in tasks.items():
            if task.skipped:
                listener.notice(f"{text} leaves out {listing(list(task.skipped))}")
            store.expect_data(text, task.fingerprint, force=request.force)
        driver = _Driver(request, store, tasks, listener, device, started)
        if not cells:
            driver.refuse(refused, request.steps or 0)
            reasons = "\n".join(f"  {label(plan)}: {judged.reason}" for plan, judged in refused)
            raise IncompatibleError(f"no pair of this grid composes:\n{reasons}")
        driver.run(cells, refused)
        return store.records


class _Driver:
    def __init__(
        self,
        request: Request,
        store: Store,
        tasks: dict[str, Task],
        listener: Listener,
        device: str,
        started: float,
    ) -> None:
        self.request, self.store, self.tasks, self.listener = request, store, tasks, listener
        self.device, self.started = device, started
        self.done = store.done(retry_failed=request.retry_failed)
        self.file = PlanFile(store.folder)

    def run(self, cells: list[Plan], refused: list[tuple[Plan, Verdict]]) -> None:
        """Measure, plan, train."""
        for plan in {plan.task: plan for plan in cells}.values():
            self._references(plan)
        budget = budget_text(self.request.budget, self.request.seeds, cells[0].setting, self.tasks)
        steps, measured = self.request.steps or self._known_steps(budget), None
        if steps is None:
            measured = self._measure(cells)
            steps = self._plan_steps(cells, measured)
            self.file.keep(budget, steps)
        self.refuse(refused, steps)
        plans = [replace(cell, steps=steps, seed=seed) for seed in range(self.request.seeds) for cell in cells]
        pending = [plan for plan in plans if self._key(plan) not in self.done]
        self.listener.planned(len(plans), len(plans) - len(pending), steps)
        if measured is None:
            measured = self._measure(list({plan.cell: plan for plan in pending}.values()))
        for plan in pending:
            self.listener.started(plan)
            record = self._line(plan, self._ask("trial", (plan,)), measured)
            self.store.append(record)
            self.listener.finished(record)

    def refuse(self, refused: list[tuple[Plan, Verdict]], steps: int) -> None:
        """A line for each pair that cannot compose."""
        for plan, judged in refused:
            plan = replace(plan, steps=steps)
            if self._key(plan) not in self.done:
                status = "refused" if judged.kind == "refused" else "unsupported"
                self.store.append(self._line(plan, Outcome(status, reason=judged.reason), Measured()))

    def _references(self, plan: Plan) -> None:
        """The lines without attention of a task, unless all of them are there."""
        key = key_of(f"references {plan.task} items={plan.items}", plan.fingerprint)
        ours = {each for each in self.done if each.startswith(f"{key}/")}
        if f"{key}/failed" in ours or any(len(ours) == int(each.rpartition("/")[2]) for each in ours):
            return
        self.listener.notice(f"lines without attention for {plan.task}")
        outcome = self._ask("references", (plan,))
        if outcome.status != "ok":
            self.listener.notice(f"they failed ({outcome.status}): {outcome.reason}")
        for record in reference_lines(plan, self.tasks[plan.task], outcome, key):
            if record.key not in self.done:
                self.store.append(record)

    def _measure(self, cells: list[Plan]) -> Measured:
        seconds = _TIMING * self.request.budget
        measured, complaint = measure_all(cells, lambda kind, plans: self._ask(kind, plans, seconds))
        if complaint:
            self.listener.notice(complaint)
        return measured

    def _plan_steps(self, cells: list[Plan], measured: Measured) -> int:
        left = self.request.budget - (time.monotonic() - self.started)
        known = [(plan, self.tasks[plan.task].train_length, measured.costs[plan.cell]) for plan in cells]
        possible = affordable(left, self.request.seeds, known)
        steps = rounded(possible)
        if possible < FEWEST:
            self.listener.notice(
                f"the budget pays for {max(possible, 0)} steps a trial; each trains {steps}, the fewest"
            )
        return steps

    def _known_steps(self, budget: str) -> int | None:
        """The steps an earlier run planned for this budget, so that what it left unfinished is finished alike."""
        try:
            steps = self.file.known(budget)
        except ValueError:
            self.listener.notice(f"{self.file.path} could not be read; the steps are planned anew")
            return None
        if steps is not None:
            self.listener.notice(f"{steps} steps a trial, as {self.file.path} holds for this budget")
        return steps

    def _ask(self, kind: Kind, plans: tuple[Plan, ...], seconds: float = 0.0) -> Outcome:
        """Have another process do a job for the first of the plans, or for all of them at once."""

        def listen(message: tuple) -> None:
            match message:
                case ("progress", step, loss):
                    self.listener.progress(plans[0], step, loss)
                case ("notice", text):
                    self.listener.notice(text)

        job = Job(kind, plans, device=self.device, threads=self.request.threads, seconds=seconds)
        return run(job, self.request.limits.times(len(plans)), listen)

    def _line(self, plan: Plan, outcome: Outcome, measured: Measured) -> Trial:
        task = self.tasks[plan.task]
        return trial_line(plan, task, outcome, measured, key=self._key(plan), command=self.request.command)

    def _key(self, plan: Plan) -> str:
        return key_of(plan.text, plan.fingerprint, self.device)


def _cells(request: Request, tasks: dict[str, Task]) -> tuple[list[Plan], list[tuple[Plan, Verdict]]]:
    """One plan for each legal cell of the grid, and the others with the reason."""
    legal: list[Plan] = []
    refused: list[tuple[Plan, Verdict]] = []
    pairs = dict.fromkeys(
        (a, p) for ours, theirs in request.pairs for a in grid([ours], "attention") for p in grid([theirs], "position")
    )
    for text, task in tasks.items():
        sizes = request.sizes
        site = Site(sizes.dim, sizes.heads, kv_heads=sizes.kv_heads, causal=task.causal, max_length=task.train_length)
        lengths = {task.train_length, *(request.lengths or task.eval_lengths)}
        for attention, position in pairs:
            plan = Plan(
                attention=attention,
                position=position,
                task=text,
                sizes=sizes,
                lengths=tuple(sorted(lengths)),
                items=request.items,
                precision=request.precision,
                fingerprint=task.fingerprint,
                index=len(legal) + len(refused),
            )
            judge = verdict_in_a_row if task.grid is None else verdict
            judged = with_head(attention, judge(attention, position, site), task.head, site)
            if judged.runs:
                legal.append(plan)
            else:
                refused.append((plan, judged))
    return legal, refused


def _check_baseline(request: Request, plans: list[Plan], folder: Path) -> None:
    """Refuse a baseline that is neither planned nor in the folder, before the folder is made."""
    if request.baseline is None:
        return
    known = {label(plan) for plan in plans}
    if (folder / RESULTS).is_file():
        known |= {record.name for record in read(folder).records if isinstance(record, Trial)}
    if request.baseline not in known:
        raise SpecError(f"--baseline: no method is named {request.baseline!r}; there are: {', '.join(sorted(known))}")
