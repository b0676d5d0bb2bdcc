"""From one head to another: a model for a task starts with the weights of a pre-trained one."""

import os
from dataclasses import dataclass

from anyformer.errors import SpecError
from anyformer.model.transformer import Transformer

_SAME = (
    "vocab",
    "dim",
    "depth",
    "heads",
    "kv_heads",
    "head_dim",
    "attention",
    "position",
    "norm",
    "feed_forward",
    "qk_norm",
    "is_causal",
)
_HEAD = "head."


@dataclass(frozen=True)
class WarmStart:
    """What became of every weight and buffer, by name.

    Args:
        used: taken from the source.
        dropped: of the source, not taken.
        fresh: of the model, left as they were.
    """

    used: tuple[str, ...]
    dropped: tuple[str, ...]
    fresh: tuple[str, ...]

    def __str__(self) -> str:
        parts = {"dropped": self.dropped, "fresh": self.fresh}
        return "; ".join(
            [f"used {len(self.used)}", *(f"{name} {', '.join(names) or 'none'}" for name, names in parts.items())]
        )


def warm_start(model: Transformer, source: Transformer | str | os.PathLike[str]) -> WarmStart:
    """Copy into `model` the weights of a pre-trained model that differs in its head, in place.

    Embedding, blocks and the last norm are always taken. Of the head, "mlm" and "enhanced_mlm" share transform and output, so that
    only the absolute positions are dropped or fresh; a head of the same kind is taken where its shapes are the same; any other
    starts fresh.

    Args:
        model: built with the source's configuration and another head, such as
            `Transformer(dataclasses.replace(source.config, head="classifier", outputs=3))`; dropout, checkpointing and seed may
            differ, but another seed changes every random pattern.
        source: the pre-trained model, or the folder it was saved to.

    Returns:
        The names of all weights, used, dropped and fresh.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        SpecError: the two differ in more than the head, the file is damaged, or what is given is no Transformer.
    """
    if not isinstance(model, Transformer):
        raise SpecError(f"warm_start: expected a Transformer to be given weights, got {type(model).__name__}")
    if not isinstance(source, Transformer | str | os.PathLike):
        raise SpecError(
            f"warm_start: expected a pre-trained Transformer or the folder it was saved to, got {type(source).__name__}"
        )
    pretrained = source if isinstance(source, Transformer) else Transformer.from_pretrained(source)
    _check(model, pretrained)
    theirs, ours = pretrained.state_dict(), model.state_dict()
    alike = _family(model) == _family(pretrained)
    used = [
        name
        for name, weight in theirs.items()
        if not name.startswith(_HEAD) or (alike and name in ours and ours[name].shape == weight.shape)
    ]
    taken = {name: theirs[name] for name in used}
    model.load_state_dict({**ours, **taken})
    return WarmStart(
        tuple(used),
        tuple(name for name in theirs if name not in taken),
        tuple(name for name in ours if name not in taken),
    )


def _check(model: Transformer, pretrained: Transformer) -> None:
    differ = [
        f"{name}={getattr(model.config, name)!r} against {getattr(pretrained.config, name)!r}"
        for name in _SAME
        if getattr(model.config, name) != getattr(pretrained.config, name)
    ]
    shapes = [
        {name: each.shape for name, each in part.state_dict().items() if not name.startswith(_HEAD)}
        for part in (model, pretrained)
    ]
    if not differ and shapes[0] != shapes[1]:
        differ = [f"max_length={model.config.max_length} against {pretrained.config.max_length}"]
    if differ:
        raise SpecError(
            f"warm_start: expected two models that differ in their heads alone, got {'; '.join(differ)}; "
            "build with dataclasses.replace(source.config, head=..., outputs=...)"
        )


def _family(model: Transformer) -> str:
    """Heads of one family read and write the same."""
    kind = str(model.config.head).partition("(")[0]
    return "mlm" if kind == "enhanced_mlm" else kind
