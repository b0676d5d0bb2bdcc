"""Sorts records into panels, so that only comparable trials meet."""

from collections.abc import Iterable

from anyformer.compare.panel import Key, Method, Panel
from anyformer.compare.record import Record, Reference, Trial
from anyformer.compare.text import plain
from anyformer.errors import SpecError


def panels(records: Iterable[Record], *, baseline: str | None = None) -> tuple[Panel, ...]:
    """Groups records so that only comparable trials meet: same task, model, steps, data fingerprint and device.

    ``baseline`` names the method others are compared with (its label, or ``attention + position``); by default plain
    softmax with rope, else the first softmax, else the first method that finished. Records of refused trials know no
    data or device: they join the first panel of their task, model and steps.

    Raises SpecError if ``baseline`` names no method.
    """
    everything = tuple(records)
    trials = sorted((r for r in everything if isinstance(r, Trial)), key=lambda trial: trial.index)
    known = sorted({plain(trial.name) for trial in trials})
    if baseline is not None and baseline not in known:
        raise SpecError(f"no method is named {baseline!r}. Methods here: {', '.join(known) or 'none'}")
    groups: dict[tuple, dict[tuple, list[Trial]]] = {}
    for trial in trials:
        data = trial.data.fingerprint if trial.data else None
        device = trial.environment.device if trial.environment else None
        groups.setdefault((trial.task, trial.model, trial.steps), {}).setdefault((data, device), []).append(trial)
    references = [r for r in everything if isinstance(r, Reference)]
    return tuple(
        _panel(members, references, baseline) for group in groups.values() for members in _adopt_orphans(group)
    )


def _adopt_orphans(group: dict[tuple, list[Trial]]) -> list[list[Trial]]:
    whole = [members for (data, device), members in group.items() if data is not None and device is not None]
    orphans = [t for (data, device), members in group.items() if data is None or device is None for t in members]
    if not whole:
        return [orphans]
    return [sorted([*whole[0], *orphans], key=lambda trial: trial.index), *whole[1:]]


def _panel(trials: list[Trial], references: list[Reference], baseline: str | None) -> Panel:
    by_method: dict[Key, dict[int, Trial]] = {}
    for trial in trials:
        seeds = by_method.setdefault((trial.attention, trial.position), {})
        # a seed counts once: a later run of it, say at other lengths, takes the place of an earlier one
        if trial.seed not in seeds or trial.finished >= seeds[trial.seed].finished:
            seeds[trial.seed] = trial
    methods = tuple(Method(tuple(seeds[seed] for seed in sorted(seeds))) for seeds in by_method.values())
    first = trials[0]
    data = next((trial.data for trial in trials if trial.data), None)
    fitting = (
        r
        for r in references
        if r.task == first.task and (not data or not r.data or r.data.fingerprint == data.fingerprint)
    )
    lines = tuple({line.name: line for line in fitting}.values())
    qualities = [trial.quality for trial in (*trials, *lines) if trial.quality is not None]
    quality = qualities[0] if qualities else None
    return Panel(
        task=plain(first.task),
        model=plain(first.model),
        steps=first.steps,
        data=data,
        device=next((plain(trial.environment.device) for trial in trials if trial.environment), ""),
        metric=plain(quality.metric) if quality else "quality",
        better=quality.better if quality else "higher",
        chance=quality.chance if quality else None,
        train_length=quality.train_length if quality else 0,
        methods=methods,
        references=tuple(line for line in lines if line.status == "ok"),
        baseline=_baseline(methods, baseline),
    )


def _baseline(methods: tuple[Method, ...], asked: str | None) -> Method | None:
    finished = [method for method in methods if method.ok]
    if asked is not None:
        return next((method for method in finished if method.name == asked), None)
    softmax = [method for method in finished if method.trials[0].attention == "softmax"]
    roped = [method for method in softmax if method.trials[0].position == "rope"]
    return next(iter([*roped, *softmax, *finished]), None)
