"""Initial weights: what two models share starts equal, whatever attention and position encoding they have.

Every shared weight is drawn from a generator of its own, keyed by the seed and the weight's name; what belongs to one
method is drawn by its constructor under a seed keyed by the seed, the layer and the part. No global generator moves.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anyformer.ops.draws import key

_SHARED = re.compile(r"embedding\.tokens|blocks\.\d+\.(mixer\.[qkvo]|feed_forward\.(gate|up|down))|head\.(hidden|out)")
_ENDS_BRANCH = ("o", "down")


@contextmanager
def seeded(seed: int, *role: object) -> Iterator[None]:
    """Draw from the CPU's global generator as if it had just been seeded for this role; it is put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key(seed, *role))
        yield


@torch.no_grad()
def draw_shared(model: nn.Module, seed: int, query_gains: Sequence[float]) -> None:
    """Draw the shared weights of a Transformer in place.

    Normal with a standard deviation of 1 / sqrt(columns), so that unit inputs give unit outputs; the projection that
    ends a branch (`o`, `down`) times 1 / sqrt(2 depth), so that the sum over all branches stays of order one. Biases
    are 0. A mixer's own linear layers called q, k, v and o count as shared; all else in a mixer stays as its
    constructor drew it.

    Args:
        query_gains: one a block, a factor on its queries (see `query_gain`): on the weight of `q`, or, where a norm
            follows that would undo it, on the weight of `q_norm`.
    """
    gains = {f"blocks.{layer}.mixer.q": gain for layer, gain in enumerate(query_gains)}
    branch_gain = (2 * len(query_gains)) ** -0.5
    for name, part in model.named_modules():
        if isinstance(part, nn.RMSNorm) and name.removesuffix("_norm") in gains:
            part.weight.fill_(gains.pop(name.removesuffix("_norm")))
    for name, part in model.named_modules():
        if _SHARED.fullmatch(name) is None or not isinstance(part, nn.Linear | nn.Embedding):
            continue
        gain = branch_gain if name.rpartition(".")[2] in _ENDS_BRANCH else gains.get(name, 1.0)
        _draw(part.weight, gain * part.weight.shape[1] ** -0.5, key(seed, name))
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.zero_()


def query_gain(scale: float, head_dim: int) -> float:
    """The factor on a block's queries for an encoding that multiplies query and key by `scale`.

    1 up to the usual head_dim ** -0.5; an encoding that multiplies by more (t5: 1) gets queries smaller by the ratio,
    so that the logits of every model start equally large.
    """
    return min(1.0, head_dim**-0.5 / scale)


def _draw(weight: Tensor, std: float, seed: int) -> None:
    if weight.is_meta:
        return
    drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
    weight.copy_(drawn.normal_(0.0, std, generator=torch.Generator("cpu").manual_seed(seed)))
