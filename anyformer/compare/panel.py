"""What belongs together: trials of one task on the same data, model and budget, gathered by method."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from anyformer.compare.record import Cost, Data, Parameters, Reference, Score, Trial
from anyformer.compare.stats import Difference, Exponent, crossover, exponent, holm, paired
from anyformer.compare.text import plain

Key = tuple[str, str]  # a method's attention and position spec
Numbers = dict[Key, int]  # the number of each method in a report
Measure = Literal["step", "forward_backward", "forward"]
MEASURES: dict[Measure, str] = {"step": "training step", "forward_backward": "forward + backward", "forward": "forward"}


@dataclass(frozen=True)
class Method:
    """One attention with one position encoding: its trials over seeds, in every status."""

    trials: tuple[Trial, ...]

    @property
    def name(self) -> str:
        return plain(self.trials[0].name)

    @property
    def key(self) -> Key:
        return self.trials[0].attention, self.trials[0].position

    @property
    def attention_family(self) -> tuple[str, ...]:
        return tuple(map(plain, self.trials[0].attention_family)) or ("other",)

    @property
    def position_family(self) -> tuple[str, ...]:
        return tuple(map(plain, self.trials[0].position_family)) or ("other",)

    @property
    def ok(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.status == "ok")

    @property
    def failed(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.status != "ok")

    @property
    def status(self) -> str:
        return "ok" if self.ok else self.trials[0].status

    @property
    def parameters(self) -> Parameters | None:
        return next((trial.parameters for trial in self.trials if trial.parameters is not None), None)

    @property
    def impl(self) -> dict[str, str]:
        return next((trial.impl for trial in self.ok), {})

    def scores(self, length: int) -> dict[int, Score]:
        """The score of each finished seed at this length, whatever its status."""
        return {
            trial.seed: score
            for trial in self.ok
            if trial.quality is not None
            for score in trial.quality.scores
            if score.length == length
        }

    def values(self, length: int) -> dict[int, float]:
        """Finite quality of each seed at this length."""
        found = {seed: score.value for seed, score in self.scores(length).items() if score.status == "ok"}
        return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}

    def mean(self, length: int) -> float | None:
        values = self.values(length)
        return sum(values.values()) / len(values) if values else None

    def items(self, length: int) -> dict[int, Sequence[float]]:
        """Item scores of each seed whose quality at this length is finite."""
        finite = self.values(length)
        return {seed: score.items for seed, score in self.scores(length).items() if seed in finite}

    def missing(self, length: int) -> str:
        """Why there is no finite quality at this length."""
        for score in self.scores(length).values():
            if score.status != "ok":
                return plain(f"{score.status}: {score.reason}")
            if score.value is not None and not math.isfinite(score.value):
                return f"the score is {score.value}"
        if self.ok:
            return "not scored at this length"
        return plain(f"{self.trials[0].status}: {self.trials[0].reason}")

    def costs(self, length: int) -> tuple[Cost, ...]:
        return tuple(cost for trial in self.ok for cost in trial.costs if cost.length == length)

    def seconds(self, length: int, measure: Measure) -> float | None:
        """Median over seeds of the median time of one call."""
        timings = [getattr(cost, measure) for cost in self.costs(length) if cost.status == "ok"]
        return _median([timing.median for timing in timings if timing is not None])

    def sequence_seconds(self, length: int, measure: Measure) -> float | None:
        """Median time of one call divided by its batch: what grows with length alone."""
        seconds = self.seconds(length, measure)
        return seconds / self.costs(length)[0].batch if seconds else None

    def rate(self, length: int, measure: Measure) -> float | None:
        """Tokens per second."""
        seconds = self.sequence_seconds(length, measure)
        return length / seconds if seconds else None

    def memory(self, length: int) -> float | None:
        """Bytes that a training step needs beyond weights and optimiser state, median over seeds."""
        known = [cost.memory for cost in self.costs(length) if cost.status == "ok" and cost.memory is not None]
        return _median([float(memory) for memory in known])

    def sequence_memory(self, length: int) -> float | None:
        """The same divided by the batch."""
        memory = self.memory(length)
        return memory / self.costs(length)[0].batch if memory else None

    def unmeasured(self, length: int) -> str:
        """Why a seed has no cost at this length, empty if none failed."""
        failures = [cost for cost in self.costs(length) if cost.status != "ok"]
        return plain(f"{failures[0].status}: {failures[0].reason}") if failures else ""


@dataclass(frozen=True)
class Panel:
    """Everything that may be compared with each other.

    ``home`` is the length of the headline quality: the trained one. ``cost_home`` is that of the headline speed and
    memory: the longest that every timed method reached, since at short lengths fixed overhead makes all look alike.
    """

    task: str
    model: str
    steps: int | None
    data: Data | None
    device: str
    metric: str
    better: Literal["lower", "higher"]
    chance: float | None
    train_length: int
    methods: tuple[Method, ...]
    references: tuple[Reference, ...]
    baseline: Method | None

    @property
    def finished(self) -> tuple[Method, ...]:
        return tuple(method for method in self.methods if method.ok)

    @property
    def lengths(self) -> tuple[int, ...]:
        return _lengths(s.length for m in self.finished for t in m.ok if t.quality for s in t.quality.scores)

    @property
    def cost_lengths(self) -> tuple[int, ...]:
        return _lengths(cost.length for method in self.finished for trial in method.ok for cost in trial.costs)

    @property
    def home(self) -> int:
        lengths = self.lengths
        return self.train_length if self.train_length in lengths else next(iter(lengths), self.train_length)

    @property
    def cost_home(self) -> int:
        lengths = self.cost_lengths
        timed = [{n for n in lengths if method.seconds(n, "step")} for method in self.finished]
        shared = set(lengths).intersection(*[found for found in timed if found])
        return max(shared or lengths, default=self.home)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({trial.seed for method in self.finished for trial in method.ok}))

    def ranked(self) -> tuple[Method, ...]:
        """Finished methods, best headline quality first, those without a finite one last; then the unfinished."""
        sign = 1 if self.better == "lower" else -1
        qualities = {id(method): method.mean(self.home) for method in self.methods}

        def rank(method: Method) -> tuple:
            quality = qualities[id(method)]
            return (not method.ok, quality is None, 0.0 if quality is None else sign * quality)

        return tuple(sorted(self.methods, key=rank))

    def reference_value(self, reference: Reference) -> float | None:
        """A reference line's value: at the headline length, else its only one."""
        scores = reference.quality.scores if reference.quality else ()
        at_home = [score.value for score in scores if score.length == self.home] or [
            score.value for score in scores[:1]
        ]
        return at_home[0] if at_home and at_home[0] is not None and math.isfinite(at_home[0]) else None

    def lines(self) -> tuple[tuple[str, float], ...]:
        """Chance and the reference lines that have a value, best first."""
        lines = [(plain(line.name), self.reference_value(line)) for line in self.references]
        lines += [("chance", self.chance)]
        known = [(name, value) for name, value in lines if value is not None]
        return tuple(sorted(known, key=lambda line: line[1], reverse=self.better == "higher"))

    def differences(self, length: int) -> dict[Key, tuple[Difference, float]]:
        """By method key: difference to the baseline at a length, and its p value adjusted by Holm over the methods."""
        if self.baseline is None:
            return {}
        theirs = self.baseline.items(length)
        others = [method for method in self.finished if method is not self.baseline]
        found = [(method.key, paired(method.items(length), theirs)) for method in others]
        known = [(key, difference) for key, difference in found if difference is not None]
        adjusted = holm([difference.interval.p for _, difference in known])
        return {key: (difference, p) for (key, difference), p in zip(known, adjusted, strict=True)}

    def exponent(self, method: Method, measure: Measure | Literal["memory"] = "step") -> Exponent | None:
        lengths = self.cost_lengths
        return exponent(lengths, [_cost(method, n, measure) for n in lengths])

    def crossover(self, method: Method) -> float | None:
        """The length from which the method's training step is faster than the baseline's.

        None unless, at the longest length both reached, its slowest quartile beats the baseline's fastest: noise is
        no crossover.
        """
        if self.baseline is None or method.key == self.baseline.key:
            return None
        shared = [n for n in self.cost_lengths if method.seconds(n, "step") and self.baseline.seconds(n, "step")]
        if not shared or _quartile(method, shared[-1], "high") >= _quartile(self.baseline, shared[-1], "low"):
            return None
        ours, theirs = ([m.sequence_seconds(n, "step") for n in shared] for m in (method, self.baseline))
        return crossover(shared, ours, theirs)


def _cost(method: Method, length: int, measure: Measure | Literal["memory"]) -> float | None:
    return method.sequence_memory(length) if measure == "memory" else method.sequence_seconds(length, measure)


def _quartile(method: Method, length: int, which: Literal["low", "high"]) -> float:
    steps = [(cost.step, cost.batch) for cost in method.costs(length) if cost.status == "ok" and cost.step is not None]
    found = [(step.low if which == "low" else step.high) / batch for step, batch in steps]
    return min(found) if which == "low" else max(found)


def _lengths(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(lengths)))


def _median(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return float(statistics.median(finite)) if finite else None
