"""The pass of `linear_pass` out of ordinary operators: to export it and to differentiate it twice."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.ops.linear_tiles import GONE, Operands, Rule, bounded, mapped, weights, working


def pass_composite(x: Operands, s: Tensor, z: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [b h n v], den [b h n] and the last states s [b g f v] and z [b g e], from the first states.

    All chunks at once: O(n chunk) memory, and O((n / chunk)^2 f v) time for the states.
    """
    (batch, groups, n), dtype, chunk = x.k.shape[:3], working(x), rule.chunk
    count = n // chunk + 2  # never a single or a full last chunk: torch.export would make a case of either

    def tiles(y: Tensor, hidden: bool = False, features: str = "given") -> Tensor:
        """[b h n w] -> [b g t r C w]; keys and values of hidden tokens are 0."""
        y = mapped(y.to(dtype), features)
        if hidden and x.keep is not None:
            y = y.masked_fill(~x.keep[:, None, :, None], 0.0)
        y = F.pad(y, (0, 0, 0, count * chunk - n))
        return y.unfold(2, chunk, chunk).mT.unflatten(1, (groups, -1)).transpose(2, 3)

    q, k, v = tiles(x.q, False, rule.features), tiles(x.k, True, rule.features), tiles(x.v, True)
    q_den, k_den = (q, k) if x.q_den is None or x.k_den is None else (tiles(x.q_den), tiles(x.k_den, True))
    fade = s.new_zeros(1, 1, 1) if x.fade is None else x.fade
    fade = F.pad(fade.expand(-1, -1, n), (0, count * chunk - n))
    w = weights(fade, chunk, rule.reverse, False, dtype)
    scan, enter = _reach(fade, chunk, rule.reverse, dtype)
    last = 0 if rule.reverse else -1

    def states(steps: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Each chunk's sum [b g t ...] -> the states before each chunk, and the last."""
        flat, first = steps.flatten(3), first.flatten(2).unsqueeze(2)
        before = scan @ flat + enter * first
        end = flat[:, :, last] + w.carry[:, :, last] * before[:, :, last]
        return before.view(steps.shape), end.view(batch, groups, *steps.shape[3:])

    before, s = states(((k * w.onto).mT @ v).squeeze(3), s)
    num = (q @ k.mT * w.tile) @ v + (q * w.into) @ before.unsqueeze(3)
    before, z = states((k_den * w.onto).sum(4).squeeze(3), z)
    counts = w.tile @ k_den + w.into * before[:, :, :, None, None]
    den = (q_den * counts).sum(-1, keepdim=True)

    def back(y: Tensor) -> Tensor:
        tokens = torch.arange(n, device=y.device)  # a slice would have strides that depend on n
        return y.transpose(2, 3).flatten(1, 2).flatten(2, 3).index_select(2, tokens)

    num, den = back(num), back(den)
    out = num / bounded(den, rule) if rule.denominator == "divide" else num
    return out.to(x.v.dtype), den.squeeze(-1), s, z


def _reach(fade: Tensor, chunk: int, reverse: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B H t t], the weight of each chunk's sum in the state before each chunk, and [B H t 1], that of the first state."""
    total = fade.double().clamp(min=GONE).unfold(-1, chunk, chunk).sum(-1)
    after = total.cumsum(-1)
    before = after - total
    between = before[..., :, None] - after[..., None, :]
    if reverse:
        before, between = after[..., -1:] - after, between.mT
    strict = torch.ones_like(between, dtype=torch.bool)
    strict = strict.triu(1) if reverse else strict.tril(-1)
    scan = between.masked_fill(~strict, -math.inf)
    return scan.exp().to(dtype), before.exp().to(dtype).unsqueeze(-1)
