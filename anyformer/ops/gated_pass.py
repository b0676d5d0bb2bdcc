"""One pass of `linear_gated` over a sequence, forward and backward, a segment of chunks at a time.

With a_t = exp(fade_t), one factor a channel, a query reads the keys before its own and its own, or with `reverse` those after it:

    out_i = sum_j w_ij v_j,   w_ij = sum_f q_if k_jf prod_t a_tf   over the t between the two, the later of them included

Inside a chunk blocks of 1, 2, 4 ... tokens are joined in pairs: the queries of one block and the keys of the other are faded up to
and from the edge between them, so that no factor is above one, and their product is a square of weights. Faded to the edges of the
chunk, queries read the state that came before it, and keys and values make the state that goes on.

The backward computes squares and states again and walks the other way round. A fade's gradient is the sum over the pairs that it
separates: those across the edge of its chunk, <S, U> with U the gradient of S, and inside the chunk a running sum of q dq - k dk.
"""

import torch
from torch import Tensor

from anyformer.ops.pages import in_huge_pages
from anyformer.ops.scan_tiles import Layout, Segment, load, states_of, store
from anyformer.ops.tile import Scratch


class Part:
    """A segment's tiles and the squares of weights between its blocks.

    q [t*R C*r f] and k [t*R C f] end up faded to the edges of their chunk; `total` [t R f] is the factor across each chunk and
    `weights` [t*R C*r C] all pairs inside one.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, layout: Layout, s: Segment, work: Scratch):
        self.layout, self.work, self.rows = layout, work, s.last - s.first
        self.raw_q, self.raw_k, self.v = load(q, s), load(k, s), load(v, s)
        self.chunk, self.count = layout.chunk, len(self.raw_k)
        self.ratio = self.raw_q.shape[1] // self.chunk
        self.t = s.stop - s.start
        fade = load(fade, s)
        self.factor = torch.exp(fade, out=work.take("factor", *fade.shape))
        self.q, self.k = work.take("q", *self.raw_q.shape), work.take("k", *self.raw_k.shape)
        self.late, self.early = (0, 1) if layout.reverse else (1, 0)  # the halves of queries and keys that meet
        self.sizes = [1 << level for level in range(self.chunk.bit_length() - 1)]

    def faded_alone(self, queries: Tensor, keys: Tensor) -> None:
        """Fade each token by its own factor, which stands between it and all earlier ones."""
        if self.layout.reverse:
            keys.mul_(self.factor)
        else:
            by_token = queries.view(self.count, self.chunk, self.ratio, -1)
            by_token.mul_(self.factor.unsqueeze(2))

    def halves(self, x: Tensor, size: int) -> Tensor:
        """[t*R C*r w] -> [pairs 2 size*r w]."""
        return x.view(self.count * self.chunk // (2 * size), 2, -1, x.shape[2])

    def square(self, weights: Tensor, size: int) -> Tensor:
        """The square of each pair of blocks, a view [t*R pairs size*r size] of the weights."""
        chunk, ratio = self.chunk, self.ratio
        width = chunk * ratio
        return weights.as_strided(
            (self.count, chunk // (2 * size), size * ratio, size),
            (width * chunk, 2 * size * (width + 1), chunk, 1),
            weights.storage_offset() + size * (width if self.late else 1),
        )

    def diagonal(self, weights: Tensor) -> Tensor:
        """The weight of each token for itself, a view [t*R C r]."""
        chunk, width = self.chunk, self.chunk * self.ratio
        return weights.as_strided(
            (self.count, chunk, self.ratio), (width * chunk, width + 1, chunk), weights.storage_offset()
        )

    def join(self, weights: Tensor, keep: bool) -> None:
        """Fill in the weights [t*R C*r C], whose other half is 0, and fade queries and keys; with `keep` for `part` also."""
        self.q.copy_(self.raw_q)
        self.k.copy_(self.raw_k)
        if not self.layout.reverse:
            own = self.raw_q.view(self.count, self.chunk, self.ratio, -1) * self.raw_k.unsqueeze(2)
            self.diagonal(weights).copy_(own.sum(-1))
        self.faded_alone(self.q, self.k)
        self.met: list[tuple[Tensor, Tensor, Tensor]] = []
        total = self.factor
        for size in self.sizes:
            q, k = self.halves(self.q, size)[:, self.late], self.halves(self.k, size)[:, self.early]
            total = total.view(-1, 2, 1, total.shape[-1])
            if keep:
                met = self.work.take(f"q{size}", *q.shape).copy_(q), self.work.take(f"k{size}", *k.shape).copy_(k)
                self.met.append((*met, total))
            square = torch.bmm(q, k.mT, out=self.work.take("square", len(q), q.shape[1], size))
            target = self.square(weights, size)
            target.copy_(square.view(target.shape))
            q.mul_(total[:, self.early])
            k.mul_(total[:, self.late])
            total = torch.mul(total[:, 0], total[:, 1], out=self.work.take(f"t{size}", len(q), 1, q.shape[2]))
        self.total = total.view(self.t, self.rows, -1, 1)

    def scan(self, steps: Tensor, first: Tensor, name: str, backward: bool = False) -> Tensor:
        """Each chunk's sum [t*R f v] and the state before the segment [R f v] -> the states before each chunk and, last, the one
        after the segment, [t+1 R f v]; with `backward` the same for gradients."""
        added, total = steps.view(self.t, *first.shape).unbind(), self.total.unbind()
        room = self.work.take(name, self.t + 1, *first.shape)
        order = self.layout.steps(self.t, backward)
        states = room.unbind()
        at = 0 if order.step > 0 else self.t
        states[at].copy_(first)
        for i in order:
            torch.addcmul(added[i], states[at], total[i], out=states[at + order.step])
            at += order.step
        return room

    def remember(self, state: Tensor) -> Tensor:
        """From the state before the segment [R f v] make those before each chunk; returns the one after the segment."""
        steps = self.work.take("steps", self.count, self.k.shape[2], self.v.shape[2])
        states = self.scan(torch.bmm(self.k.mT, self.v, out=steps), state, "s")
        self.before, self.after = self._around(states, self.layout.reverse)
        return states[0 if self.layout.reverse else self.t]

    def asked(self, d_out: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient of the state after the segment make those after each chunk; returns that of the state before."""
        steps = self.work.take("steps", self.count, self.k.shape[2], self.v.shape[2])
        states = self.scan(torch.bmm(self.q.mT, d_out, out=steps), gradient, "u", backward=True)
        self.asking = self._around(states, not self.layout.reverse)[0]
        return states[self.t if self.layout.reverse else 0]

    def _around(self, states: Tensor, falling: bool) -> tuple[Tensor, Tensor]:
        """The states before and after each chunk in the order of a walk, [t*R f v]."""
        high, low = states[1:].flatten(0, 1), states[:-1].flatten(0, 1)
        return (high, low) if falling else (low, high)

    def part(self, d_weights: Tensor, d_q: Tensor, d_k: Tensor) -> None:
        """Turn gradients of faded queries and keys into those of the given ones, and add those of the squares."""
        for size, (q, k, total) in zip(reversed(self.sizes), reversed(self.met), strict=True):
            d_late, d_early = self.halves(d_q, size)[:, self.late], self.halves(d_k, size)[:, self.early]
            square = self.work.take("square", len(q), q.shape[1], size)
            target = self.square(d_weights, size)
            square.view(target.shape).copy_(target)
            d_late.mul_(total[:, self.early]).add_(torch.bmm(square, k, out=self.work.take("half_q", *q.shape)))
            d_early.mul_(total[:, self.late]).add_(torch.bmm(square.mT, q, out=self.work.take("half_k", *k.shape)))
        self.faded_alone(d_q, d_k)

    def d_fade(self, d_q: Tensor, d_k: Tensor) -> Tensor:
        """The gradient of the fades from those of queries and keys without what each token owes to itself, [t*R C f]."""
        moved = (
            (d_q * self.raw_q).view(self.count, self.chunk, self.ratio, -1).sum(2)
            if self.ratio > 1
            else d_q * self.raw_q
        )
        moved.sub_(d_k * self.raw_k)
        ones = torch.ones(self.chunk, self.chunk, dtype=moved.dtype, device=moved.device)
        within = ones.tril(-1) if self.layout.reverse else ones.triu()
        across = (self.after * self.asking).sum(-1).unsqueeze(1)
        return torch.baddbmm(across, within.expand(self.count, -1, -1), moved)


