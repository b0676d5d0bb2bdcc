"""The other process: it runs one request, tells the driver how it goes, and dies with it."""

import os
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from lightning_fabric import Fabric

from anyformer.compare.environment import environment
from anyformer.compare.quality import DivergedError, scores, train
from anyformer.compare.record import Parameters, Quality
from anyformer.compare.speed import measure, memories
from anyformer.compare.trial import Plan, build_task
from anyformer.errors import IncompatibleError, SpecError, TaskError
from anyformer.model.transformer import Transformer

_LAST_LINES = 12


@dataclass(frozen=True)
class Job:
    """What another process is asked to do.

    Args:
        kind: "trial" trains and scores `plans[0]`; "speed" times all plans; "references" computes the lines without attention.
        device: as Lightning Fabric names it: "auto", "cpu", "cuda", "mps".
        precision: as Fabric names it, for example "32-true" or "bf16-mixed".
        threads: threads of torch; 0: torch's own choice.
        memory: bytes the process may allocate; 0: no limit.
        seconds: about how long timing may take.
    """

    kind: Literal["trial", "speed", "references"]
    plans: tuple[Plan, ...]
    device: str = "auto"
    precision: str = "32-true"
    threads: int = 0
    memory: int = 0
    seconds: float = 30.0


def serve(connection: Connection, job: Job) -> None:
    """Run a job in this process. Sends ("progress", ...) and ("notice", text) on the way, and last ("done", values) or
    ("failed", status, reason, last lines)."""
    threading.Thread(target=_die_with_the_driver, args=(connection,), daemon=True).start()
    try:
        _limit(job)
        connection.send(("done", _WORK[job.kind](job, connection)))
    except (SpecError, IncompatibleError, TaskError) as error:
        connection.send(("failed", "unsupported", str(error), ""))
    except DivergedError as error:
        connection.send(("failed", "diverged", str(error), ""))
    except (MemoryError, RuntimeError) as error:
        status = "oom" if _out_of_memory(error) else "error"
        connection.send(("failed", status, _first_line(error), _tail(error)))
    except Exception as error:  # whatever a method raises is a result of its trial
        connection.send(("failed", "error", f"{type(error).__name__}: {_first_line(error)}", _tail(error)))


def _trial(job: Job, connection: Connection) -> dict[str, Any]:
    plan = job.plans[0]
    task = build_task(plan.task)
    fabric = Fabric(accelerator=job.device, devices=1, precision=job.precision)  # type: ignore[arg-type]  # it names them all
    fabric.seed_everything(plan.seed, verbose=False)
    memory = memories(plan, task, fabric.device)
    with fabric.init_module():
        model = Transformer(plan.config(task))
    counted = model.count_parameters()
    model, curve = train(
        plan, task, model, fabric, lambda step, loss: connection.send(("progress", plan.index, step, plan.steps, loss))
    )
    return {
        "parameters": Parameters(**counted),
        "memory": memory,
        "curve": curve,
        "quality": Quality(
            metric=task.metric,
            better=task.better,
            train_length=task.train_length,
            scores=scores(plan, task, model, fabric.device),
            chance=task.chance,
        ),
        "environment": environment(fabric.device),
    }


def _speed(job: Job, connection: Connection) -> dict[str, Any]:
    fabric = Fabric(accelerator=job.device, devices=1)
    measured = measure(list(job.plans), fabric.device, job.seconds, lambda text: connection.send(("notice", text)))
    return {"costs": measured.costs, "calibration": measured.calibration}


def _references(job: Job, connection: Connection) -> dict[str, Any]:
    plan = job.plans[0]
    task = build_task(plan.task)
    lines = task.reference_lines(plan.items)
    return {"lines": [(line.name, line.value, line.note) for line in lines]}


_WORK = {"trial": _trial, "speed": _speed, "references": _references}


def _die_with_the_driver(connection: Connection) -> None:
    try:
        connection.recv()  # the driver never sends; this returns when it is gone
    except (EOFError, OSError):
        os._exit(3)


def _limit(job: Job) -> None:
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.memory:
        try:
            import resource
        except ImportError:  # not on Windows; there the driver's watch is the only limit
            return
        resource.setrlimit(resource.RLIMIT_DATA, (job.memory, job.memory))


def _out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tail(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(lines[-_LAST_LINES:])
