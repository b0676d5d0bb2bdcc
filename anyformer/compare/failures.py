"""What did not run: whole trials and single lengths, the same failure over seeds and lengths told once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anyformer.compare.panel import Panel
from anyformer.compare.record import Trial
from anyformer.compare.text import plain


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong, with every seed and length it went wrong at; ``details`` are of the first."""

    method: str
    task: str
    what: str
    status: str
    reason: str
    details: str
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]


def failures(panels: Sequence[Panel]) -> tuple[Failure, ...]:
    """All failures of all panels: whole trials first."""
    trials = [trial for panel in panels for method in panel.methods for trial in method.trials]
    groups: dict[tuple[str, str, str, str, str], list[tuple[Trial, int | None]]] = {}
    for trial, what, length, status, reason in sorted(
        (f for t in trials for f in _single(t)), key=lambda found: found[2] is not None
    ):
        key = (plain(trial.name), plain(trial.task), what, status, plain(reason))
        groups.setdefault(key, []).append((trial, length))
    return tuple(
        Failure(
            *key,
            details=next((trial.details for trial, _ in found if trial.status != "ok"), ""),
            seeds=tuple(sorted({trial.seed for trial, _ in found})),
            lengths=tuple(sorted({length for _, length in found if length is not None})),
        )
        for key, found in groups.items()
    )


def _single(trial: Trial) -> Iterator[tuple[Trial, str, int | None, str, str]]:
    if trial.status != "ok":
        yield trial, "whole trial", None, trial.status, trial.reason
        return
    for score in trial.quality.scores if trial.quality else ():
        if score.status != "ok":
            yield trial, "quality", score.length, score.status, score.reason
    for cost in trial.costs:
        if cost.status != "ok":
            yield trial, "speed and memory", cost.length, cost.status, cost.reason
