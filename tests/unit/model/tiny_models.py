"""Small models with large weights: the small default initialisation hides faults behind nearly uniform attention."""

import torch
from torch import Tensor

from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer

VOCAB = 23


def config(**changes: object) -> ModelConfig:
    """Two blocks of width 16 with four heads of two key heads."""
    return ModelConfig(
        **{"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 4, "kv_heads": 2, "max_length": 32, **changes}
    )


def model(**changes: object) -> Transformer:
    """A built model in eval mode, every weight drawn anew with a standard deviation of 0.3."""
    return rough(Transformer(config(**changes))).eval()


def rough(built: Transformer, seed: int = 1) -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.3
            weight.copy_(noise + 1 if "norm" in name and name.endswith("weight") else noise)
    return built


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def mask(lengths: list[int], total: int, side: str) -> Tensor:
    """Rows with the given numbers of real tokens, padded on the "left" or the "right"."""
    places = torch.arange(total)[None]
    lengths_column = torch.tensor(lengths)[:, None]
    return places < lengths_column if side == "right" else places >= total - lengths_column


def same(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)
