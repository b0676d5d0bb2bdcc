"""The driver: from a grid to a folder of results. It alone writes; every trial is a process of its own."""

import datetime
import json
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anyformer.compare.process import Limits, Outcome, run
from anyformer.compare.record import Cost, Data, Quality, Record, Reference, Score, Trial, key_of
from anyformer.compare.store import Store
from anyformer.compare.trial import Plan, Sizes, build_task, grid
from anyformer.compare.worker import Job
from anyformer.errors import IncompatibleError
from anyformer.forms import Verdict
from anyformer.model.build import family_of, position_slot, short_name, verdict
from anyformer.site import Site
from anyformer.task.base import Task

_START = 2.5  # seconds a trial takes beside its steps and its evaluation
_TIMING = 0.16  # share of a budget that goes into timing
_FEWEST = 20  # training steps, whatever the budget


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
        lengths: tokens at which quality and costs are measured; empty: each task's own.
        items: test items scored at each length.
        limits: of one trial.
        device, precision, threads: see `Job`.
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
        SpecError, TaskError: a spec is wrong, a task has no data.
        StoreError: the folder cannot be used; raised before anything is trained.
        IncompatibleError: no pair of the grid composes.
    """
    started = time.monotonic()
    tasks = {text: build_task(text) for text in grid(request.tasks, "task")}
    cells, refused = _cells(request, tasks)
    with Store.open(folder) as store:
        for text in store.notices:
            listener.notice(text)
        for text, task in tasks.items():
            store.expect_data(text, task.fingerprint, force=request.force)
        driver = _Driver(request, store, tasks, listener, started)
        driver.refuse(refused)
        if not cells:
            reasons = "\n".join(f"  {plan.attention} x {plan.position}: {judged.reason}" for plan, judged in refused)
            raise IncompatibleError(f"no pair of this grid composes:\n{reasons}")
        driver.run(cells)
        return store.records


class _Driver:
    def __init__(
        self, request: Request, store: Store, tasks: dict[str, Task], listener: Listener, started: float
    ) -> None:
        self.request, self.store, self.tasks, self.listener, self.started = request, store, tasks, listener, started
        self.done = store.done(retry_failed=request.retry_failed)

    def refuse(self, refused: list[tuple[Plan, Verdict]]) -> None:
        """A line for each pair that cannot compose."""
        for plan, judged in refused:
            plan = replace(plan, steps=self.request.steps or self._planned_steps() or 0)
            if self._key(plan) not in self.done:
                status = "refused" if judged.kind == "refused" else "unsupported"
                self._append(self._record(plan, Outcome(status, {}, judged.reason)))

    def run(self, cells: list[Plan]) -> None:
        """Time, plan, train."""
        self._references(cells)
        steps = self.request.steps or self._planned_steps()
        timed = None
        if steps is None:
            timed = self._time(cells)
            steps = self._plan_steps(cells, timed)
        plans = [replace(cell, steps=steps, seed=seed) for seed in range(self.request.seeds) for cell in cells]
        pending = [plan for plan in plans if self._key(plan) not in self.done]
        self.listener.planned(len(plans), len(plans) - len(pending), steps)
        if timed is None and pending:
            timed = self._time(list({plan.cell: plan for plan in pending}.values()))
        for plan in pending:
            self.listener.started(plan)
            outcome = self._run(Job("trial", (plan,)), self.request.limits, plan)
            record = self._record(plan, outcome, timed)
            self._append(record)
            self.listener.finished(record)

    def _time(self, cells: list[Plan]) -> dict[str, Any]:
        seconds = _TIMING * self.request.budget
        outcome = self._run(Job("speed", tuple(cells), seconds=seconds), Limits(), cells[0])
        if outcome.status != "ok":
            self.listener.notice(f"timing failed ({outcome.status}): {outcome.reason}; results have no costs")
            return {"costs": {}, "calibration": ()}
        return outcome.values

    def _plan_steps(self, cells: list[Plan], timed: dict[str, Any]) -> int:
        """The steps that every trial can train so that all together keep to the budget: equal tokens for all."""
        left = self.request.budget - (time.monotonic() - self.started)
        fixed = steps = 0.0
        for plan in cells:
            costs: tuple[Cost, ...] = timed["costs"].get(plan.cell, ())
            trained = next(
                (cost for cost in costs if cost.step and cost.length >= self.tasks[plan.task].train_length), None
            )
            steps += trained.step.median if trained and trained.step else 0.0
            for cost in costs:
                if cost.forward and cost.step:
                    fixed += cost.forward.median * plan.items / cost.batch + 3 * cost.step.median
            fixed += _START
        planned = (left - self.request.seeds * fixed) / max(self.request.seeds * steps, 1e-9)
        planned = max(_FEWEST, math.floor(planned / 10) * 10)
        self._file.write_text(json.dumps({"budget": self._budget(), "steps": planned}) + "\n")
        return planned

    def _planned_steps(self) -> int | None:
        """The steps an earlier run of the same budget planned, so that what it left unfinished is finished alike."""
        if not self._file.is_file():
            return None
        try:
            known = json.loads(self._file.read_text())
            return int(known["steps"]) if known["budget"] == self._budget() else None
        except (ValueError, KeyError, TypeError):
            self.listener.notice(f"{self._file.name} could not be read; the steps are planned anew")
            return None

    def _budget(self) -> str:
        return f"{self.request.budget} s, {self.request.seeds} seeds, {self.request.sizes}, {sorted(self.tasks)}"

    @property
    def _file(self) -> Path:
        return self.store.folder / "plan.json"

    def _references(self, cells: list[Plan]) -> None:
        for plan in {plan.task: plan for plan in cells}.values():
            task = self.tasks[plan.task]
            key = key_of(f"references {plan.task} {plan.items}", task.fingerprint)
            if f"{key}/0" in self.done:
                continue
            self.listener.notice(f"lines without attention for {plan.task}")
            outcome = self._run(Job("references", (plan,)), self.request.limits, plan)
            for number, (name, value, note) in enumerate(outcome.values.get("lines", ())):
                quality = Quality(
                    metric=task.metric, better=task.better, scores=(Score(length=task.train_length, value=value),)
                )
                line = Reference(
                    trial=f"reference={name} task={plan.task} items={plan.items}",
                    key=f"{key}/{number}",
                    task=plan.task,
                    status="ok",
                    name=name,
                    note=note,
                    quality=quality,
                    data=_data(plan, task),
                    finished=_now(),
                )
                self._append(line)

    def _run(self, job: Job, limits: Limits, plan: Plan) -> Outcome:
        request = self.request
        job = replace(job, device=request.device, precision=request.precision, threads=request.threads)

        def listen(message: tuple) -> None:
            match message:
                case ("progress", _, step, _, loss):
                    self.listener.progress(plan, step, loss)
                case ("notice", text):
                    self.listener.notice(text)

        return run(job, limits, listen)

    def _record(self, plan: Plan, outcome: Outcome, timed: dict[str, Any] | None = None) -> Trial:
        values, task = outcome.values, self.tasks[plan.task]
        environment = values.get("environment")
        costs: tuple[Cost, ...] = () if timed is None else timed["costs"].get(plan.cell, ())
        memory: dict[int, int] = values.get("memory", {})
        home = next((cost for cost in costs if cost.length == task.train_length and cost.step), None)
        return Trial(
            trial=plan.text,
            key=self._key(plan),
            task=plan.task,
            status=outcome.status,
            reason=outcome.reason,
            details=outcome.details,
            data=_data(plan, task),
            quality=values.get("quality"),
            seconds=outcome.seconds,
            finished=_now(),
            command=self.request.command,
            attention=plan.attention,
            position=plan.position,
            label=f"{short_name(plan.attention)} + {plan.position}",
            attention_family=family_of(plan.attention),
            position_family=position_slot(plan.position)[0].family,
            index=plan.index,
            seed=plan.seed,
            model=str(plan.sizes),
            steps=plan.steps,
            batch=plan.rows(task),
            parameters=values.get("parameters"),
            curve=values.get("curve", ()),
            costs=tuple(cost.model_copy(update={"memory": memory.get(cost.length)}) for cost in costs),
            tokens_per_second=home.batch * home.length / home.step.median if home and home.step else None,
            environment=None
            if environment is None
            else environment.model_copy(update={"calibration": timed["calibration"] if timed else ()}),
        )

    def _key(self, plan: Plan) -> str:
        return key_of(plan.text, self.tasks[plan.task].fingerprint, self.request.precision, self.request.device)

    def _append(self, record: Record) -> None:
        self.store.append(record)


def _cells(request: Request, tasks: dict[str, Task]) -> tuple[list[Plan], list[tuple[Plan, Verdict]]]:
    """One plan for each legal cell of the grid, and the others with the reason."""
    legal: list[Plan] = []
    refused: list[tuple[Plan, Verdict]] = []
    pairs = [
        (a, p) for ours, theirs in request.pairs for a in grid([ours], "attention") for p in grid([theirs], "position")
    ]
    for text, task in tasks.items():
        sizes = request.sizes
        site = Site(sizes.dim, sizes.heads, kv_heads=sizes.kv_heads, causal=task.causal, max_length=task.train_length)
        lengths = tuple(sorted(set(request.lengths))) or task.eval_lengths
        for attention, position in dict.fromkeys(pairs):
            plan = Plan(
                attention=attention,
                position=position,
                task=text,
                sizes=sizes,
                steps=0,
                seed=0,
                lengths=lengths,
                items=request.items,
                index=len(legal) + len(refused),
            )
            judged = verdict(attention, position, site)
            if judged.runs:
                legal.append(plan)
            else:
                refused.append((plan, judged))
    return legal, refused


def _data(plan: Plan, task: Task) -> Data:
    return Data(name=plan.task, fingerprint=task.fingerprint)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
