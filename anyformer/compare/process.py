"""A job in a process of its own, with a clock and a limit of memory."""

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil

from anyformer.compare.record import Status
from anyformer.compare.worker import Job, serve

_GRACE = 2**30  # what the interpreter and its libraries may take beside the trial


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `ok` with its values, or another status with the reason and the last lines of the error."""

    status: Status
    values: dict[str, Any]
    reason: str = ""
    details: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What one trial may take: seconds on the clock and bytes of memory; 0: no limit."""

    seconds: float = 0.0
    memory: int = 0


def run(job: Job, limits: Limits, listen: Callable[[tuple], None]) -> Outcome:
    """Run a job to its end, or end it at a limit.

    Args:
        listen: gets the job's ("progress", ...) and ("notice", ...) messages.
    """
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    if sys.platform != "win32":
        context.set_forkserver_preload(["anyformer.compare.worker"])  # a trial starts with torch already imported
    ours, theirs = context.Pipe()
    job = replace(job, memory=limits.memory + _GRACE if limits.memory else 0)
    process = context.Process(target=serve, args=(theirs, job), daemon=True)
    started = time.monotonic()
    process.start()
    theirs.close()
    try:
        outcome = _watch(process, ours, started, limits, listen)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()
    return replace(outcome, seconds=time.monotonic() - started)


def _watch(process: Any, connection: Any, started: float, limits: Limits, listen: Callable[[tuple], None]) -> Outcome:
    while True:
        if limits.seconds and time.monotonic() - started > limits.seconds:
            return Outcome("timeout", {}, f"took longer than the {limits.seconds:.0f} s a trial may take")
        held = _resident(process.pid)
        if limits.memory and held > limits.memory + _GRACE:
            return Outcome("oom", {}, f"took more than the {limits.memory / 2**30:.1f} GiB a trial may take")
        if not connection.poll(0.2):
            if process.is_alive():
                continue
            if not connection.poll():
                return _died(process.exitcode)
        try:
            message = connection.recv()
        except EOFError:
            process.join()
            return _died(process.exitcode)
        match message:
            case ("done", values):
                return Outcome("ok", values)
            case ("failed", status, reason, details):
                return Outcome(status, {}, reason, details)
            case _:
                listen(message)


def _died(code: int | None) -> Outcome:
    if code == -9:
        return Outcome("oom", {}, "the process was killed from outside (signal 9), most often for want of memory")
    return Outcome("error", {}, f"the process ended with code {code} and no result")


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
