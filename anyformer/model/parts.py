"""The parts of a model that depend on its layers: a position encoding and a block for each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anyformer.attention.base import Attention
from anyformer.context import LayerCache, truths
from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.base import Mixer
from anyformer.model.block import Block
from anyformer.model.build import added_at_embedding, build_mixer, build_position
from anyformer.model.config import ModelConfig
from anyformer.model.initial import seeded
from anyformer.position.base import Position
from anyformer.position.bind import how_many
from anyformer.side import Side


def build_positions(config: ModelConfig) -> list[Position]:
    """The encoding of every block; blocks with the same spec share one object where its scope is the model."""
    shared: dict[str, Position] = {}
    built = []
    for layer, (_, spec) in enumerate(config.layers):
        if spec not in shared:
            with seeded(config.seed, layer, "position"):
                position = build_position(spec, config.site(layer))
            if position.scope == "model" or added_at_embedding(position):
                shared[spec] = position
        else:
            position = shared[spec]
        built.append(position)
    return built


def build_block(config: ModelConfig, layer: int, position: Position) -> Block:
    attention, _ = config.layers[layer]
    with seeded(config.seed, layer, "mixer"):
        mixer = build_mixer(
            attention, position, config.site(layer), bias=False, qk_norm=config.qk_norm, dropout=config.dropout
        )
    return Block(config.dim, mixer, norm=config.norm, feed_forward=config.feed_forward, dropout=config.dropout)


def share_parts(config: ModelConfig, mixers: Iterable[Mixer]) -> None:
    """Give the layers whose attention has the same spec one object for what it says they have in common."""
    held: dict[str, nn.Module] = {}
    for (spec, _), mixer in zip(config.layers, mixers, strict=True):
        for part in mixer.modules():
            if isinstance(part, Attention) and part.common is not None:
                setattr(part, part.common, held.setdefault(spec, part.get_submodule(part.common)))


def draw_positions(mixers: Iterable[Mixer], queries: Side) -> list[Tensor | None]:
    """For each mixer, what stands for its positions where its encoding draws them in training: one draw for all of them, and
    drawn before they run, since a block may be computed twice."""
    drawing = [next((part for part in mixer.modules() if _draws(part)), None) for mixer in mixers]
    tables: dict[int, Tensor] = {}
    for each in drawing:
        if isinstance(each, Position) and each.draws not in tables:
            tables[each.draws] = each.draw(how_many(each, queries.positions))
    return [tables[each.draws] if isinstance(each, Position) else None for each in drawing]


def steps(
    blocks: Iterable[nn.Module],
    drawn: Sequence[Tensor | None],
    caches: Sequence[LayerCache] | None,
    facts: Mapping[str, Any],
    *,
    again: bool,
) -> list[Callable[..., Tensor]]:
    """Every block as a function of the stream, given the facts of this forward.

    Args:
        drawn: what stands for positions in each block.  caches: of each block.
        facts: the other arguments of `Block.forward`.
        again: whether blocks are computed again in the backward instead of being kept.

    Raises:
        IncompatibleError: flags of tokens for a block after one that shortens.
    """
    found, shortened, flagged = [], False, facts.get("global_mask") is not None
    for layer, block in enumerate(blocks):
        assert isinstance(block, Block)
        if shortened and flagged and block.mixer.takes_flags:
            raise IncompatibleError(
                "global_mask flags tokens, and an earlier block has shortened them to averages; leave global_mask out, "
                "or put attentions that read flags into earlier blocks"
            )
        table = None if shortened else drawn[layer]  # positions that were drawn are those of tokens
        run = partial(block, **facts, drawn=table, cache=None if caches is None else caches[layer])
        found.append(partial(checkpoint, run, use_reentrant=False) if again else run)
        if (shortening := block.mixer.shortening) is not None:  # what is known of tokens is not known of their averages
            keep = shortening.kept(truths("attention_mask", facts.get("attention_mask")))
            facts, shortened = {"attention_mask": keep}, True
    return found


def kept(mixers: Iterable[Mixer], keep: Bool[Tensor, "b n"] | None) -> Bool[Tensor, "b r"] | None:
    """Which vectors of the last of these mixers are real, given which tokens are."""
    for mixer in mixers:
        keep = keep if mixer.shortening is None else mixer.shortening.kept(keep)
    return keep


def admit_shortening(mixers: Sequence[Mixer], positions: Sequence[Position], needing: str | None) -> None:
    """Refuse mixers that give fewer vectors than they get, where something after them needs one for each token.

    Args:
        needing: what reads the last block's vectors of single tokens, and what to use instead; None: nothing does.

    Raises:
        IncompatibleError: the reason.
    """
    for layer, mixer in enumerate(mixers):
        if mixer.shortening is None:
            continue
        shorter = f"{mixer.name} shortens every sequence to {mixer.shortening.count} averages of tokens"
        if needing is not None:
            raise IncompatibleError(f"{shorter}, and {needing}; or leave out queries=...")
        inside = (each for each in positions[layer + 1 :] if not added_at_embedding(each))
        on_grid = next((each.name for each in inside if each.axes == 2), None)
        if on_grid is not None:
            raise IncompatibleError(
                f"{shorter}, which have no row and no column for {on_grid} in the blocks after it; "
                "use an encoding of one number a token such as rope or sinusoidal, or leave out queries=..."
            )


def admit_flag_ids(mixers: Iterable[Mixer], vocab: int | None) -> None:
    """Refuse mixers that flag tokens by ids which these do not have.

    Args:
        vocab: number of token ids; None: what they mix has none.

    Raises:
        SpecError: an id beyond the vocabulary.
        IncompatibleError: there are none at all, or the mixer comes after one that shortens.
    """
    shortened = False
    for mixer in mixers:
        if mixer.flag_ids:
            flags = f"{mixer.name} flags tokens of ids {list(mixer.flag_ids)}"
            if vocab is None:
                raise IncompatibleError(f"{flags}, and images have no token ids; use Global([0]) for places")
            if max(mixer.flag_ids) >= vocab:
                raise SpecError(
                    f"{flags}: expected ids from 0 to {vocab - 1} (vocab={vocab}), got {max(mixer.flag_ids)}"
                )
            if shortened:
                raise IncompatibleError(
                    f"{flags}, and an earlier block has shortened them to averages; put it into an earlier block"
                )
        shortened = shortened or mixer.shortening is not None


def _draws(part: nn.Module) -> bool:
    return isinstance(part, Position) and part.draws > 0 and part.training
