"""At which length an attention is really faster than dense attention on this machine: the driver of `anyformer bench`.

Lengths are run one after the other, the shortest first. At each, every contender is first run alone in a fresh process, which gives
its memory and keeps what fails or takes too long away from the others; then all that are left are timed together in one process.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import ValidationError

from anyformer.compare.bench_calls import refusal
from anyformer.compare.bench_peers import peer_refusal
from anyformer.compare.bench_products import useful
from anyformer.compare.bench_race import FEWEST, Entry, Probe, Race, Turn
from anyformer.compare.bench_record import (
    DENSE,
    MEASURES,
    RESULTS,
    Bench,
    Cell,
    Contender,
    Cost,
    Measure,
    Noise,
    Ratio,
    Run,
    Setting,
    append,
    read,
)
from anyformer.compare.bench_summary import summarise
from anyformer.compare.clock import timing
from anyformer.compare.process import Limits, Outcome, run
from anyformer.compare.record import Status
from anyformer.compare.text import duration
from anyformer.compare.trial import grid
from anyformer.compare.worker import Job, Kind
from anyformer.errors import SpecError, StoreError

_SMALLEST = 1024  # tokens; from shorter lengths dense attention is not extrapolated, since fixed costs hide its growth
_LEAST = 10.0  # seconds that a contender may take at a length, whatever was asked for
_SHARE = 0.8  # of the free memory that one contender may take
_PATIENCE = 60.0  # seconds a process may take beside its calls

Fault = tuple[Status, str]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be timed.

    Args:
        attentions, positions: specs; all pairs of them are contenders, and lists in knobs stand for grids.
        peers: names of other packages' methods.
        lengths: tokens.
        setting: what all share.
        seconds: about how long the rounds of one length take.
        command: the command line, for the record.
    """

    attentions: tuple[str, ...]
    positions: tuple[str, ...] = ("none",)
    peers: tuple[str, ...] = ()
    lengths: tuple[int, ...]
    setting: Setting = field(default_factory=Setting)
    seconds: float = 20.0
    command: str = ""


