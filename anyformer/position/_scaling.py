"""Ways to stretch rotary frequencies to inputs longer than in training: `rope(scaling=yarn(factor=4, original=2048))`.

Each takes the plain frequencies w_l = base ** (-2 l / r) of r rotated channels and gives others, for a length `original` in
training and a factor s by which inputs are longer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated

import annotated_types as at
import torch
from jaxtyping import Float64, Int
from pydantic import PlainValidator
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.registry import Maker, bind, canonical, unknown
from anyformer.spec import Spec, parse
from anyformer.typing import PositiveFloat, Size

Factor = Annotated[float, at.Ge(1)]
Speeds = Float64[Tensor, "f"]


@dataclass(frozen=True)
class Scaling:
    """A way to scale.

    Args:
        factor: how much longer inputs are than in training, at least 1.
    """

    factor: Factor = 2.0

    def apply(self, speeds: Speeds, base: float, max_length: int) -> Speeds:
        """The scaled frequencies, in radians a token.

        Args:
            speeds: the plain ones.
            max_length: the longest input; without `original`, training ended at max_length / factor.
        """
        raise NotImplementedError

    def magnitude(self, max_length: int) -> float:
        """Factor on rotated queries and keys."""
        return 1.0


@dataclass(frozen=True)
class Linear(Scaling):
    """w / s: positions are squeezed into the trained range. Chen et al. 2023, 2306.15595."""

    def apply(self, speeds: Speeds, base: float, max_length: int) -> Speeds:
        return speeds / self.factor


@dataclass(frozen=True)
class Ntk(Scaling):
    """Base times s ** (r / (r - 2)): the slowest pair is squeezed, the fastest left alone. bloc97 2023."""

    def apply(self, speeds: Speeds, base: float, max_length: int) -> Speeds:
        return speeds * torch.as_tensor(self.factor, device=speeds.device) ** -_ramp(speeds)


@dataclass(frozen=True)
class DynamicNtk(Scaling):
    """`ntk` with the s of each query: s n / original - (s - 1) for the n tokens up to it, 1 within the trained length."""

    original: Size | None = None

    def apply(self, speeds: Speeds, base: float, max_length: int) -> Speeds:
        return speeds

    def trained(self, max_length: int) -> int:
        """The length up to which frequencies are plain."""
        return _original(self.original, self.factor, max_length)

    def at(self, speeds: Speeds, lengths: Int[Tensor, "*n"], max_length: int) -> Float64[Tensor, "*n f"]:
        """The frequencies of queries that see so many tokens."""
        original = self.trained(max_length)
        stretch = self.factor * lengths.clamp(min=original).to(speeds.dtype) / original - (self.factor - 1)
        return speeds * stretch[..., None] ** -_ramp(speeds)


@dataclass(frozen=True)
class Yarn(Scaling):
    """Slow pairs as `linear`, fast ones plain, between them a ramp over the number of the pair; rotated products grow by t^2 with
    t = 0.1 ln s + 1. Peng et al. 2023, 2309.00071.

    Args:
        beta_fast, beta_slow: turns within `original` tokens from which a pair is plain, and up to which it is squeezed.
        truncate: whether the ends of the ramp are whole pairs.
        attention: t; None: by the formula.
    """

    original: Size | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    attention: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if self.beta_slow >= self.beta_fast:
            raise SpecError(
                f"yarn: expected beta_slow below beta_fast, got {self.beta_slow} and {self.beta_fast}; 1 and 32 are the authors'"
            )

    def apply(self, speeds: Speeds, base: float, max_length: int) -> Speeds:
        width, original = 2 * len(speeds), _original(self.original, self.factor, max_length)
        low, high = (
            width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        pairs = torch.arange(len(speeds), dtype=speeds.dtype, device=speeds.device)
        squeezed = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return speeds / self.factor * squeezed + speeds * (1 - squeezed)

    def magnitude(self, max_length: int) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.attention is None else self.attention


@dataclass(frozen=True)
class Longrope(Scaling):
    """w_l / lambda_l with a searched factor for each pair: `long` where max_length is above `original`, else `short`; rotated
    products grow by 1 + ln s / ln original. Ding et al. 2024, 2402.13753.

    Args:
        short, long: the factors lambda, one a pair.
        attention: factor on rotated queries and keys; None: the root of that growth.
    """

    original: Size | None = None
    short: tuple[PositiveFloat, ...] = ()
    long: tuple[PositiveFloat, ...] = ()
    attention: PositiveFloat | None = None

    def apply(self, speeds: Speeds, base: float, max_length: int) -> Speeds:
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) != len(speeds):
                raise SpecError(
                    f"longrope: expected one {name} factor for each of the {len(speeds)} rotated pairs of a head, "
                    f"got {len(factors)}; write {name}=[1.0, ...]"
                )
        above = max_length > _original(self.original, self.factor, max_length)
        return speeds / torch.tensor(self.long if above else self.short, dtype=speeds.dtype, device=speeds.device)

    def magnitude(self, max_length: int) -> float:
        if self.attention is not None:
            return self.attention
        original = max(_original(self.original, self.factor, max_length), 2)
        return math.sqrt(1 + math.log(self.factor) / math.log(original))


@dataclass(frozen=True)
class Llama3(Scaling):
    """Pairs that turn less than `low` times within `original` tokens as `linear`, those that turn more than `high` times plain,
    between them a mixture. Grattafiori et al. 2024, 2407.21783."""

    factor: Factor = 8.0
    original: Size | None = None
    low: PositiveFloat = 1.0
    high: PositiveFloat = 4.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise SpecError(
                f"llama3: expected low below high, got {self.low} and {self.high}; 1 and 4 are the authors'"
            )

    def apply(self, speeds: Speeds, base: float, max_length: int) -> Speeds:
        turns = _original(self.original, self.factor, max_length) * speeds / (2 * math.pi)
        plain = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return speeds / self.factor * (1 - plain) + speeds * plain


KINDS: dict[str, Callable[..., Scaling]] = {
    "linear": Linear,
    "ntk": Ntk,
    "dynamic_ntk": DynamicNtk,
    "yarn": Yarn,
    "longrope": Longrope,
    "llama3": Llama3,
}


WAYS = {"interpolate": "linear", **{name: name for name in KINDS if name != "linear"}}
"""The scaling that each way of `anyformer.extend` stands for."""


def stretching(way: Spec, trained: int, to: int) -> Spec:
    """The scaling that takes frequencies trained on `trained` tokens to inputs of `to` tokens.

    Its factor is to / trained; that of dynamic_ntk 1, with which a query that sees n tokens has s = n / trained.
    """
    name = WAYS[way.name]
    factor = 1.0 if name == "dynamic_ntk" else to / trained
    return _settled(Spec(name, (), (("factor", factor),)), way, trained)


def written_out(scaling: Spec, max_length: int) -> Spec:
    """The same scaling for any longest input: with the length in training, where that was read off the longest input."""
    factor = build(scaling).factor
    return _settled(Spec(scaling.name), scaling, _original(None, factor, max_length))


def _settled(spec: Spec, given: Spec, original: int) -> Spec:
    """The spec with the knobs that were given, and `original` where the scaling has it and it was not."""
    takes = any(each.name == "original" for each in fields(build(Spec(spec.name))))
    knobs = ({"original": original} if takes else {}) | dict(spec.knobs)
    knobs |= {name: value for name, value in given.knobs if value is not None}
    return Spec(spec.name, (), tuple(knobs.items()))


def build(spec: Spec) -> Scaling:
    """The scaling of a spec.

    Raises:
        SpecError: an unknown name, wrong knobs.
    """
    method = _method(spec)
    return KINDS[spec.name](**bind(method, spec))


def _canonical(value: object) -> Spec:
    if not isinstance(value, str | Spec):
        raise SpecError(f"expected a scaling such as yarn(factor=4, original=2048), got {value!r}")
    spec = parse(value)
    build(spec)
    return canonical(_method(spec), spec)


ScalingSpec = Annotated[Spec, PlainValidator(_canonical)]
"""A knob that takes the spec of a scaling."""


def _method(spec: Spec) -> Maker:
    if spec.name not in KINDS:
        raise SpecError(unknown("scaling of rope", spec.name, sorted(KINDS)))
    return Maker(spec.name, KINDS[spec.name])


def _original(given: int | None, factor: float, max_length: int) -> int:
    return max(round(max_length / factor), 1) if given is None else given


def _ramp(speeds: Speeds) -> Speeds:
    """0 for the fastest pair to 1 for the slowest."""
    pairs = torch.arange(len(speeds), dtype=speeds.dtype, device=speeds.device)
    return pairs / max(len(speeds) - 1, 1)
