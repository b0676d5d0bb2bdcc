"""The other process: it runs one job, tells the driver how it goes, and dies with it."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from anyformer.compare.bench_race import Turn, probe, race
from anyformer.compare.environment import environment
from anyformer.compare.fault import fault_of
from anyformer.compare.quality import open_fabric, scores, train
from anyformer.compare.record import Parameters, Quality
from anyformer.compare.speed import Stand, measure
from anyformer.compare.trial import Plan, build_task
from anyformer.errors import TaskError
from anyformer.model.transformer import Transformer
from anyformer.task.base import Task

LAST_LINES = 12

Send = Callable[[tuple], None]
Kind = Literal["references", "memory", "speed", "trial", "probe", "race"]


@dataclass(frozen=True)
class Job:
    """What another process is asked to do.

    Args:
        kind: "trial" trains and scores `plans[0]`; "memory" measures its steps; "speed" times all plans; "references" computes
            the lines without attention; "probe" and "race" do a benchmark's `turn`.
        device: as Lightning Fabric names it.
        threads: threads of torch; 0: torch's own choice.
        memory: bytes the process may allocate; 0: no limit.
        seconds: about how long timing may take.
        output: a file that takes what the process prints.
    """

    kind: Kind
    plans: tuple[Plan, ...] = ()
    device: str = "cpu"
    threads: int = 0
    memory: int = 0
    seconds: float = 30.0
    output: str = ""
    turn: Turn | None = None


def serve(connection: Connection, job: Job) -> None:
    """Run a job in this process.

    Sends ("progress", step, loss), ("notice", text) and ("part", name, value) on the way, and last ("done",) or
    ("failed", status, reason, last lines).
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the driver's, which then ends this process
    threading.Thread(target=_die_with_the_driver, args=(connection,), daemon=True).start()
    try:
        _print_into(job.output)
        _limit(job)
        _WORK[job.kind](job, connection.send)
        connection.send(("done",))
    except Exception as error:  # whatever a method raises is a result of its trial
        status, reason = fault_of(error)
        connection.send(("failed", status, reason, _last_lines(error) if status in ("error", "oom") else ""))


def _references(job: Job, send: Send) -> None:
    plan = job.plans[0]
    lines = _task(plan).reference_lines(plan.items)
    send(("part", "lines", tuple((line.name, line.value, line.note) for line in lines)))


def _memory(job: Job, send: Send) -> None:
    plan = job.plans[0]
    stand = Stand(plan, _task(plan), open_fabric(job.device, plan.precision))
    for length in plan.lengths:
        send(("part", length, stand.memory(length)))


def _speed(job: Job, send: Send) -> None:
    measured = measure(job.plans, _task, job.device, job.seconds, lambda text: send(("notice", text)))
    send(("part", "measured", measured))


def _trial(job: Job, send: Send) -> None:
    plan = job.plans[0]
    task, fabric = _task(plan), open_fabric(job.device, plan.precision)
    send(("part", "environment", environment(fabric.device)))
    fabric.seed_everything(plan.seed, verbose=False)
    with fabric.init_module():
        model = Transformer(plan.config(task))
    send(("part", "parameters", Parameters(**model.count_parameters())))
    trained, curve = train(plan, task, model, fabric, lambda step, loss: send(("progress", step, loss)))
    send(("part", "curve", curve))
    quality = Quality(
        metric=task.metric,
        better=task.better,
        train_length=task.train_length,
        scores=scores(plan, task, trained, fabric.device),
        chance=task.chance,
    )
    send(("part", "quality", quality))


def _probe(job: Job, send: Send) -> None:
    assert job.turn is not None
    send(("part", "probe", probe(job.turn)))


def _race(job: Job, send: Send) -> None:
    assert job.turn is not None
    send(("part", "race", race(job.turn)))


_WORK: dict[Kind, Callable[[Job, Send], None]] = {
    "references": _references,
    "memory": _memory,
    "speed": _speed,
    "trial": _trial,
    "probe": _probe,
    "race": _race,
}


def _task(plan: Plan) -> Task:
    """The plan's task, on the data that the driver saw."""
    try:
        task = build_task(plan.task)
    except TaskError as error:
        raise RuntimeError(f"the data of {plan.task} were there when the comparison began: {error}") from None
    if task.fingerprint != plan.fingerprint:
        raise RuntimeError(f"the data of {plan.task} changed while the comparison ran")
    return task


def _die_with_the_driver(connection: Connection) -> None:
    try:
        connection.recv()  # the driver never sends; this returns when it is gone
    except (EOFError, OSError):
        os._exit(3)


def _print_into(path: str) -> None:
    """Whatever this process prints, crash reports of the interpreter included, goes into a file that only the driver can reach
    any more, so that a kill leaves none behind."""
    if not path:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    if sys.platform != "win32":
        os.unlink(path)
    faulthandler.enable(2)


def _limit(job: Job) -> None:
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.memory and job.device == "cpu":
        try:
            import resource
        except ImportError:  # not on Windows; there the driver's watch is the only limit
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = job.memory if hard == resource.RLIM_INFINITY else min(job.memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    elif job.memory and job.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory / total))


def _last_lines(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(lines[-LAST_LINES:])