def setting_of(given: Mapping[str, object]) -> Setting:
    """The setting with these values by name.

    Raises:
        SpecError: a value it cannot have.
    """
    try:
        return Setting.model_validate(given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = str(fault["loc"][0]).replace("_", "-")
        why = fault["msg"].removeprefix("Input should be ")
        raise SpecError(f"--{name}: expected {why}, got {fault['input']!r}") from None


def bench(request: Request, folder: str | Path, notice: Callable[[str], None] = lambda text: None) -> Bench:
    """Time everything that was asked for, and write `folder`/bench.jsonl on the way.

    Args:
        notice: told what is being done.

    Raises:
        SpecError: a spec, a length or a peer that does not exist, or a peer whose package is missing.
        StoreError: the folder cannot be used, or holds a benchmark already. Both before anything is timed.
    """
    if not request.lengths:
        raise SpecError("expected at least one length, got none; for example --lengths 1024 2048 4096")
    if min(request.lengths) < 1 or not 0 < request.seconds < math.inf:
        raise SpecError(
            f"expected lengths of at least 1 token and more than 0 seconds, got {min(request.lengths)} and {request.seconds:g}"
        )
    contenders, refused = _contenders(request)
    _Driver(request, contenders, refused, _prepare(folder), notice).run()
    return read(folder)


def anchor(length: int, known: int, took: float, seconds: float) -> int:
    """The length at which dense attention is to be timed for `length`: that itself, or the largest of its halves, quarters ...
    at which a warm call and the fewest rounds fit into `seconds`; not below 1024.

    Args:
        known: a length at which one call of each kind took `took` seconds; they grow with the square.
    """
    at = length
    while at >= 2 * _SMALLEST and (1 + FEWEST) * took * (at / known) ** 2 > seconds:
        at = math.ceil(at / 2)
    return at


def predicted(points: Sequence[tuple[int, float]], length: int) -> float:
    """Seconds at `length` from those at shorter lengths, by the slope of the last two; 0 where nothing is known."""
    if not points:
        return 0.0
    (last, took), slope = points[-1], 1.0
    if len(points) > 1:
        (earlier, then) = points[-2]
        slope = min(max(math.log(took / then) / math.log(last / earlier), 1.0), 2.5)
    return took * (length / last) ** slope


class _Driver:
    def __init__(
        self,
        request: Request,
        contenders: tuple[Contender, ...],
        refused: dict[Contender, str],
        path: Path,
        notice: Callable[[str], None],
    ) -> None:
        self.request, self.contenders, self.refused = request, contenders, refused
        self.path, self.notice = path, notice
        self.lengths = sorted(set(request.lengths))
        self.cells: list[Cell] = []
        self.known: dict[Contender, list[tuple[int, float]]] = {}
        self.gone: dict[Contender, tuple[int, Fault]] = {}
        self.calibration: list[float] = []
        self.allowed = max(request.seconds, _LEAST)
        self.first: tuple[int, Probe] | None = None

    def run(self) -> None:
        """Measure, cell by cell, and sum up."""
        found = self._begin()
        for length in self.lengths:
            for cell in self._length(length):
                append(self.path, cell)
                self.cells.append(cell)
        for contender in self.contenders:
            append(self.path, summarise(contender, [cell for cell in self.cells if cell.contender == contender]))
        load = (found, *os.getloadavg()[:1]) if found is not None else ()
        append(self.path, Noise(load=load, calibration=tuple(self.calibration)))

    def _begin(self) -> float | None:
        """Write the first line; return the load of the machine."""
        request = self.request
        start = min(self.lengths[0], _SMALLEST)
        found = self._probe(DENSE, start)
        if not isinstance(found, Probe):
            raise SpecError(f"dense attention itself failed at {start} tokens ({found[0]}): {found[1]}")
        self.first = (start, found)
        line = Run(
            setting=request.setting,
            lengths=tuple(self.lengths),
            seconds=request.seconds,
            environment=found.environment,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            command=request.command,
        )
        append(self.path, line)
        return found.environment.load

    def _length(self, length: int) -> list[Cell]:
        """The cells of one length."""
        at, found = self._dense(length)
        tried = {DENSE: found} | {each: self._try(each, length) for each in self.contenders if each != DENSE}
        probes = {each: found for each, found in tried.items() if isinstance(found, Probe)}
        faults = {each: found for each, found in tried.items() if not isinstance(found, Probe)}
        raced, fault = self._race(length, {each: at if each == DENSE else length for each in probes})
        if fault is not None:
            faults |= dict.fromkeys(probes, fault)
        faults |= raced.faults
        self.calibration += raced.calibration
        cells = []
        for contender in self.contenders:
            costs = faults.get(contender) or self._costs(contender, length, at, raced, probes)
            way = raced.ways.get(contender, "")
            cells.append(_cell(contender, length, costs, way, None if at == length else at))
        return cells

    def _dense(self, length: int) -> tuple[int, Probe | Fault]:
        """The length at which dense attention stands in for this one, and its probe there."""
        known, took = self.known[DENSE][-1]
        at = anchor(length, known, took, self.allowed)
        if self.first is not None and self.first[0] == at:
            return self.first
        while not isinstance(found := self._probe(DENSE, at), Probe) and at >= 2 * _SMALLEST:
            at = math.ceil(at / 2)
        return at, found

    def _try(self, contender: Contender, length: int) -> Probe | Fault:
        """The probe of a contender, or why there is none."""
        if contender in self.refused:
            return "refused", self.refused[contender]
        if contender in self.gone:
            earlier, (status, reason) = self.gone[contender]
            return status, f"not tried, since {earlier} tokens ended so: {reason}"
        late = self._late(predicted(self.known.get(contender, []), length))
        found: Probe | Fault = ("timeout", late) if late else self._probe(contender, length)
        if isinstance(found, Probe):
            late = self._late(found.both)
            found = ("timeout", late) if late else found
        if not isinstance(found, Probe) and found[0] in ("oom", "timeout"):
            self.gone[contender] = (length, found)
        return found

    def _late(self, took: float) -> str:
        """Why calls that take this many seconds are not timed; "" where there is time for them."""
        needed = (1 + FEWEST) * took
        if needed <= self.allowed:
            return ""
        allowed = duration(self.allowed)
        return f"a warm call and {FEWEST} rounds would take {duration(needed)}, more than {allowed}; raise --seconds"

    def _probe(self, contender: Contender, length: int) -> Probe | Fault:
        self.notice(f"{length} tokens: {contender.name} alone")
        limits = Limits(seconds=_PATIENCE + 10 * self.allowed, memory=int(_SHARE * psutil.virtual_memory().available))
        outcome = self._ask("probe", {contender: length}, limits)
        if outcome.status != "ok":
            return outcome.status, outcome.reason
        found: Probe = outcome.values["probe"]
        self.known.setdefault(contender, []).append((length, found.both))
        return found

    def _race(self, length: int, entries: dict[Contender, int]) -> tuple[Race, Fault | None]:
        self.notice(f"{length} tokens: {len(entries)} contenders in turn")
        outcome = self._ask("race", entries, Limits())
        if outcome.status != "ok":
            return Race(), (outcome.status, outcome.reason)
        return outcome.values["race"], None

    def _ask(self, kind: Kind, entries: dict[Contender, int], limits: Limits) -> Outcome:
        turn = Turn(self.request.setting, tuple(Entry(each, at) for each, at in entries.items()), self.request.seconds)
        return run(Job(kind, turn=turn, threads=self.request.setting.threads), limits, lambda message: None)

    def _costs(
        self, contender: Contender, length: int, at: int, raced: Race, probes: dict[Contender, Probe]
    ) -> dict[Measure, Cost] | Fault:
        operations = useful(contender, self.request.setting, length)
        there, here = (useful(DENSE, self.request.setting, each) for each in (at, length))
        assert there is not None
        assert here is not None
        costs: dict[Measure, Cost] = {}
        for measure in MEASURES:
            more = here[measure] / there[measure]
            dense = [more * each for each in raced.seconds.get((DENSE, measure), [])]
            seconds = dense if contender == DENSE else raced.seconds[contender, measure]
            if min(seconds) <= 0:
                return "error", "its linear maps alone took as long as all of it: too short a length to tell its core"
            taken = timing(seconds)
            extrapolated = contender == DENSE and at != length
            costs[measure] = Cost(
                time=taken,
                memory=None if extrapolated else probes[contender].memory[measure],
                rate=None if operations is None else operations[measure] / taken.median,
                ratio=None if contender == DENSE or not dense else _ratio(dense, seconds),
            )
        return costs


def _contenders(request: Request) -> tuple[tuple[Contender, ...], dict[Contender, str]]:
    """Dense attention, all pairs and all peers, and why some of them cannot be timed."""
    longest = max(request.lengths)
    pairs = [
        Contender(role="own", attention=attention, position=position)
        for attention in grid(request.attentions, "attention")
        for position in grid(request.positions, "position")
    ]
    peers = [Contender(role="peer", attention=name) for name in dict.fromkeys(request.peers)]
    if not pairs and not peers:
        raise SpecError("expected something to time, got no --attention and no --peer")
    reasons = {pair: refusal(pair, request.setting, longest) for pair in pairs}
    reasons |= {each: peer_refusal(each.attention, request.setting) for each in peers}
    return (DENSE, *pairs, *peers), {each: reason for each, reason in reasons.items() if reason}


def _prepare(folder: str | Path) -> Path:
    path = Path(folder) / RESULTS
    if path.exists() and path.stat().st_size:  # an empty one was stopped before it began
        raise StoreError(f"{folder} holds a benchmark already; give --out another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror}. Give --out a folder you may write to") from None
    return path


def _cell(
    contender: Contender, length: int, found: dict[Measure, Cost] | Fault, way: str, dense_from: int | None
) -> Cell:
    facts = {"contender": contender, "name": contender.name, "length": length}
    if isinstance(found, tuple):
        return Cell(**facts, status=found[0], reason=found[1])
    return Cell(**facts, **found, way=way, dense_from=dense_from)


def _ratio(dense: Sequence[float], seconds: Sequence[float]) -> Ratio:
    found = timing([theirs / ours for theirs, ours in zip(dense, seconds, strict=True)])
    return Ratio(median=found.median, low=found.low, high=found.high)
