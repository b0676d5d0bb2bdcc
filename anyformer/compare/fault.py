"""What an error makes of a result: its status, and the reason in one line."""

from anyformer.compare.record import Status
from anyformer.errors import IncompatibleError, SpecError, TaskError

_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class DivergedError(ValueError):
    """Training or scoring came to a number that is none."""


def fault_of(error: BaseException) -> tuple[Status, str]:
    """Status and reason of a result that ended with this error.

    What the package refuses is `unsupported`, a loss that is no number `diverged`, want of memory `oom`; whatever else a method
    raises is `error`.
    """
    if isinstance(error, SpecError | IncompatibleError | TaskError):
        return "unsupported", str(error)
    if isinstance(error, DivergedError):
        return "diverged", str(error)
    first = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _MEMORY)
    ):
        return "oom", first.rpartition("DefaultCPUAllocator: ")[2] or "out of memory"
    name = type(error).__name__
    return "error", f"{name}: {first}" if first else name
