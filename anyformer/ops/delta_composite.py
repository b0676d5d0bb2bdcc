"""The pass of `delta_pass` out of ordinary operators: to export it and to differentiate it twice."""

from functools import partial

import torch
from torch import Tensor

from anyformer.ops.linear_scan import Parts, in_segments, tiles


def pass_composite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    read: Tensor,
    cuts: Tensor | None,
    state: Tensor,
    reverse: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """out [b h n v] and the last state [b g f v]."""
    parts = k, v, beta, read, torch.zeros_like(beta) if cuts is None else cuts
    return in_segments(partial(_pass, chunk=chunk, cut=cuts is not None), q, parts, state, reverse)


def _pass(q: Tensor, parts: Parts, state: Tensor, reverse: bool, *, chunk: int, cut: bool) -> tuple[Tensor, Tensor]:
    k, v, beta, read, cuts = parts
    n, groups = q.shape[2], k.shape[1]
    q = tiles(q, chunk).unflatten(1, (groups, q.shape[1] // groups))  # [b g r t C f]
    k, v, beta, read, cuts = (tiles(x, chunk) for x in (k, v, beta, read, cuts))  # [b g t C w]
    eye = torch.eye(chunk, dtype=torch.bool, device=q.device)
    apart = torch.ones_like(eye).triu()[None, None, None]
    before, q_in, after, total = read, q, k, None
    if cut:  # tokens meet those after the same number of cuts, and the states of the chunk's two edges
        place = cuts.cumsum(3)
        apart = apart | (place != place.mT)
        first, last = place == 0, place == place[..., -1:, :]
        before, q_in, after, total = read * first, q * first.unsqueeze(2), k * last, first[..., -1:, :].to(k.dtype)
    system = (beta * (read @ k.mT)).masked_fill(apart, 0.0)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * before], dim=-1), upper=False, unitriangular=True
    )
    alone, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    firsts, moves, state = _corrections(alone, seen, after, total, state)
    products = q @ k.mT.unsqueeze(2)
    products = products.masked_fill((apart if reverse else apart & ~eye).unsqueeze(2), 0.0)
    out = q_in @ firsts.unsqueeze(2) + products @ moves.unsqueeze(2)
    return out.flatten(1, 2).flatten(2, 3)[:, :, :n], state


def _corrections(
    alone: Tensor, seen: Tensor, after: Tensor, total: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the chunks: the state before each [b g t f v], the corrections of each [b g t C v], and the last state.

    Args:
        alone: corrections where the state before the chunk is 0.  seen: what a state takes away from them.
        after: keys that reach the state after the chunk.  total: 0 where a cut keeps the state before the chunk from it.
    """
    firsts, moves = [], []
    kept = [None] * alone.shape[2] if total is None else total.unbind(2)
    for own, minus, keys, keeps in zip(alone.unbind(2), seen.unbind(2), after.mT.unbind(2), kept, strict=True):
        firsts.append(state)
        moves.append(own - minus @ state)
        state = (state if keeps is None else state * keeps) + keys @ moves[-1]
    if not firsts:
        return alone.new_zeros(*alone.shape[:3], *state.shape[2:]), alone, state
    return torch.stack(firsts, dim=2), torch.stack(moves, dim=2), state
