"""Random structure as a function of a seed and a role, the same in every process and untouched by the global generators."""

import hashlib

import torch
from jaxtyping import Float
from torch import Tensor


def key(seed: int, *role: object) -> int:
    """A seed of 63 bits for one role."""
    text = "/".join(str(each) for each in (seed, *role))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *role: object) -> torch.Generator:
    """A generator of its own for one role."""
    return torch.Generator("cpu").manual_seed(key(seed, *role))


def normal(rows: int, width: int, draw: torch.Generator) -> Float[Tensor, "r d"]:
    """Independent standard normal rows, on the CPU."""
    return torch.randn(rows, width, generator=draw, dtype=torch.float64, device="cpu")


def orthogonal(rows: int, width: int, draw: torch.Generator) -> Float[Tensor, "r d"]:
    """Rows as long as standard normal ones, in blocks of `width` that are orthogonal to each other; the last block may be short.

    Each block is uniform over all rotations: Q of a QR decomposition is not, unless its columns get the signs of R's diagonal
    (Mezzadri 2006, math-ph/0609050).
    """
    blocks = []
    for start in range(0, rows, width):
        q, r = torch.linalg.qr(normal(width, width, draw))
        blocks.append((q * r.diagonal().sign()).mT[: rows - start])
    lengths = normal(rows, width, draw).norm(dim=1, keepdim=True)
    return lengths * torch.cat(blocks)
