"""What a reader must know before believing a number, said in sentences made from the records themselves."""

from collections.abc import Sequence

from anyformer.compare.panel import Method, Panel
from anyformer.compare.record import Environment, Score
from anyformer.compare.stats import SHORTEST
from anyformer.compare.text import listing, number

# LRA's rule: models within 10 % of the baseline's size count as matched
MATCHED = 0.10
STEADY = 1.2


def panel_caveats(panel: Panel) -> tuple[str, ...]:
    """Sentences about one panel, most important first."""
    if not panel.finished:
        return ("No trial has finished here, so there is nothing to compare. The reasons are listed below.",)
    found = [_seeds(panel), _budget(panel), _incomplete(panel), _not_finite(panel), _sizes(panel), _short(panel)]
    return tuple(sentence for sentence in found if sentence)


def run_caveats(panels: Sequence[Panel], notices: Sequence[str]) -> tuple[str, ...]:
    """Sentences about the whole run: its file, its machines, its data."""
    return (*notices, *(s for s in (_machines(panels), _shared(panels), _unsteady(panels), *_data(panels)) if s))


def environments(panels: Sequence[Panel]) -> tuple[Environment, ...]:
    """The different environments of all trials, in order of appearance."""
    return tuple({environment.fingerprint: environment for environment in _every(panels)}.values())


def _every(panels: Sequence[Panel]) -> list[Environment]:
    # one fingerprint may have been calm in one trial and busy in the next, so the load is read from every trial
    return [t.environment for panel in panels for method in panel.methods for t in method.trials if t.environment]


def _seeds(panel: Panel) -> str:
    counts = sorted({len(method.ok) for method in panel.finished})
    most = counts[-1]
    if most >= 5 and len(counts) == 1:
        return ""
    if most == 1:
        return (
            "One seed per method: descriptive only. Every difference includes the luck of one initialisation and one "
            "data order; intervals cover the evaluation items, not the training."
        )
    spread = f"{counts[0]} to {most}" if len(counts) > 1 else str(most)
    few = ": descriptive, fewer than 5 seeds" if counts[0] < 5 else ""
    uneven = (
        " Methods do not have the same number of seeds; differences use only the seeds both share."
        if len(counts) > 1
        else ""
    )
    return f"{spread} seeds per method{few}.{uneven}"


def _budget(panel: Panel) -> str:
    best = next((m.mean(panel.home) for m in panel.ranked() if m.mean(panel.home) is not None), None)
    if best is None:
        return ""
    sign = 1 if panel.better == "lower" else -1
    ahead = [f"{name} ({number(value)})" for name, value in panel.lines() if sign * value < sign * best]
    if not ahead:
        return ""
    return (
        f"Lines that use no attention still beat every method: {listing(ahead)}. "
        "At this budget the ranking says who learns fastest, not who ends best."
    )


def _incomplete(panel: Panel) -> str:
    failed = [trial for method in panel.methods for trial in method.failed]
    if not failed:
        return ""
    total = sum(len(method.trials) for method in panel.methods)
    count = f"{len(failed)} of {total} trials"
    return f"{count} have no result (see “What did not run”). They are left out of every mean, not counted as zero."


def _not_finite(panel: Panel) -> str:
    lost = [m.name for m in panel.finished if any(len(m.values(n)) < len(_ok(m, n)) for n in panel.lengths)]
    return f"Scores that are not finite were left out of the charts and means: {listing(lost)}." if lost else ""


def _ok(method: Method, length: int) -> list[Score]:
    return [score for score in method.scores(length).values() if score.status == "ok"]


def _sizes(panel: Panel) -> str:
    base = panel.baseline.parameters if panel.baseline else None
    if base is None or not base.total:
        return ""
    sizes = [(m.name, m.parameters.total / base.total - 1) for m in panel.finished if m.parameters]
    off = [f"{name} ({share:+.0%})" for name, share in sizes if abs(share) > MATCHED]
    return (
        f"Models are matched in width, not in size; more than 10 % away from the baseline: {listing(off)}."
        if off
        else ""
    )


def _short(panel: Panel) -> str:
    short = [method.name for method in panel.finished if (found := panel.exponent(method)) and found.short]
    if not short:
        return ""
    below = f"lengths below {SHORTEST} tokens, where fixed overhead hides the slope"
    return f"Time exponents marked † come from {below}: {listing(short)}."


def _machines(panels: Sequence[Panel]) -> str:
    many = len(environments(panels))
    return (
        f"Trials come from {many} different environments: compare speed and memory only within one." if many > 1 else ""
    )


def _shared(panels: Sequence[Panel]) -> str:
    if not any(environment.shared for environment in _every(panels)):
        return ""
    return "Other work ran on the machine while times were taken: trust ratios between methods, not absolute times."


def _unsteady(panels: Sequence[Panel]) -> str:
    ratios = [
        max(e.calibration) / min(e.calibration) for e in _every(panels) if e.calibration and min(e.calibration) > 0
    ]
    if not ratios or max(ratios) <= STEADY:
        return ""
    most = f"up to {max(ratios):.1f} times longer"
    return f"The same matrix product took {most} in one round than in another: times are that unsteady."


def _data(panels: Sequence[Panel]) -> list[str]:
    prints: dict[str, set[str]] = {}
    for panel in panels:
        if panel.data:
            prints.setdefault(panel.task, set()).add(panel.data.fingerprint)
    return [
        f"{task}: trials read {len(found)} different data sets. They stand in separate panels and must not be compared."
        for task, found in prints.items()
        if len(found) > 1
    ]
