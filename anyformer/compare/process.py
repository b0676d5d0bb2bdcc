"""A job in a process of its own, with a clock and a limit of memory."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from anyformer.compare.record import Status
from anyformer.compare.worker import LAST_LINES, Job, serve

_GRACE = 2**30  # what the interpreter and its libraries may take beside the trial
_LONGEST_LISTENER = 103  # bytes of the path of a Unix socket, on the system that allows the fewest


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its status, what it handed over until then, the reason and the last lines where it failed."""

    status: Status
    values: dict[Any, Any] = field(default_factory=dict)
    reason: str = ""
    details: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Limits:
    """What one trial may take: seconds on the clock and bytes of memory; 0: no limit."""

    seconds: float = 0.0
    memory: int = 0

    def times(self, number: int) -> "Limits":
        """Limits of a process that holds this many trials at once."""
        return Limits(self.seconds * number, self.memory * number)


def run(job: Job, limits: Limits, listen: Callable[[tuple], None]) -> Outcome:
    """Run a job to its end, or end it at a limit.

    Args:
        listen: gets the job's ("progress", ...) and ("notice", ...) messages.
    """
    context: Any = multiprocessing.get_context(_start_method())
    if context.get_start_method() == "forkserver":
        # a job starts with torch, and whatever the user's own script imports, already there
        context.set_forkserver_preload(["__main__", "anyformer.compare.worker"])
    ours, theirs = context.Pipe()
    output, path = tempfile.mkstemp(prefix="anyformer-")
    job = replace(job, memory=_allowed(job, limits), output=path)
    process = context.Process(target=serve, args=(theirs, job), daemon=True)
    started = time.monotonic()
    try:
        process.start()
        theirs.close()
        outcome = _watch(process, ours, started, job, limits, listen)
        printed = _tail(output)
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        ours.close()
        still_named = os.fstat(output).st_nlink > 0  # the job takes the name away once it has the file
        os.close(output)
        if still_named:
            Path(path).unlink(missing_ok=True)
    return replace(outcome, details=outcome.details or printed, seconds=time.monotonic() - started)


def _start_method() -> str:
    """The fork server listens at a path in the folder for temporary files, and the system bounds such a path's length."""
    listener = os.path.join(tempfile.gettempdir(), "pymp-12345678", "listener-12345678")
    return "spawn" if sys.platform == "win32" or len(os.fsencode(listener)) > _LONGEST_LISTENER else "forkserver"


def _watch(
    process: Any, connection: Any, started: float, job: Job, limits: Limits, listen: Callable[[tuple], None]
) -> Outcome:
    values: dict[Any, Any] = {}
    while True:
        if limits.seconds and time.monotonic() - started > limits.seconds:
            return Outcome("timeout", values, f"took longer than the {limits.seconds:g} s it may take")
        if job.memory and job.device == "cpu" and _resident(process.pid) > job.memory:
            return Outcome("oom", values, f"took more than the {limits.memory / 2**30:g} GiB it may take")
        try:
            if not connection.poll(0.2):
                if process.is_alive() or connection.poll():
                    continue
                raise EOFError  # a child of its own still holds the other end
            message = connection.recv()
        except (EOFError, OSError):
            process.join()
            return Outcome("error", values, _death(process.exitcode))
        match message:
            case ("done",):
                return Outcome("ok", values)
            case ("failed", status, reason, details):
                return Outcome(status, values, reason, details)
            case ("part", name, value):
                values[name] = value
            case _:
                listen(message)


def _allowed(job: Job, limits: Limits) -> int:
    return limits.memory + (_GRACE if job.device == "cpu" else 0) if limits.memory else 0


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"the process ended with code {code} and no result"
    name = signal.Signals(-code).name
    why = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{why}"


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _tail(output: int) -> str:
    """The last lines of what the process printed."""
    os.lseek(output, max(0, os.fstat(output).st_size - 8192), os.SEEK_SET)
    lines = os.read(output, 8192).decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-LAST_LINES:])
