"""The lines of a benchmark's `bench.jsonl`: what it ran on, one line a cell, one line a method, how quiet the machine was.

Units: lengths in tokens, times in seconds, memory in bytes, rates in floating point operations a second.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from anyformer.compare.record import Environment, Status, Text, Timing
from anyformer.compare.text import MINUS
from anyformer.errors import StoreError
from anyformer.model.build import short_name
from anyformer.site import Site

SCHEMA = 1
RESULTS = "bench.jsonl"

Measure = Literal["forward", "forward_backward"]
MEASURES: tuple[Measure, ...] = ("forward", "forward_backward")
What = Literal["attention", "layer"]
DType = Literal["float32", "bfloat16"]
Role = Literal["dense", "own", "peer"]


class _Model(BaseModel, frozen=True):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="strings")


class Setting(_Model, frozen=True):
    """What all contenders share.

    Args:
        what: "attention" is timed on q, k and v; "layer" with its projections, on x of width heads * head_dim.
        heads, head_dim, batch: sizes.
        causal: whether a token looks back only.
        dtype: of tensors and weights.
        threads: threads of torch; 0: its own choice.
        seed: of inputs, weights and drawn structure.
    """

    what: What = "attention"
    heads: int = Field(default=8, ge=1)
    head_dim: int = Field(default=64, ge=1)
    batch: int = Field(default=1, ge=1)
    causal: bool = False
    dtype: DType = "float32"
    threads: int = Field(default=0, ge=0)
    seed: int = 0

    @property
    def dim(self) -> int:
        """Width of a layer."""
        return self.heads * self.head_dim

    def site(self, length: int) -> Site:
        """Where a method is built to be run at this length."""
        return Site(self.dim, self.heads, head_dim=self.head_dim, causal=self.causal, max_length=length, seed=self.seed)

    def __str__(self) -> str:
        direction = "causal" if self.causal else "both directions"
        heads = f"{self.heads} head{'s' * (self.heads > 1)} of {self.head_dim}"
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{self.what}, batch {self.batch}, {heads}, {direction}, {self.dtype}{threads}"


class Contender(_Model, frozen=True):
    """One method of a benchmark: dense attention, a pair of our own specs, or another package's method."""

    role: Role
    attention: Text = ""
    position: Text = ""

    @property
    def name(self) -> str:
        """What people read."""
        if self.role != "own":
            return self.attention
        return f"{short_name(self.attention)} + {self.position}"


DENSE = Contender(role="dense", attention="dense")


class Ratio(_Model, frozen=True):
    """Seconds of dense attention over those of the method in the same round: median and quartiles over rounds."""

    median: float
    low: float
    high: float


class Cost(_Model, frozen=True):
    """One kind of call: seconds, bytes beyond what is held before it, useful operations a second, and the ratio to dense."""

    time: Timing
    memory: int | None = None
    rate: float | None = None
    ratio: Ratio | None = None


class Run(_Model, frozen=True):
    """The first line: what was asked for, and on which machine."""

    kind: Literal["run"] = "run"
    version: Literal[1] = Field(default=SCHEMA, alias="schema")
    setting: Setting
    lengths: tuple[int, ...]
    seconds: float
    environment: Environment
    started: Text = ""
    command: Text = ""


class Cell(_Model, frozen=True):
    """One method at one length.

    ``way`` names how softmax attention was computed. ``dense_from``: dense attention was timed at that length only, and its
    seconds here are those times the ratio of the operations (the square of the lengths' ratio for attention alone). In a line
    of another method, its ratio leans on that.
    """

    kind: Literal["cell"] = "cell"
    contender: Contender
    name: Text
    length: int = Field(gt=0)
    status: Status = "ok"
    reason: Text = ""
    forward: Cost | None = None
    forward_backward: Cost | None = None
    way: Text = ""
    dense_from: int | None = None

    @model_validator(mode="after")
    def _explained(self):
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a cell with status {self.status!r} needs a reason ({self.name} at {self.length})")
        return self

    def cost(self, measure: Measure) -> Cost | None:
        """The cost of one kind of call; None where it was not measured."""
        return self.forward if measure == "forward" else self.forward_backward