def forward(
    q: Tensor, k: Tensor, v: Tensor, fade: Tensor, state: Tensor, reverse: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """out [b h n v] and the states [b g segments+1 f v] before each segment and after the last, in the order of the pass."""
    layout, work = Layout(k, chunk, reverse), Scratch(q.dtype, q.device)
    ratio = q.shape[1] // k.shape[1]
    states = states_of(k, state, chunk).flatten(0, 1)
    q, k, v, fade = (layout.tokens(x) for x in (q, k, v, fade))
    out = in_huge_pages(v.new_empty(*q.shape[:3], v.shape[3]))
    states[:, 0] = state.flatten(0, 1)
    weights = q.new_zeros(0)
    for segments in layout.segments():
        for s in segments:
            part = Part(q, k, v, fade, layout, s, work)
            weights = _weights(part, weights)
            part.join(weights, keep=False)
            states[s.first : s.last, s.number + 1] = part.remember(states[s.first : s.last, s.number])
            tiles = torch.bmm(weights, part.v, out=work.take("out", *weights.shape[:2], v.shape[3]))
            store(tiles.baddbmm_(part.q, part.before), out, s)
    return layout.heads(out, ratio), states.unflatten(0, (layout.batch, layout.groups))


def backward(
    d_out: Tensor,
    d_states: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fade: Tensor,
    states: Tensor,
    reverse: bool,
    chunk: int,
) -> list[Tensor]:
    """The gradients of q, k, v, fade and the first state."""
    layout, work = Layout(k, chunk, reverse), Scratch(q.dtype, q.device)
    ratio = q.shape[1] // k.shape[1]
    states = states.flatten(0, 1)
    u = torch.zeros_like(states) if d_states is None else d_states.flatten(0, 1).clone()
    q, k, v, fade, d_out = (layout.tokens(x) for x in (q, k, v, fade, d_out))
    d_q, d_k, d_v, d_fade = (in_huge_pages(torch.empty_like(x)) for x in (q, k, v, fade))
    weights = q.new_zeros(0)
    for segments in layout.segments(backward=True):
        for s in segments:
            part, asks = Part(q, k, v, fade, layout, s, work), load(d_out, s)
            weights = _weights(part, weights)
            part.join(weights, keep=True)
            part.remember(states[s.first : s.last, s.number])
            u[s.first : s.last, s.number] += part.asked(asks, u[s.first : s.last, s.number + 1])
            tiles = torch.bmm(weights.mT, asks, out=work.take("dv", *part.v.shape))
            store(tiles.baddbmm_(part.k, part.asking), d_v, s)
            d_weights = torch.bmm(asks, part.v.mT, out=work.take("dw", *weights.shape))
            tile_q = torch.bmm(asks, part.before.mT, out=work.take("dq", *part.q.shape))
            tile_k = torch.bmm(part.v, part.asking.mT, out=work.take("dk", *part.k.shape))
            part.part(d_weights, tile_q, tile_k)
            store(part.d_fade(tile_q, tile_k), d_fade, s)
            if not reverse:
                own = part.diagonal(d_weights).unsqueeze(-1)
                by_token = tile_q.view(part.count, part.chunk, ratio, -1)
                by_token.addcmul_(own, part.raw_k.unsqueeze(2))
                tile_k.add_((own * part.raw_q.view(by_token.shape)).sum(2))
            store(tile_q, d_q, s)
            store(tile_k, d_k, s)
    d_q, d_k, d_v, d_fade = layout.heads(d_q, ratio), layout.heads(d_k), layout.heads(d_v), layout.heads(d_fade)
    return [d_q, d_k, d_v, d_fade, u[:, 0].unflatten(0, (layout.batch, layout.groups))]


def _weights(part: Part, room: Tensor) -> Tensor:
    """A tile [t*R C*r C] for the weights, in room that may have held weights before: their other half is still 0."""
    shape = part.count, part.chunk * part.ratio, part.chunk
    size = shape[0] * shape[1] * shape[2]
    room = room.flatten()
    return (room if room.numel() >= size else room.new_zeros(size))[:size].view(shape)
