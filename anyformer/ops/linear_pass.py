"""One pass of linear attention over a sequence, forward and backward, segment by segment; `linear_tiles` has the equations.

The backward recomputes tiles and states from the states before each segment, and walks the segments the other way round.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.ops.linear_segment import Rows, Segment
from anyformer.ops.linear_tiles import GONE, Block, Cut, Operands, Rule, Tiles, bounded, results, working
from anyformer.ops.pages import in_huge_pages
from anyformer.ops.tile import Scratch


def forward(x: Operands, s: Tensor, z: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`results` of a pass that begins with the states s [b g f v] and z [b g e]."""
    out, den, s_all, z_all = results(x, rule)
    in_huge_pages(out)
    s_all[:, :, 0], z_all[...] = s, z.unsqueeze(2)
    cut, work = Cut(x.k, rule.chunk), Scratch(working(x), x.q.device)
    for group in cut.groups(x.q.device):
        rows, out_tiles = Rows(x, cut, group, rule, work), Tiles(out, cut, group, work)
        den_tiles = Tiles(den.unsqueeze(-1), cut, group, work)
        s_here, z_here = group.of(s_all), group.of(z_all)
        for i, block in enumerate(cut.blocks(rule.reverse)):
            segment = Segment(rows, block)
            s_next, z_next = segment.remember(s_here[:, :, i].flatten(0, 1), z_here[:, :, i].flatten(0, 1))
            s_here[:, :, i + 1], z_here[:, :, i + 1] = (
                s_next.unflatten(0, group.shape),
                z_next.unflatten(0, group.shape),
            )
            tile = work.take("tile", *segment.q.shape[:2], cut.chunk)
            tiles = segment.numerator(tile, out_tiles.target(block, work, "out"))
            if segment.counted:
                count = segment.denominator(tile, den_tiles.target(block, work, "den"))
                den_tiles.store(count, block)
                if rule.denominator == "divide":
                    tiles.div_(bounded(count, rule))
            out_tiles.store(tiles, block)
    return out, den, s_all, z_all


class Gradients(NamedTuple):
    """Gradients of the operands and first states of `forward`; None where there is no operand or no gradient was asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_den: Tensor | None
    k_den: Tensor | None
    fade: Tensor | None
    s: Tensor
    z: Tensor


def backward(
    d_out: Tensor,
    d_den: Tensor | None,
    d_s: Tensor,
    d_z: Tensor,
    x: Operands,
    made: tuple[Tensor, Tensor, Tensor, Tensor],
    rule: Rule,
    fading: bool,
) -> Gradients:
    """The gradients of `forward`, whose results are `made`; that of the fades only if `fading`."""
    out, den, s_all, z_all = made
    cut, work = Cut(x.k, rule.chunk), Scratch(working(x), x.q.device)
    q_den, k_den = (None if y is None else in_huge_pages(y.new_empty(y.shape)) for y in (x.q_den, x.k_den))
    q, k, v = (in_huge_pages(y.new_empty(y.shape)) for y in (x.q, x.k, x.v))
    grads = Operands(q, k, v, q_den, k_den, None, x.keep)
    d_fade = x.k.new_empty(*x.k.shape[:3], dtype=work.dtype) if fading else None
    d_s, d_z = d_s.clone(), d_z.clone()
    for group in cut.groups(x.q.device):
        rows, targets = Rows(x, cut, group, rule, work), Rows(grads, cut, group, rule, work)
        out_tiles, den_tiles, d_out_tiles = (Tiles(y, cut, group, work) for y in (out, den.unsqueeze(-1), d_out))
        d_den_tiles = None if d_den is None else Tiles(d_den.unsqueeze(-1), cut, group, work)
        fades = None if d_fade is None else Tiles(d_fade.unsqueeze(-1), cut, group, work)
        s_here, z_here, u, u_z = (group.of(y) for y in (s_all, z_all, d_s, d_z))
        for i, block in reversed(list(enumerate(cut.blocks(rule.reverse)))):
            segment = Segment(rows, block)
            s_end, z_end = segment.remember(s_here[:, :, i].flatten(0, 1), z_here[:, :, i].flatten(0, 1))
            segment.ask(block, d_out_tiles, d_den_tiles, out_tiles, den_tiles)
            u_first, u_z_first = segment.asked(u[:, :, i + 1].flatten(0, 1), u_z[:, :, i + 1].flatten(0, 1))
            u[:, :, i] += u_first.unflatten(0, group.shape)
            u_z[:, :, i] += u_z_first.unflatten(0, group.shape)
            moved = _write_gradients(segment, block, targets, fading)
            if fades is not None:
                fades.store(segment.d_fade(moved, s_end, z_end), block)
    if d_fade is not None and x.fade is not None:
        d_fade = d_fade.masked_fill_(x.fade <= GONE, 0.0).sum_to_size(x.fade.shape).to(x.fade.dtype)
    return Gradients(grads.q, grads.k, grads.v, q_den, k_den, d_fade, d_s[:, :, 0], d_z[:, :, 0])


def _write_gradients(segment: Segment, block: Block, targets: Rows, fading: bool) -> Tensor:
    """Write a segment's gradients of q, k, v, q_den and k_den; returns what `d_fade` needs of them, 0 unless `fading`."""
    work = segment.work
    tile, moved = work.take("tile", *segment.q.shape[:2], segment.chunk), torch.zeros_like(segment.k[..., 0])
    targets.v.store(segment.d_values(tile, targets.v.target(block, work, "dv")), block)
    dq, dk = targets.q.target(block, work, "dq"), targets.k.target(block, work, "dk")
    segment.d_features(tile, dq, dk)
    if fading:
        moved += segment.moved(dq, dk, segment.q, segment.k)
    if segment.rule.features == "elu1":
        for gradient, features in ((dq, segment.q), (dk, segment.k)):
            # the slope of elu1: 1 above zero, where y > 1, and exp(x) = y below
            gradient.mul_(torch.clamp(features, max=1.0, out=work.take("slope", *features.shape)))
    targets.q.store(dq, block)
    targets.k.store(dk, block)
    if not segment.shared:
        dq, dk = segment.d_counts()
        if fading:
            moved += segment.moved(dq, dk, segment.q_den, segment.k_den)
        targets.q_den.store(dq, block)
        targets.k_den.store(dk, block)
    return moved
