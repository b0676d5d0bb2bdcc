"""One pair of attention and position encoding under test: how to build it and what to feed it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.forms import Verdict
from anyformer.mixer.base import Mixer
from anyformer.model.build import build_mixer, build_position, verdict
from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer
from anyformer.position.base import Position
from anyformer.site import Site

VOCAB = 31
WIDTH, HEADS, MAX_LENGTH = 32, 4, 64
SPREAD = 0.25
"""Standard deviation of every weight: the small default hides faults behind nearly uniform attention."""
COLUMNS = 5
"""Width of the grid that an encoding in two dimensions gets."""


@dataclass(frozen=True)
class Case:
    """A pair at a direction.

    Args:
        attention: spec in the attention slot.
        position: spec of the encoding.
        causal: one direction only.
        kv_heads: key and value heads, of 4 query heads.
    """

    attention: str
    position: str = "none"
    causal: bool = False
    kv_heads: int = HEADS

    def __str__(self) -> str:
        shared = "" if self.kv_heads == HEADS else f", {self.kv_heads} key heads"
        return f"{self.attention} x {self.position} ({'causal' if self.causal else 'both directions'}{shared})"

    @property
    def site(self) -> Site:
        return Site(WIDTH, HEADS, causal=self.causal, kv_heads=self.kv_heads, max_length=MAX_LENGTH, depth=2)

    @cached_property
    def verdict(self) -> Verdict:
        """What `check` says of the pair."""
        return verdict(self.attention, self.position, self.site)

    @cached_property
    def mixer(self) -> Mixer:
        """A layer for reading declarations; do not run it."""
        return self.layer()

    @cached_property
    def head(self) -> Literal["lm", "mlm", "classifier"]:
        """The head of its models: one that scores every token, where there is a vector for each."""
        if self.mixer.shortening is not None:
            return "classifier"
        return "lm" if self.causal else "mlm"

    @cached_property
    def axes(self) -> int:
        """Numbers in a position of the encoding."""
        with torch.device("meta"):
            return build_position(self.position, self.site).axes

    def at(self, places: Int[Tensor, "#b n"]) -> Int[Tensor, "#b n *a"]:
        """The positions of tokens at these places: the places, or their row and column on a grid of a few columns."""
        return on_grid(places) if self.axes == 2 else places

    def fed(self, module: "Part") -> "Part":
        """The module, given a grid by default where the encoding needs one, and flags by default where a layer flags by ids."""
        if self.axes == 2:
            module.register_forward_pre_hook(_feed_grid, with_kwargs=True)
        if isinstance(module, Mixer) and module.flag_ids:
            module.register_forward_pre_hook(_feed_flags, with_kwargs=True)
        return module

    def with_(self, **changes: object) -> "Case":
        return replace(self, **changes)

    def encoding(self) -> Position:
        """The built encoding."""
        return spread(build_position(self.position, self.site), seed=1)

    def layer(self, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Mixer:
        """One layer in eval mode, with large weights that depend on nothing but the case."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = build_mixer(self.attention, self.position, self.site, dropout=dropout)
        return self.fed(spread(layer, seed=2).to(dtype).eval())

    def model(
        self,
        dtype: torch.dtype = torch.float64,
        *,
        dropout: float = 0.0,
        head: Literal["lm", "mlm", "classifier"] | None = None,
    ) -> Transformer:
        """A Transformer of two blocks in eval mode, with large weights."""
        config = ModelConfig(
            vocab=VOCAB,
            dim=WIDTH,
            depth=2,
            heads=HEADS,
            kv_heads=self.kv_heads,
            attention=self.attention,
            position=self.position,
            head=head or self.head,
            outputs=VOCAB,
            causal=self.causal,
            max_length=MAX_LENGTH,
            dropout=dropout,
        )
        return self.fed(spread(Transformer(config), seed=3).to(dtype).eval())


Part = TypeVar("Part", bound=nn.Module)


def spread(module: Part, *, seed: int) -> Part:
    """Redraw every floating parameter with a large spread, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype) * SPREAD
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + noise if norm else noise)
    return module


def on_grid(places: Int[Tensor, "#b n"]) -> Int[Tensor, "#b n 2"]:
    """Row and column of tokens read row by row."""
    return torch.stack([places // COLUMNS, places % COLUMNS], dim=-1)


def _feed_grid(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A call of a layer or model with the grid positions of its tokens, and of its source, where it gives none."""
    if kwargs.get("positions") is not None:
        return args, kwargs
    (b, n), device = args[0].shape[:2], args[0].device
    cache, source = kwargs.get("cache"), kwargs.get("source")
    seen = 0 if cache is None else cache.length if isinstance(module, Transformer) else cache.seen
    fed = {"positions": _places(b, seen + n, kwargs.get("attention_mask"), device)[:, seen:]}
    if source is not None:
        fed["positions"] = fed["positions"] + source.shape[1] - n  # the last query sees the last key
        fed["source_positions"] = _places(b, source.shape[1], kwargs.get("source_mask"), device)
    return args, kwargs | {name: on_grid(places) for name, places in fed.items()}


def _feed_flags(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A call of a layer with flags that, like ids, belong to its tokens: those whose first channel is large."""
    if kwargs.get("global_mask") is None:
        kwargs = kwargs | {"global_mask": args[0][:, :, 0].detach() > 1}
    return args, kwargs


def _places(b: int, length: int, keep: Tensor | None, device: torch.device) -> Int[Tensor, "b n"]:
    keep = torch.ones(b, length, dtype=torch.int64, device=device) if keep is None else keep.to(torch.int64)
    return keep.cumsum(dim=1) - keep


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Float[Tensor, "..."]:
    """Standard normal numbers that depend on the seed only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def token_ids(batch: int, length: int, seed: int = 0) -> Int[Tensor, "b n"]:
    """Random token ids."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(lengths: list[int], total: int, side: str, seed: int = 0) -> Bool[Tensor, "b n"]:
    """A mask with the given numbers of real tokens, padded on the "right", on the "left", or in the "interior"."""
    keep = torch.zeros(len(lengths), total, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        match side:
            case "right":
                keep[row, :length] = True
            case "left":
                keep[row, total - length :] = True
            case _:
                keep[row, torch.randperm(total, generator=generator)[:length]] = True
    return keep


def told(layer: Mixer, keep: Bool[Tensor, "b n"]) -> Bool[Tensor, "b r"]:
    """Which vectors of a layer's output say something: those of real tokens, or the averages of rows that have one."""
    kept = keep if layer.shortening is None else layer.shortening.kept(keep)
    assert kept is not None
    return kept


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the larger of 1 and the second's largest value; infinite where either is not finite."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    if not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
