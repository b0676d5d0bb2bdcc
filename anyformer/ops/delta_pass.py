"""One pass of `linear_delta` over a sequence, forward and backward, a segment of chunks at a time.

With S the state before a chunk, E what its tokens read before they correct, and A = diag(beta) E K^T over the pairs of a token and
an earlier one, or with `reverse` a later one,

    u = (I + A)^-1 diag(beta) (V - E S),    out = Q S + (Q K^T) u,    S <- S + K^T u

where Q K^T is over the same pairs and, without `reverse`, each token with itself. A cut between two tokens keeps apart what stands
on its two sides.

The backward computes S and u again and walks the other way round. With U the gradient of the state after the chunk,

    du = (Q K^T)^T dout + K U,    y = (I + A)^-T du,    dA = -y u^T,    U <- U + Q^T dout - E^T diag(beta) y
"""

import torch
from torch import Tensor

from anyformer.ops.pages import in_huge_pages
from anyformer.ops.scan_tiles import Layout, Segment, load, states_of, store
from anyformer.ops.tile import Scratch


class Rows:
    """The operands of a pass in chunks; see `Layout.tokens`."""

    def __init__(
        self, layout: Layout, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, read: Tensor, cuts: Tensor | None
    ):
        self.layout = layout
        self.q, self.k, self.v, self.beta, self.read = (layout.tokens(x) for x in (q, k, v, beta, read))
        self.places = None if cuts is None else _places(layout, cuts)
        ones = torch.ones(layout.chunk, layout.chunk, dtype=torch.bool, device=q.device)
        self.apart = ones.tril() if layout.reverse else ones.triu()
        self.eye = torch.eye(layout.chunk, dtype=k.dtype, device=k.device)
        self.ratio = self.q.shape[2] // layout.chunk


def _places(layout: Layout, cuts: Tensor) -> Tensor:
    """The number of cuts between each token [b*g T C 1] and the edge where its chunk begins."""
    if not layout.reverse:
        return layout.tokens(cuts).cumsum(2)
    cuts = torch.cat([cuts[:, :, 1:], torch.zeros_like(cuts[:, :, :1])], dim=2)
    return layout.tokens(cuts).flip(2).cumsum(2).flip(2)


