"""The pass of `gated_pass` out of ordinary operators: to export it, to differentiate it twice."""

from functools import partial

import torch
from torch import Tensor

from anyformer.ops.linear_scan import Parts, in_segments, tiles


def pass_composite(
    q: Tensor, k: Tensor, v: Tensor, fade: Tensor, state: Tensor, reverse: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """out [b h n v] and the last state [b g f v]."""
    return in_segments(partial(_pass, chunk=chunk), q, (k, v, fade), state, reverse)


def _pass(q: Tensor, parts: Parts, state: Tensor, reverse: bool, *, chunk: int) -> tuple[Tensor, Tensor]:
    k, v, fade = parts
    n, groups = q.shape[2], k.shape[1]
    chunk = min(chunk, 1 << max(n - 1, 0).bit_length())
    q = tiles(q, chunk).unflatten(1, (groups, q.shape[1] // groups))  # [b g r t C f]
    k, v, fade = (tiles(x, chunk).unsqueeze(2) for x in (k, v, fade))  # [b g 1 t C w]
    weights, q, k, total = _weights(q, k, fade.exp(), not reverse)
    before, state = _states((k.mT @ v).squeeze(2), total.mT.squeeze(2), state)
    out = torch.matmul(weights, v) + torch.matmul(q, before.unsqueeze(2))
    return out.flatten(1, 2).flatten(2, 3)[:, :, :n], state


def _states(steps: Tensor, carry: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each chunk's sum [b g t f v] and factor [b g t f 1] -> the state before each chunk, and after the last."""
    before = []
    for step, factor in zip(steps.unbind(2), carry.unbind(2), strict=True):
        before.append(state)
        state = torch.addcmul(step, state, factor)
    return (torch.stack(before, dim=2) if before else torch.zeros_like(steps)), state


def _weights(q: Tensor, k: Tensor, factor: Tensor, own: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weights inside chunks [... C C]; queries times what fades the state before their chunk until they read it; keys times
    what fades them until their chunk ends; and the factor across each chunk [... 1 f].

    Blocks of 1, 2, 4 ... tokens are joined in pairs: the late block's queries and the early block's keys are then faded up to and
    from the edge between them, and their product is the square of weights that the pair adds to its two triangles.
    """
    chunk = q.shape[-2]
    diagonal = (q * k).sum(-1, keepdim=True) if own else q.new_zeros(*q.shape[:-1], 1)
    weights, q, k, total = (x.unsqueeze(-2) for x in (diagonal, q * factor, k, factor))  # [... C 1 w]
    for size in (1 << level for level in range(chunk.bit_length() - 1)):
        (w_early, w_late), (q_early, q_late), (k_early, k_late), (t_early, t_late) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (weights, q, k, total)
        )  # [... pairs size w]
        square = (q_late * k_early).sum(-1, keepdim=True) if size == 1 else q_late @ k_early.mT
        upper = torch.cat([w_early, torch.zeros_like(square)], dim=-1)
        weights = torch.cat([upper, torch.cat([square, w_late], dim=-1)], dim=-2)
        q = torch.cat([q_early, q_late * t_early], dim=-2)
        k = torch.cat([k_early * t_late, k_late], dim=-2)
        total = t_early * t_late
    return weights.squeeze(-3), q.squeeze(-3), k.squeeze(-3), total.squeeze(-3)
