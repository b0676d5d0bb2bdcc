"""`bucket_pass` over all pairs, a few rows at a time: less work where the windows of all rounds together are as long as a row.

A pair is told apart once, by the least distance of its chunks in any round, and no token is moved. With S the scores and
P = softmax(S) over the pairs that meet,

    dS = P (dO V^T - dO . O),    dQ = scale dS K,    dK = scale dS^T Q,    dV = P^T dO

A row that meets nothing is given its own value.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.ops.pages import in_huge_pages
from anyformer.ops.tile import APART, DEAD, SHUT, Scratch, tiles_at_once, working_dtype

_FEW = 2**13  # tokens up to which the numbers of chunks fit in 16 bits


class Rows(NamedTuple):
    """Rows start to stop - 1, which read keys 0 to reach - 1."""

    start: int
    stop: int
    reach: int


class Head:
    """The pairs of one head after the other."""

    def __init__(self, q: Tensor, causal: bool, scale: float):
        self.n, self.causal, self.scale = q.shape[2], causal, scale
        self.work = Scratch(working_dtype(q), q.device)
        threads = torch.get_num_threads() if q.device.type == "cpu" else 64
        self.at_once = min(tiles_at_once(self.n, threads), self.n)
        self.whole = torch.int16 if self.n <= _FEW else torch.int32
        own = torch.zeros(self.at_once, self.at_once, dtype=self.work.dtype, device=q.device)
        places = torch.arange(self.at_once, device=q.device)
        ahead = places - places[:, None]
        self.shut = own.masked_fill_(ahead >= 0 if causal else ahead == 0, SHUT)
        """What is added to scores of rows and keys at the same places: no token reads itself or, when causal, a later one."""

    def enter(self, q: Tensor, k: Tensor, v: Tensor, chunk: Tensor) -> None:
        """Take a head: its tokens [n w], and the numbers of their chunks [rounds n]."""
        self.q = self.work.take("q", *q.shape).copy_(q).mul_(self.scale)
        self.k, self.v = (x.to(self.work.dtype) for x in (k, v))
        self.q_numbers = chunk.to(self.whole)
        self.k_numbers = chunk.masked_fill(chunk < 0, 2 * self.n + 4).to(self.whole)

    def rows(self) -> Iterator[Rows]:
        """Rows few enough that their weights stay in the cache."""
        for start in range(0, self.n, self.at_once):
            stop = min(start + self.at_once, self.n)
            yield Rows(start, stop, stop if self.causal else self.n)

    def weigh(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Weights [rows reach], and the log of each row's normaliser [rows 1]: -inf without keys, and its weights void."""
        start, stop, reach = rows
        scores = self.work.take("scores", stop - start, reach)
        torch.mm(self.q[start:stop], self.k[:reach].mT, out=scores)
        nearest = self._apart(0, rows, "nearest")
        for number in range(1, len(self.q_numbers)):
            torch.minimum(nearest, self._apart(number, rows, "apart"), out=nearest)
        added = self.work.take("added", stop - start, reach).copy_(nearest)
        scores.addcmul_(added, added, value=APART)
        scores[:, start:stop].add_(self.shut[: stop - start, : stop - start])
        top = scores.amax(-1, keepdim=True)
        torch.softmax(scores, -1, out=scores)
        lse = top - scores.amax(-1, keepdim=True).log_()
        return scores, lse.masked_fill_(top < DEAD, -math.inf)

    def _apart(self, number: int, rows: Rows, name: str) -> Tensor:
        """0 where a query meets a key in a round, else an even number."""
        room = self.work.take(name, rows.stop - rows.start, rows.reach, dtype=self.whole)
        torch.sub(self.q_numbers[number, rows.start : rows.stop, None], self.k_numbers[number, : rows.reach], out=room)
        return room.bitwise_and_(-2).abs_()


def forward(q: Tensor, k: Tensor, v: Tensor, chunk: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out [b h n v] and lse [b h n], the log of each row's normaliser, both in the dtype of sums."""
    head = Head(q, causal, scale)
    out = in_huge_pages(v.new_empty(*q.shape[:3], v.shape[3], dtype=head.work.dtype))
    lse = out.new_empty(q.shape[:3])
    for at in itertools.product(range(q.shape[0]), range(q.shape[1])):
        head.enter(q[at], k[at], v[at], chunk[at])
        for rows in head.rows():
            weights, log = head.weigh(rows)
            torch.mm(weights, head.v[: rows.reach], out=out[at][rows.start : rows.stop])
            lse[at][rows.start : rows.stop] = log[:, 0]
        alone = lse[at] == -math.inf
        out[at][alone] = own(head.v, chunk[at][0])[alone]
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    head = Head(q, causal, scale)
    work = head.work
    d_q, d_k, d_v = (in_huge_pages(torch.empty(x.shape, dtype=x.dtype, device=x.device)) for x in (q, k, v))
    owed = (d_out * out).sum(-1, keepdim=True)
    for at in itertools.product(range(q.shape[0]), range(q.shape[1])):
        head.enter(q[at], k[at], v[at], chunk[at])
        alone = lse[at] == -math.inf
        total_k, total_v = (work.take(name, *x.shape[2:]).zero_() for name, x in (("dk", k), ("dv", v)))
        total_v[alone] = own(d_out[at].to(work.dtype), chunk[at][0])[alone]
        any_alone = bool(alone.any())
        for rows in head.rows():
            part, reach = slice(rows.start, rows.stop), slice(rows.reach)
            weights, _ = head.weigh(rows)
            if any_alone:
                weights.masked_fill_(alone[part, None], 0.0)
            asked = d_out[at][part].to(work.dtype)
            total_v[reach].addmm_(weights.mT, asked)
            d_scores = torch.addmm(
                owed[at][part], asked, head.v[reach].mT, beta=-1, out=work.take("ds", *weights.shape)
            ).mul_(weights)
            d_q[at][part] = torch.mm(d_scores, head.k[reach]).mul_(scale)
            total_k[reach].addmm_(d_scores.mT, head.q[part])
        d_k[at], d_v[at] = total_k, total_v
    return d_q, d_k, d_v


def own(x: Tensor, chunk: Tensor) -> Tensor:
    """What rows that meet nothing take: their own, padding nothing."""
    return x.masked_fill((chunk < 0).unsqueeze(-1), 0.0)
