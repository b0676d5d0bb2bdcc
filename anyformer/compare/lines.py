"""What the driver writes: from the outcome of a job to the lines of `results.jsonl`."""

import datetime

from anyformer.compare.process import Outcome
from anyformer.compare.record import Data, Environment, Quality, Reference, Score, Trial
from anyformer.compare.speed import Measured
from anyformer.compare.trial import Plan
from anyformer.model.build import family_of, position_slot, short_name
from anyformer.task.base import Task


def label(plan: Plan) -> str:
    """What people call the method of a plan."""
    return f"{short_name(plan.attention)} + {plan.position}"


def trial_line(plan: Plan, task: Task, outcome: Outcome, measured: Measured, *, key: str, command: str) -> Trial:
    """The line of a trial, however it ended, with what it had handed over by then."""
    values = outcome.values
    environment: Environment | None = values.get("environment")
    costs = measured.costs.get(plan.cell, ())
    home = next((cost for cost in costs if cost.length == task.train_length), None)
    return Trial(
        trial=plan.text,
        key=key,
        task=plan.task,
        status=outcome.status,
        reason=outcome.reason,
        details=outcome.details,
        data=_data(plan, task),
        quality=values.get("quality"),
        seconds=outcome.seconds,
        finished=_now(),
        command=command,
        attention=plan.attention,
        position=plan.position,
        label=label(plan),
        attention_family=family_of(plan.attention),
        position_family=position_slot(plan.position)[0].family,
        index=plan.index,
        seed=plan.seed,
        model=plan.setting,
        steps=plan.steps or None,
        batch=plan.rows(task.train_length),
        parameters=values.get("parameters"),
        curve=values.get("curve", ()),
        costs=costs,
        impl={f"{cost.length} tokens": cost.way for cost in costs if cost.way},
        tokens_per_second=home.batch * home.length / home.step.median if home and home.step else None,
        environment=environment and _while_timed(environment, measured),
    )


def reference_lines(plan: Plan, task: Task, outcome: Outcome, key: str) -> list[Reference]:
    """The lines of rules without attention, or one line that says why there are none.

    Their keys end in number/count, so that a reader sees whether all of them are there.
    """
    shared = {"task": plan.task, "data": _data(plan, task), "finished": _now()}
    if outcome.status != "ok":
        return [
            Reference(
                trial=f"reference lines of {plan.task} items={plan.items}",
                key=f"{key}/failed",
                name="lines without attention",
                status=outcome.status,
                reason=outcome.reason,
                details=outcome.details,
                seconds=outcome.seconds,
                **shared,
            )
        ]
    found: tuple[tuple[str, float, str], ...] = outcome.values["lines"]
    return [
        Reference(
            trial=f"reference={name} task={plan.task} items={plan.items}",
            key=f"{key}/{number}/{len(found)}",
            name=name,
            note=note,
            status="ok",
            quality=Quality(
                metric=task.metric,
                better=task.better,
                scores=(Score(length=task.train_length, value=value),),
            ),
            **shared,
        )
        for number, (name, value, note) in enumerate(found)
    ]


def _while_timed(environment: Environment, measured: Measured) -> Environment:
    """A trial's machine and versions, with the load under which its times were taken."""
    before = measured.before or environment
    load = {"calibration": measured.calibration, "load": before.load, "shared": before.shared}
    return environment.model_copy(update=load)


def _data(plan: Plan, task: Task) -> Data:
    return Data(name=plan.task, fingerprint=plan.fingerprint, note=task.source)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