class Growth(_Model, frozen=True):
    """Value ~ length ** slope over these lengths; ``short``: fitted below 1024 tokens, where fixed costs hide the slope."""

    slope: float
    lengths: tuple[int, ...]
    short: bool

    def __str__(self) -> str:
        return f"{self.slope:.2f}".replace("-", MINUS) + ("†" if self.short else "")


class BreakEven(_Model, frozen=True):
    """From which length on a method is faster than dense attention.

    "between": from ``length`` on, read off between two measured lengths; "first": already at ``length``, the shortest; "never":
    at no measured length, ``length`` the longest; "lost": faster at some, but not at ``length``, the longest; "unknown": no ratio.
    ``extrapolated``: the dense seconds that this leans on were.
    """

    verdict: Literal["first", "between", "never", "lost", "unknown"]
    length: float | None = None
    extrapolated: bool = False

    def __str__(self) -> str:
        marked = "≈" if self.extrapolated else ""
        match self.verdict:
            case "first":
                return f"faster from the first{marked} ({self.length:.0f})"
            case "between":
                return f"{marked}{self.length:.0f}"
            case "never":
                return f"slower at all measured lengths{marked}"
            case "lost":
                return f"slower again at {marked}{self.length:.0f}"
        return "unknown"


class Trend(_Model, frozen=True):
    """How one kind of call grows with the length, and where it breaks even with dense attention."""

    time: Growth | None = None
    memory: Growth | None = None
    break_even: BreakEven = BreakEven(verdict="unknown")


class Summary(_Model, frozen=True):
    """One method over all lengths."""

    kind: Literal["method"] = "method"
    contender: Contender
    name: Text
    forward: Trend
    forward_backward: Trend

    def trend(self, measure: Measure) -> Trend:
        """The trend of one kind of call."""
        return self.forward if measure == "forward" else self.forward_backward


class Noise(_Model, frozen=True):
    """The last line: the load of the machine at both ends, and the seconds of one fixed matrix product before each round."""

    kind: Literal["noise"] = "noise"
    load: tuple[float, ...] = ()
    calibration: tuple[float, ...] = ()


Line = Union[Run, Cell, Summary, Noise]  # noqa: UP007  (a discriminated union, read by TypeAdapter)
_ADAPTER: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])
_Kind = TypeVar("_Kind", Run, Cell, Summary, Noise)


class Bench(_Model, frozen=True):
    """All lines of a benchmark; one that was stopped has no summaries and no noise."""

    run: Run
    cells: tuple[Cell, ...] = ()
    summaries: tuple[Summary, ...] = ()
    noise: Noise | None = None

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Every method, in the order asked for, dense attention first."""
        return tuple(dict.fromkeys(cell.contender for cell in self.cells))

    def of(self, contender: Contender) -> tuple[Cell, ...]:
        """The cells of a method, in order of length."""
        return tuple(sorted((c for c in self.cells if c.contender == contender), key=lambda cell: cell.length))


def append(path: Path, line: Line) -> None:
    """Add a line; when this returns, it is on disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line.model_dump_json(by_alias=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: str | Path) -> Bench:
    """The benchmark in a folder.

    Raises:
        StoreError: there is none, or a line is not one of this version's.
    """
    path = Path(folder) / RESULTS
    if not path.is_file():
        raise StoreError(
            f"{folder} holds no benchmark: it has no {RESULTS}. Name a folder that 'anyformer bench' wrote"
        )
    lines = [_line(path, number, text) for number, text in enumerate(path.read_text().splitlines(), 1)]
    runs = _of(lines, Run)
    if not runs:
        raise StoreError(f"{path} holds no benchmark: it has no line of kind 'run'")
    return Bench(
        run=runs[0], cells=_of(lines, Cell), summaries=_of(lines, Summary), noise=next(iter(_of(lines, Noise)), None)
    )


def _of(lines: list[Line], kind: type[_Kind]) -> tuple[_Kind, ...]:
    return tuple(line for line in lines if isinstance(line, kind))


def _line(path: Path, number: int, text: str) -> Line:
    try:
        return _ADAPTER.validate_python(json.loads(text), strict=False)
    except (ValidationError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise StoreError(f"line {number} of {path} is not one that this version reads: {first}") from None
