"""One line of ``results.jsonl``: what was tried, how it ended, what was measured.

Every line, also one of a trial that was refused or that failed, has ``schema``, ``kind``, ``trial``, ``key``,
``task`` and ``status``. A line is plain JSON: ``NaN`` and the infinities are written as strings, as JSON has no
numbers for them.

Units: lengths in tokens, times in seconds, memory in bytes, loss in nats per predicted token.
"""

import hashlib
import json
from typing import Annotated, Literal, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

SCHEMA = 1

Status = Literal["ok", "refused", "unsupported", "oom", "timeout", "diverged", "error"]


class LineError(ValueError):
    """A line of a results file that is not a record of this schema."""


def _encodable(text: object) -> object:
    # file names and captured output may hold undecodable bytes as lone surrogates, which JSON cannot carry
    return text.encode("utf-8", "backslashreplace").decode() if isinstance(text, str) else text


Text = Annotated[str, BeforeValidator(_encodable)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, ser_json_inf_nan="strings")


class Data(_Model):
    """Which data a task read. Two trials may be compared only if their fingerprints agree."""

    name: Text
    fingerprint: Text
    note: Text = ""


class Score(_Model):
    """Quality at one length; ``items`` holds one score per evaluation item, in the same order in every trial."""

    length: int = Field(gt=0)
    status: Status = "ok"
    reason: Text = ""
    value: float | None = None
    items: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _complete(self):
        if self.status == "ok" and self.value is None:
            raise ValueError(f"a score with status 'ok' needs a value (length {self.length})")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a score with status {self.status!r} needs a reason (length {self.length})")
        return self


class Quality(_Model):
    """A metric over lengths. ``train_length`` is the length the model was trained at, 0 where nothing was trained."""

    metric: Text
    better: Literal["lower", "higher"]
    train_length: int = Field(default=0, ge=0)
    scores: tuple[Score, ...] = ()
    chance: float | None = None

    @field_validator("scores")
    @classmethod
    def _sorted(cls, scores):
        lengths = [score.length for score in scores]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"scores must come in order of length, each length once; got lengths {lengths}")
        return scores


class Timing(_Model):
    """Seconds of one call: median, quartiles and minimum over interleaved rounds."""

    median: float
    low: float
    high: float
    min: float
    rounds: int = Field(ge=1)


class Cost(_Model):
    """Time and memory at one length, of ``batch`` rows.

    ``memory`` is what a training step needs beyond weights and optimiser state, ``peak`` with both; ``way`` names how softmax
    attention was computed.
    """

    length: int = Field(gt=0)
    batch: int = Field(default=1, gt=0)
    status: Status = "ok"
    reason: Text = ""
    forward: Timing | None = None
    forward_backward: Timing | None = None
    step: Timing | None = None
    memory: int | None = None
    peak: int | None = None
    way: Text = ""

    @model_validator(mode="after")
    def _explained(self):
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a cost with status {self.status!r} needs a reason (length {self.length})")
        return self


class Parameters(_Model):
    """Trained numbers: all, those of the position encoding, those of the token embedding and the head."""

    total: int = Field(ge=0)
    position: int = Field(default=0, ge=0)
    embedding: int = Field(default=0, ge=0)


class Environment(_Model):
    """The machine and the versions. ``fingerprint`` covers what may change a time, not the load of the moment."""

    fingerprint: Text
    device: Text = "cpu"
    processor: Text = ""
    cores: int = 0
    threads: int = 0
    memory: int = 0
    platform: Text = ""
    versions: dict[Text, Text] = Field(default_factory=dict)
    notes: dict[Text, Text] = Field(default_factory=dict)
    load: float | None = None
    shared: bool = False
    calibration: tuple[float, ...] = ()


class _Line(_Model):
    version: Literal[1] = Field(default=SCHEMA, alias="schema")
    trial: Text = Field(min_length=1)
    key: Text = Field(min_length=1)
    task: Text = Field(min_length=1)
    status: Status
    reason: Text = ""
    details: Text = ""
    data: Data | None = None
    quality: Quality | None = None
    seconds: float | None = None
    finished: Text = ""
    command: Text = ""

    @model_validator(mode="after")
    def _accounted_for(self):
        if self.status == "ok" and self.quality is None:
            raise ValueError("a line with status 'ok' needs a quality")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a line with status {self.status!r} needs a reason")
        return self


class Trial(_Line):
    """One (attention, position, task, model, seed), run once.

    ``index`` is the cell's place in the grid that was asked for; ``attention_family`` and ``position_family`` are
    paths from the root of the survey's tree; ``details`` holds the last lines of an error; ``impl`` names the
    implementation that ran each part; ``curve`` is the training loss as (step, loss) points.
    """

    kind: Literal["trial"] = "trial"
    attention: Text = Field(min_length=1)
    position: Text = Field(min_length=1)
    attention_family: tuple[Text, ...] = ()
    position_family: tuple[Text, ...] = ()
    label: Text = ""
    index: int = 0
    seed: int = 0
    model: Text = ""
    steps: int | None = None
    batch: int | None = None
    parameters: Parameters | None = None
    curve: tuple[tuple[int, float], ...] = ()
    costs: tuple[Cost, ...] = ()
    tokens_per_second: float | None = None
    impl: dict[Text, Text] = Field(default_factory=dict)
    environment: Environment | None = None

    @property
    def name(self) -> str:
        """What people read: the label, or ``attention + position``."""
        return self.label or f"{self.attention} + {self.position}"


class Reference(_Line):
    """A line that uses no attention at all (majority, n-grams, xz ...), drawn beside the trials."""

    kind: Literal["reference"] = "reference"
    name: Text = Field(min_length=1)
    note: Text = ""


Record = Union[Trial, Reference]  # noqa: UP007  (a discriminated union, read by TypeAdapter)
_ADAPTER = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def key_of(trial: str, *facts: str) -> str:
    """The identity of a trial: a hash of its text and of what it depends on (data fingerprint, versions, device)."""
    text = json.dumps([trial, *facts], ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def to_line(record: Record) -> str:
    """The record as one line of JSON, without the line's end."""
    return record.model_dump_json(by_alias=True, exclude_defaults=False)


def from_line(line: str | bytes) -> Record:
    """Reads one line. Raises LineError if it is not a record, or one of a schema this version does not know."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON ({error})") from None
    if not isinstance(raw, dict) or "schema" not in raw:
        raise LineError("not an anyformer record: it has no 'schema'")
    if raw["schema"] != SCHEMA:
        raise LineError(f"schema {raw['schema']!r}, this version reads schema {SCHEMA}: update anyformer to read it")
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'][1:])) or 'line'}: {fault['msg']}" for fault in error.errors()]
        raise LineError("; ".join(faults[:3])) from None
