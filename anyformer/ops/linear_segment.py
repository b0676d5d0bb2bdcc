"""A segment of linear attention: its tiles, its states, and the pieces of result and gradient; see `linear_tiles`.

The backward has states of its own, U and u, the gradients of S and z; they run the other way. A fade's gradient is the sum over the
pairs that it separates: those across the edge of its chunk, <S, U> + <z, u>, and inside the chunk a running sum of q . dq - k . dk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.ops.linear_tiles import (
    SEGMENT,
    Block,
    Cut,
    Group,
    Operands,
    Rule,
    Tiles,
    Weights,
    bounded,
    triangle,
    weights,
)
from anyformer.ops.tile import Scratch


class Rows:
    """The operands of a group of rows."""

    def __init__(self, x: Operands, cut: Cut, group: Group, rule: Rule, work: Scratch):
        self.cut, self.group, self.rule, self.work, self.fade = cut, group, rule, work, None
        self.q = Tiles(x.q, cut, group, work, None, rule.features, "q_features")
        self.k = Tiles(x.k, cut, group, work, x.keep, rule.features, "k_features")
        self.v = Tiles(x.v, cut, group, work, x.keep)
        self.q_den = self.q if x.q_den is None else Tiles(x.q_den, cut, group, work)
        self.k_den = self.k if x.k_den is None else Tiles(x.k_den, cut, group, work, x.keep)
        if x.fade is not None:
            fade = x.fade[group.b0 : group.b1] if x.fade.shape[0] > 1 else x.fade
            self.fade = fade[:, group.h0 : group.h1] if fade.shape[1] > 1 else fade
        self.constant = x.fade is not None and x.fade.shape[2] == 1
        self._whole: Weights | None = None

    def weights(self, block: Block) -> Weights | None:
        """What the fades make of a segment, once for all full segments where they are constant."""
        if self.fade is None:
            return None
        tokens, full = block.stop - block.start, SEGMENT * self.cut.chunk
        if self.constant and tokens == full and self._whole is not None:
            return self._whole
        fade = self.fade.expand(-1, -1, tokens) if self.constant else self.fade[:, :, block.start : block.stop]
        fade = F.pad(fade, (0, block.t * self.cut.chunk - tokens))
        made = weights(fade, self.cut.chunk, self.rule.reverse, self.constant, self.work.dtype)
        carry = made.carry.expand(*self.group.shape, -1, -1).flatten(0, 1)
        made = made._replace(carry=carry)  # [R t 1]
        if self.constant and tokens == full:
            self._whole = made
        return made


class Segment:
    """A segment's operands as tiles, and what is derived from them."""

    def __init__(self, rows: Rows, block: Block):
        self.rule, self.work, self.chunk = rows.rule, rows.work, rows.cut.chunk
        self.rows, self.t = rows.group.shape, block.t
        self.shared, self.counted = rows.q_den is rows.q, self.rule.denominator != "none"
        self.weights = rows.weights(block)
        self.q, self.k, self.v = rows.q.load(block), rows.k.load(block), rows.v.load(block)
        self.q_in, self.k_on = self.into(self.q), self.onto(self.k)
        self.q_den, self.k_den, self.q_den_in, self.k_den_on = self.q, self.k, self.q_in, self.k_on
        if not self.shared:
            self.q_den, self.k_den = rows.q_den.load(block), rows.k_den.load(block)
            self.q_den_in, self.k_den_on = self.into(self.q_den), self.onto(self.k_den)

    def _by_row(self, tiles: Tensor) -> Tensor:
        return tiles.view(*self.rows, self.t, -1, self.chunk, tiles.shape[-1])

    def into(self, queries: Tensor) -> Tensor:
        """Rows of queries [R*t r*C w] times their weight from the state before the chunk."""
        return queries if self.weights is None else (self._by_row(queries) * self.weights.into).view(queries.shape)

    def onto(self, keys: Tensor) -> Tensor:
        """Rows of keys [R*t C w] times their weight on the state after the chunk."""
        return keys if self.weights is None else (self._by_row(keys) * self.weights.onto).view(keys.shape)

    def pairs(self, tiles: Tensor) -> Tensor:
        """Tiles [R*t r*C C] times w_ij, in place."""
        if self.weights is not None:
            self._by_row(tiles).mul_(self.weights.tile)
        elif self.rule.reverse:
            tiles.view(-1, self.chunk, self.chunk).triu_(1)
        else:
            tiles.view(-1, self.chunk, self.chunk).tril_()
        return tiles

    def tile(self) -> Tensor:
        """w_ij alone, [R*t|1 C C]."""
        chunk = self.chunk
        if self.weights is None:
            return triangle(chunk, self.rule.reverse, self.q.device).to(self.q.dtype).expand(len(self.k), -1, -1)
        return self.weights.tile.expand(*self.rows, self.t, 1, chunk, chunk).reshape(-1, chunk, chunk)

    def by_head(self, queries: Tensor) -> Tensor:
        """[R*t r*C w] -> [R*t r C w]."""
        return queries.unflatten(1, (-1, self.chunk))

    def scan(self, name: str, first: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
        """Each chunk's sum, left in the buffer `<name>_steps`, and the first state [R f v] -> the state before each chunk [R*t f v]
        and the last state.

        With `backward` the same for gradients: each chunk's part and the gradient of the last state -> the gradient of the state
        after each chunk and that of the first state.
        """
        shape = len(first), self.t, first[0].numel()
        added, states = self.work.slices(f"{name}_steps", *shape), self.work.slices(name, *shape)
        carry = None if self.weights is None else self.weights.carry.unbind(1)
        order = range(self.t - 1, -1, -1) if self.rule.reverse != backward else range(self.t)
        states[order[0]].copy_(first.flatten(1))
        final = torch.empty_like(states[0], memory_format=torch.contiguous_format)
        for here, then in zip(order, (*order[1:], None), strict=True):
            target = final if then is None else states[then]
            if carry is None:
                torch.add(states[here], added[here], out=target)
            else:
                torch.addcmul(added[here], states[here], carry[here], out=target)
        return self.work.take(name, shape[0] * self.t, *first.shape[1:]), final.view(first.shape)

    def count(self, steps: Tensor, first: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
        """`scan` of rows: each chunk's sum [R*t 1 e] and the first state [R e]."""
        added, backwards = steps.view(len(first), self.t, -1), self.rule.reverse != backward
        added = added.flip(1) if backwards else added
        if self.weights is None:
            states = torch.cat([first.unsqueeze(1), added], dim=1).cumsum(1)
        else:
            carry = self.weights.carry.flip(1) if backwards else self.weights.carry
            states = [first]
            for new, kept in zip(added.unbind(1), carry.unbind(1), strict=True):
                states.append(torch.addcmul(new, states[-1], kept))
            states = torch.stack(states, dim=1)
        before = states[:, :-1].flip(1) if backwards else states[:, :-1]
        return before.reshape(steps.shape), states[:, -1]

    def remember(self, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """From the states before the segment [R f v], [R e] make those before each chunk; returns those after the segment."""
        torch.bmm(self.k_on.mT, self.v, out=self.work.take("s_steps", len(self.k), self.k.shape[-1], self.v.shape[-1]))
        self.s, s = self.scan("s", s)
        if self.counted:
            self.z, z = self.count(self.k_den_on.sum(1, keepdim=True), z)
        return s, z

    def numerator(self, tile: Tensor, out: Tensor) -> Tensor:
        """num into `out` [R*t r*C v], and w_ij (q_i . k_j) into `tile`."""
        self.pairs(torch.bmm(self.q, self.k.mT, out=tile))
        return torch.bmm(tile, self.v, out=out).baddbmm_(self.q_in, self.s)

    def counts(self) -> Tensor:
        """sum_j w_ij k'_j with the state, [R*t C e]."""
        return self.tile() @ self.k_den + self.into(self.z.expand(-1, self.chunk, -1).contiguous())

    def denominator(self, tile: Tensor, den: Tensor) -> Tensor:
        """den into `den` [R*t r*C 1], from what `numerator` left in `tile`."""
        if self.shared:
            part = torch.mul(self.q_in, self.z, out=self.work.take("part", *self.q.shape))
            return torch.sum(part, -1, keepdim=True, out=den).add_(tile.sum(-1, keepdim=True))
        part = self.by_head(self.q_den) * self.counts().unsqueeze(1)
        return torch.sum(part.flatten(1, 2), -1, keepdim=True, out=den)

    def ask(self, block: Block, d_out: Tiles, d_den: Tiles | None, out: Tiles, den: Tiles) -> None:
        """Make the gradients of num [R*t r*C v] and, where there is one, of den [R*t r*C 1]."""
        self.d_num = d_out.load(block)
        self.d_den = None if d_den is None else d_den.load(block)
        if self.rule.denominator != "divide":
            return
        count = den.load(block)
        shape = self.d_num.shape
        self.d_num = torch.div(self.d_num, bounded(count, self.rule), out=self.work.take("d_num", *shape))
        part = torch.mul(self.d_num, out.load(block), out=self.work.take("part", *shape))
        free = (count.abs() if self.rule.signed else count) >= self.rule.eps
        through = part.sum(-1, keepdim=True).neg_().mul_(free)
        self.d_den = through if self.d_den is None else through + self.d_den

    def asked(self, u: Tensor, u_z: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradients of the states after the segment make those after each chunk; returns those before the segment."""
        steps = self.work.take("u_steps", len(self.q), self.q.shape[-1], self.v.shape[-1])
        torch.bmm(self.q_in.mT, self.d_num, out=steps)
        self.u, u = self.scan("u", u, backward=True)
        if self.counted:
            steps = torch.zeros_like(self.z)
            if self.d_den is not None:  # not a product with one column, which is slower
                part = torch.mul(self.q_den_in, self.d_den, out=self.work.take("part", *self.q_den.shape))
                steps = part.sum(1, keepdim=True)
            self.u_z, u_z = self.count(steps, u_z, backward=True)
        return u, u_z

    def d_values(self, tile: Tensor, dv: Tensor) -> Tensor:
        """The gradient of v into `dv`; needs a tile to work in."""
        self.pairs(torch.bmm(self.q, self.k.mT, out=tile))
        return torch.bmm(tile.mT, self.d_num, out=dv).baddbmm_(self.k_on, self.u)

    def d_features(self, tile: Tensor, dq: Tensor, dk: Tensor) -> None:
        """The gradients of q and k into `dq` and `dk`; needs a tile to work in."""
        d_den = self.d_den if self.shared else None
        if d_den is None:
            torch.bmm(self.d_num, self.v.mT, out=tile)
        else:
            torch.baddbmm(d_den, self.d_num, self.v.mT, out=tile)
        self.pairs(tile)
        torch.bmm(tile, self.k, out=dq)
        torch.bmm(tile.mT, self.q, out=dk)
        if self.weights is None:
            far_q, far_k = dq.baddbmm_(self.d_num, self.s.mT), dk.baddbmm_(self.v, self.u.mT)
        else:
            far_q, far_k = torch.bmm(self.d_num, self.s.mT), torch.bmm(self.v, self.u.mT)
        if d_den is not None:
            far_q.addcmul_(d_den, self.z)
        if self.shared and self.counted:
            far_k.add_(self.u_z)
        if self.weights is not None:
            dq.add_(self.into(far_q))
            dk.add_(self.onto(far_k))

    def d_counts(self) -> tuple[Tensor, Tensor]:
        """The gradients of q_den and k_den."""
        d_den = self.by_head(torch.zeros_like(self.q_den[..., :1]) if self.d_den is None else self.d_den)
        dq = (d_den * self.counts().unsqueeze(1)).flatten(1, 2)
        dk = self.tile().mT @ (d_den * self.by_head(self.q_den)).sum(1)
        return dq, dk + self.onto(self.u_z.expand(-1, self.chunk, -1).contiguous())

    def moved(self, dq: Tensor, dk: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """q . dq - k . dk of each token, [R*t C]."""
        return self.by_head((dq * q).sum(-1, keepdim=True)).sum((1, 3)) - (dk * k).sum(-1)

    def d_fade(self, moved: Tensor, s_end: Tensor, z_end: Tensor) -> Tensor:
        """The gradient of each token's fade [R*t C 1], given the states after the segment."""
        across = self._across(self.s, s_end, self.u)
        if self.counted:
            across = across + self._across(self.z, z_end.unsqueeze(1), self.u_z)
        running = moved.cumsum(-1)
        inside = running - moved if self.rule.reverse else running[:, -1:] - running + moved
        return (across.view(-1, 1) + inside).unsqueeze(-1)

    def _across(self, states: Tensor, end: Tensor, gradients: Tensor) -> Tensor:
        """<state after each chunk, its gradient>, [R t]."""
        states, gradients = (y.view(len(end), self.t, -1) for y in (states, gradients))
        order = (
            (end.view(len(end), 1, -1), states[:, :-1])
            if self.rule.reverse
            else (states[:, 1:], end.view(len(end), 1, -1))
        )
        return (torch.cat(order, dim=1) * gradients).sum(-1)
