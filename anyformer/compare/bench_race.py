"""What another process does for a benchmark: probe one contender alone, or race all of them in interleaved rounds."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from anyformer.attention._ways import ways
from anyformer.compare.bench_calls import Calls, Inputs, own_calls
from anyformer.compare.bench_peers import peer_calls
from anyformer.compare.bench_record import MEASURES, Contender, Measure, Setting
from anyformer.compare.clock import calibrate, seconds_of
from anyformer.compare.environment import environment
from anyformer.compare.fault import fault_of
from anyformer.compare.memory import peak_of
from anyformer.compare.record import Environment, Status

FEWEST = 3
"""Rounds, however long they take."""

_MOST = 200
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Entry:
    """A contender and the length it is to be run at."""

    contender: Contender
    length: int


@dataclass(frozen=True)
class Turn:
    """What one process is to measure, and for how many seconds about."""

    setting: Setting
    entries: tuple[Entry, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class Probe:
    """One contender alone in a fresh process: bytes and seconds of a warm call of each kind."""

    memory: dict[Measure, int]
    seconds: dict[Measure, float]
    environment: Environment

    @property
    def both(self) -> float:
        """Seconds that a call of each kind takes."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Race:
    """Seconds of each round by contender and kind of call, the ways that softmax attention took and faults by contender, and the
    calibration before each round."""

    seconds: dict[tuple[Contender, Measure], list[float]] = field(default_factory=dict)
    ways: dict[Contender, str] = field(default_factory=dict)
    faults: dict[Contender, tuple[Status, str]] = field(default_factory=dict)
    calibration: list[float] = field(default_factory=list)


def probe(turn: Turn) -> Probe:
    """Measure the memory of the one entry of a turn."""
    (entry,) = turn.entries
    made = _calls(entry, turn.setting, Inputs(turn.setting))
    memory: dict[Measure, int] = {}
    seconds: dict[Measure, float] = {}
    for measure in MEASURES:
        memory[measure], seconds[measure] = _alone(made.call(measure))
    return Probe(memory, seconds, environment(_CPU))


def _alone(call: Callable[[], object]) -> tuple[int, float]:
    """Bytes and seconds of a call that has been made once before."""
    call()
    taken: list[float] = []
    needed = peak_of(lambda: taken.append(seconds_of(call, _CPU)), _CPU)
    return needed, taken[0]


def race(turn: Turn) -> Race:
    """Time all entries of a turn, one call of each, then the next round; each round begins with another of them.

    At least `FEWEST` rounds are taken, then as many as the turn's seconds allow.
    """
    inputs, found = Inputs(turn.setting), Race()
    lanes: dict[Contender, Calls] = {}
    for entry in turn.entries:
        try:
            made = _calls(entry, turn.setting, inputs)
            with ways() as taken:
                for measure in MEASURES:  # warm
                    for call in _parts(made, measure):
                        call()
            lanes[entry.contender], found.ways[entry.contender] = made, ", ".join(taken)
        except Exception as error:  # the others are timed without it
            found.faults[entry.contender] = fault_of(error)
    names, number, started = list(lanes), 0, time.perf_counter()
    while names and number < _MOST and (number < FEWEST or time.perf_counter() - started < turn.seconds):
        found.calibration.append(calibrate(_CPU))
        first = number % len(names)
        for measure in MEASURES:
            for name in names[first:] + names[:first]:
                whole, *less = (seconds_of(call, _CPU) for call in _parts(lanes[name], measure))
                found.seconds.setdefault((name, measure), []).append(whole - sum(less))
        number += 1
    return found


def _calls(entry: Entry, setting: Setting, inputs: Inputs) -> Calls:
    torch.manual_seed(setting.seed)
    make = own_calls if entry.contender.role != "peer" else _peer
    return make(entry.contender, setting, entry.length, inputs)


def _peer(contender: Contender, setting: Setting, length: int, inputs: Inputs) -> Calls:
    return peer_calls(contender.attention, setting, length, inputs)


def _parts(made: Calls, measure: Measure) -> list[Callable[[], object]]:
    return [made.call(measure)] + ([] if made.less is None else [made.less.call(measure)])