class Part:
    """A segment's tiles, and the solution of its systems.

    `inverse` [t*R C C] is (I + A)^-1, `products` [t*R C*r C] is Q K^T; `first`, `last` [t*R C 1] and `keeps` [t R 1 1] tell which
    tokens meet the state before the chunk, which the one after it, and whether these two meet; None: all.
    """

    def __init__(self, rows: Rows, s: Segment, work: Scratch):
        self.layout, self.work, self.ratio = rows.layout, work, rows.ratio
        self.t = s.stop - s.start
        self.q, self.k, self.v, self.beta, self.read = (
            load(x, s) for x in (rows.q, rows.k, rows.v, rows.beta, rows.read)
        )
        self.apart, self.first, self.last, self.keeps = rows.apart, None, None, None
        if rows.places is not None:
            places = load(rows.places, s)
            end = places[:, :1] if self.layout.reverse else places[:, -1:]
            self.apart = rows.apart | (places != places.mT)
            self.first, self.last = (places == 0).to(self.k.dtype), (places == end).to(self.k.dtype)
            self.keeps = (end == 0).to(self.k.dtype).view(self.t, -1, 1, 1).unbind()
        self.pairs = torch.bmm(self.read, self.k.mT, out=self._tile("pairs")).masked_fill_(self.apart, 0.0)
        system = torch.mul(self.pairs, self.beta, out=self._tile("system"))
        eye = rows.eye.expand(len(self.k), -1, -1)
        self.inverse = torch.linalg.solve_triangular(system, eye, upper=self.layout.reverse, unitriangular=True)
        self.seen = torch.bmm(self.inverse, _only(self.read, self.first) * self.beta, out=self._like("seen", self.k))
        self.alone = torch.bmm(self.inverse, self.v * self.beta, out=self._like("alone", self.v))
        self.k_last, self.q_first = _only(self.k, self.last), self._queries(self.q)
        self.products = self._restricted(torch.bmm(self.q, self.k.mT, out=self._tile("products", self.ratio)))

    def _tile(self, name: str, ratio: int = 1) -> Tensor:
        return self.work.take(name, len(self.k), self.layout.chunk * ratio, self.layout.chunk)

    def _like(self, name: str, x: Tensor) -> Tensor:
        return self.work.take(name, *x.shape)

    def _queries(self, q: Tensor) -> Tensor:
        """Rows of queries that meet the state before the chunk."""
        return q if self.first is None else q * self.first.repeat_interleave(self.ratio, dim=1)

    def _restricted(self, tiles: Tensor) -> Tensor:
        """Pairs of queries and keys [t*R C*r C] that may not meet made 0, in place."""
        apart = self.apart if self.layout.reverse else self.apart & ~_diagonal(self.apart)
        by_token = tiles.view(len(tiles), self.layout.chunk, self.ratio, -1)
        return by_token.masked_fill_(apart.unsqueeze(-2), 0.0).view(tiles.shape)

    def _by_chunk(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.view(self.t, -1, *x.shape[1:]).unbind()

    def correct(self, state: Tensor) -> Tensor:
        """From the state before the segment [R f v] make those before each chunk, `s`, and the corrections u; returns the state
        after the segment."""
        self.s = self.work.take("s", len(self.k), *state.shape[1:])
        self.u = self._like("u", self.v)
        alone, seen, keys, s, u = (self._by_chunk(x) for x in (self.alone, self.seen, self.k_last.mT, self.s, self.u))
        order = list(self.layout.steps(self.t))
        s[order[0]].copy_(state)
        last = torch.empty_like(state)
        for i, then in zip(order, [*order[1:], None], strict=True):
            torch.baddbmm(alone[i], seen[i], s[i], alpha=-1, out=u[i])
            kept = s[i] if self.keeps is None else s[i] * self.keeps[i]
            torch.baddbmm(kept, keys[i], u[i], out=last if then is None else s[then])
        return last

    def asked(self, d_out: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient of the state after the segment make those after each chunk, `asking`, and that of u, `d_u`; returns
        the gradient of the state before the segment."""
        self.d_u = torch.bmm(self.products.mT, d_out, out=self._like("d_u", self.v))
        steps = torch.bmm(self.q_first.mT, d_out, out=self.work.take("steps", *self.s.shape))
        self.asking = self.work.take("asking", *self.s.shape)
        d_u, added, keys, seen, asking = (
            self._by_chunk(x) for x in (self.d_u, steps, self.k_last, self.seen.mT, self.asking)
        )
        order = list(self.layout.steps(self.t, backward=True))
        asking[order[0]].copy_(gradient)
        last = torch.empty_like(gradient)
        for i, then in zip(order, [*order[1:], None], strict=True):
            d_u[i].baddbmm_(keys[i], asking[i])
            kept = asking[i] if self.keeps is None else asking[i] * self.keeps[i]
            torch.baddbmm(added[i].add_(kept), seen[i], d_u[i], alpha=-1, out=last if then is None else asking[then])
        return last

    def gradients(self, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Those of q, k, v, beta and read, once `asked`."""
        d_products = self._restricted(torch.bmm(d_out, self.u.mT, out=self._tile("d_products", self.ratio)))
        far = torch.bmm(d_out, self.s.mT, out=self._like("far_q", self.q))
        d_q = torch.bmm(d_products, self.k, out=self._like("d_q", self.q)).add_(self._queries(far))
        d_k = torch.bmm(self.u, self.asking.mT, out=self._like("d_k", self.k))
        d_k = d_k if self.last is None else d_k.mul_(self.last)
        d_k.baddbmm_(d_products.mT, self.q)
        y = torch.bmm(self.inverse.mT, self.d_u, out=self._like("y", self.v))
        d_pairs = torch.bmm(y, self.u.mT, out=self._tile("d_pairs")).masked_fill_(self.apart, 0.0).neg_()
        d_beta = (d_pairs * self.pairs).sum(-1, keepdim=True)
        d_pairs.mul_(self.beta)
        d_k.baddbmm_(d_pairs.mT, self.read)
        far = torch.bmm(y, self.s.mT, out=self._like("far_k", self.k))
        far = far if self.first is None else far.mul_(self.first)
        d_beta.add_((y * self.v).sum(-1, keepdim=True)).sub_((far * self.read).sum(-1, keepdim=True))
        d_read = torch.bmm(d_pairs, self.k, out=self._like("d_read", self.k)).addcmul_(far, self.beta, value=-1)
        return d_q, d_k, y.mul_(self.beta), d_beta, d_read


def _only(x: Tensor, some: Tensor | None) -> Tensor:
    return x if some is None else x * some


def _diagonal(apart: Tensor) -> Tensor:
    return torch.eye(apart.shape[-1], dtype=torch.bool, device=apart.device)


def forward(
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
    """out [b h n v] and the states [b g segments+1 f v] before each segment and after the last, in the order of the pass."""
    layout, work = Layout(k, chunk, reverse), Scratch(q.dtype, q.device)
    rows = Rows(layout, q, k, v, beta, read, cuts)
    out = in_huge_pages(v.new_empty(*rows.q.shape[:3], v.shape[3]))
    states = states_of(k, state, chunk).flatten(0, 1)
    states[:, 0] = state.flatten(0, 1)
    for segments in layout.segments():
        for s in segments:
            part = Part(rows, s, work)
            states[s.first : s.last, s.number + 1] = part.correct(states[s.first : s.last, s.number])
            tiles = torch.bmm(part.products, part.u, out=work.take("out", *part.q.shape[:2], v.shape[3]))
            store(tiles.baddbmm_(part.q_first, part.s), out, s)
    return layout.heads(out, rows.ratio), states.unflatten(0, (layout.batch, layout.groups))


def backward(
    d_out: Tensor,
    d_states: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    read: Tensor,
    cuts: Tensor | None,
    states: Tensor,
    reverse: bool,
    chunk: int,
) -> list[Tensor]:
    """The gradients of q, k, v, beta, read, an empty tensor for cuts, and that of the first state."""
    layout, work = Layout(k, chunk, reverse), Scratch(q.dtype, q.device)
    states = states.flatten(0, 1)
    gradients = torch.zeros_like(states) if d_states is None else d_states.flatten(0, 1).clone()
    rows, d_out = Rows(layout, q, k, v, beta, read, cuts), layout.tokens(d_out)
    made = [in_huge_pages(torch.empty_like(x)) for x in (rows.q, rows.k, rows.v, rows.beta, rows.read)]
    for segments in layout.segments(backward=True):
        for s in segments:
            part, asks = Part(rows, s, work), load(d_out, s)
            part.correct(states[s.first : s.last, s.number])
            gradients[s.first : s.last, s.number] += part.asked(asks, gradients[s.first : s.last, s.number + 1])
            for tiles, target in zip(part.gradients(asks), made, strict=True):
                store(tiles, target, s)
    d_q, d_k, d_v, d_beta, d_read = (
        layout.heads(x, ratio) for x, ratio in zip(made, (rows.ratio, 1, 1, 1, 1), strict=True)
    )
    d_state = gradients[:, 0].unflatten(0, (layout.batch, layout.groups))
    return [d_q, d_k, d_v, d_beta, d_read, q.new_empty(0), d_state]
