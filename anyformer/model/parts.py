"""The parts of a model that depend on its layers: a position encoding and a block for each."""

from anyformer.model.block import Block
from anyformer.model.build import added_at_embedding, build_mixer, build_position
from anyformer.model.config import ModelConfig
from anyformer.model.initial import seeded
from anyformer.position.base import Position


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
