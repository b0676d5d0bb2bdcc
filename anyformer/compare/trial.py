"""A trial as a value and as one text: what determines its numbers, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from anyformer.errors import SpecError
from anyformer.forms import Verdict
from anyformer.model.build import build_position, position_slot, slot, verdict
from anyformer.model.config import ModelConfig
from anyformer.pattern.leaves import LEAVES, SLOT_NAMES, PerHead, PerLayer
from anyformer.registry import Kind, Maker, bind, canonical, find, names, sequence_knobs
from anyformer.site import Site
from anyformer.spec import Spec, expand, parse
from anyformer.task.base import Task
from anyformer.typing import Fraction, PositiveFloat, Size


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and the optimiser that every trial of a comparison shares; as text `model(dim=64, depth=2)`.

    Args:
        dim: width.  depth: blocks.  heads: query heads.  kv_heads: key and value heads; None: heads.
        tokens: tokens of a training step; the rows of a batch follow from the task's length.
        rate: highest learning rate (AdamW, linear warm-up over a tenth of the steps, then a cosine to a tenth of it).
        dropout: dropout probability in training.
    """

    dim: Size = 64
    depth: Size = 2
    heads: Size = 4
    kv_heads: Size | None = None
    tokens: Size = 2048
    rate: PositiveFloat = 3e-3
    dropout: Fraction = 0.0

    def __str__(self) -> str:
        shared = "" if self.kv_heads is None else f", kv_heads={self.kv_heads}"
        dropout = "" if not self.dropout else f", dropout={self.dropout}"
        sizes = f"dim={self.dim}, depth={self.depth}, heads={self.heads}{shared}, tokens={self.tokens}"
        return f"model({sizes}, rate={self.rate}{dropout})"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One trial to be run.

    Args:
        attention, position, task: canonical specs.
        sizes: the shared model and optimiser.
        lengths: tokens at which quality and costs are measured.
        steps: training steps.
        seed: of the initial weights and the order of the data.
        items: test items that are scored at each length.
        precision: as Lightning Fabric names it.
        fingerprint: of the task's data; it is no part of the text.
        index: place in the grid that was asked for; likewise.
    """

    attention: str
    position: str
    task: str
    sizes: Sizes
    lengths: tuple[int, ...]
    steps: int = 0
    seed: int = 0
    items: int = 96
    precision: str = "32-true"
    fingerprint: str = ""
    index: int = 0

    @property
    def text(self) -> str:
        """The canonical text: equal texts are the same trial."""
        lengths = ",".join(map(str, self.lengths))
        return (
            f"attention={self.attention} position={self.position} task={self.task} {self.setting} "
            f"steps={self.steps} lengths={lengths} items={self.items} seed={self.seed}"
        )

    @property
    def setting(self) -> str:
        """Model, optimiser and precision: what all trials of a table share."""
        return str(self.sizes) if self.precision == "32-true" else f"{self.sizes} precision={self.precision}"

    @property
    def cell(self) -> tuple[str, str, str]:
        """The trial without its seed and budget."""
        return self.attention, self.position, self.task

    def config(self, task: Task) -> ModelConfig:
        """The model of this trial."""
        return ModelConfig(
            vocab=task.vocab,
            dim=self.sizes.dim,
            depth=self.sizes.depth,
            heads=self.sizes.heads,
            kv_heads=self.sizes.kv_heads,
            attention=self.attention,
            position=self.position,
            head=task.head,
            outputs=task.outputs,
            causal=task.causal,
            max_length=task.train_length,
            dropout=self.sizes.dropout,
            seed=self.seed,
        )

    def rows(self, length: int) -> int:
        """Rows of a batch of `length` tokens a row: as many as the step's tokens fill, at least one."""
        return max(1, self.sizes.tokens // length)


def read_sizes(text: str) -> Sizes:
    """The sizes of a spec such as `model(dim=128, depth=4)`.

    Raises:
        SpecError: another name, wrong knobs, or sizes that do not fit each other.
    """
    spec = parse(text)
    if spec.name != "model":
        raise SpecError(f"--model: expected a spec such as 'model(dim=128, depth=4)', got {text!r}")
    given: dict[str, Any] = bind(Maker("model", Sizes), spec)
    sizes = Sizes(**given)
    try:
        Site(sizes.dim, sizes.heads, kv_heads=sizes.kv_heads)
    except SpecError as error:
        raise SpecError(f"--model: {str(error).removeprefix('Site: ')}") from None
    return sizes


def grid(texts: Sequence[str], kind: Literal["attention", "position", "task"]) -> list[str]:
    """The canonical specs that texts with lists in their knobs stand for, each once, in the order given.

    Args:
        kind: "attention", "position" or "task".
    """
    found: dict[str, None] = {}
    for text in texts:
        spec = parse(text)
        method = _method_of(kind, spec.name)
        if method is not None:  # lists given by place make a grid too
            placed = zip(method.knobs, spec.args, strict=False)
            spec = Spec(spec.name, spec.args[len(method.knobs) :], (*placed, *spec.knobs))
        for each in expand(spec, frozenset() if method is None else sequence_knobs(method)):
            match kind:
                case "attention":
                    found[str(slot(each)[1])] = None
                case "position":
                    found[str(position_slot(each)[1])] = None
                case _:
                    found[str(canonical(find("task", each.name), each))] = None
    return list(found)


def verdict_in_a_row(attention: str, position: str, site: Site) -> Verdict:
    """Whether a pair composes where tokens stand in a row, as in benchmarks and in tasks without a grid; see `verdict`."""
    judged = verdict(attention, position, site)
    if not judged.runs:
        return judged
    with torch.device("meta"):
        axes = build_position(position, site).axes
    if axes == 1:
        return judged
    return Verdict(
        "refused",
        f"{position} reads a row and a column for each token, and here tokens stand in one row; "
        "use an encoding of one number a token such as rope, alibi or sinusoidal",
    )


def _method_of(kind: str, name: str) -> Maker | None:
    """The method, scheme or leaf of this name; None for a pattern expression and for a name that does not exist."""
    leaf = LEAVES.get(name) or SLOT_NAMES.get(name) if kind == "attention" else None
    if leaf is not None:
        return None if leaf in (PerHead, PerLayer) else Maker(name, leaf)
    kinds: tuple[Kind, ...] = ("attention", "mixer", "pattern") if kind == "attention" else ("position", "task")
    return next((find(each, name) for each in kinds if name in names(each)), None)


def build_task(text: str) -> Task:
    """The task of a spec.

    Raises:
        SpecError: the spec is wrong.
        TaskError: its data cannot be used.
    """
    spec = parse(text)
    method = find("task", spec.name)
    return method.target(**bind(method, spec))
