"""Softmax attention inside buckets, forward and backward, a round of hashing and a few tiles at a time.

The tokens of a head stand in the order of a round's buckets. A tile of `size` of them, or of half as many where that is enough for
fast products, reads a window of that order: the 2 * size before it, itself, and the `size` after it unless causal. In the window a
query meets the keys whose chunk has its own chunk's number or the one below, itself excepted, when causal only those before it, and
each in the first round that they meet in. With S the scores of a round, L_r the log of a row's normaliser in it and L that of all
rounds,

    P = exp(S - L) = softmax(S) exp(L_r - L),    dS = P (dO V^T - dO . O),    dQ = scale dS K,    dK = scale dS^T Q,    dV = P^T dO

A row that meets nothing in any round is given its own value.

Whether chunks meet is told by whole numbers made additions to the scores, for a comparison costs several times as much here.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.ops.pages import in_huge_pages
from anyformer.ops.tile import APART, DEAD, SHUT, Scratch, tiles_at_once, working_dtype

_FEW = 2**13  # tokens up to which the numbers of chunks fit in 16 bits
_LEAST = 16  # rows of a tile from which on products are fast


class Cut(NamedTuple):
    """Tiles start to stop - 1 of a round."""

    start: int
    stop: int


class Head:
    """One head's tokens, and one round after the other their order."""

    def __init__(self, q: Tensor, causal: bool, size: int):
        halves = 2 if size % 2 == 0 and size >= 2 * _LEAST else 1
        self.before, size = 2 * size, size // halves
        self.n, self.size, self.causal = q.shape[2], size, causal
        self.tiles = -(-self.n // size)
        self.parts = 1 + (2 if causal else 3) * halves
        self.window = self.parts * size
        self.rows, self.slots = self.tiles * size, (self.tiles + self.parts - 1) * size
        self.work = Scratch(working_dtype(q), q.device)
        threads = torch.get_num_threads() if q.device.type == "cpu" else 64
        self.at_once = tiles_at_once(2 * size * self.window, threads)  # weights and their gradient
        self.whole = torch.int16 if self.n <= _FEW else torch.int32
        own = torch.zeros(size, self.window, dtype=self.work.dtype, device=q.device)
        places = torch.arange(self.window, device=q.device) - self.before - torch.arange(size, device=q.device)[:, None]
        self.shut = own.masked_fill_(places >= 0 if causal else places == 0, SHUT)[None]
        """What is added to the scores of a tile: a token does not read itself, and when causal nothing after it."""

    def enter(self, order: Tensor, chunk: Tensor) -> None:
        """Take a round: the tokens [n] in its order, and the numbers of their chunks [rounds n] in all rounds up to this one."""
        self.order = order
        places = torch.arange(self.n, device=order.device)
        self.back = self.work.take("back", self.n, dtype=torch.int64).scatter_(0, order, places)
        numbers = chunk[:, order]
        far = 2 * self.n + 4  # a number that no query has
        shape = len(numbers), self.rows
        self.q_numbers = self.work.take(f"q{len(numbers)}", *shape, dtype=self.whole).fill_(-1)
        self.k_numbers = self.work.take(f"k{len(numbers)}", len(numbers), self.slots, dtype=self.whole).fill_(far)
        self.q_numbers[:, : self.n] = numbers
        self.k_numbers[:, self.before : self.before + self.n] = numbers.masked_fill(numbers < 0, far)

    def sorted(self, x: Tensor, name: str) -> Tensor:
        """Rows [n w] in the round's order, [rows w]; zeros after the last."""
        room = self.work.take(name, self.rows, x.shape[1])
        room[self.n :].zero_()
        _moved(x, self.order, room[: self.n])
        return room

    def padded(self, x: Tensor, name: str) -> Tensor:
        """Keys or values [n w] in the round's order with room for the windows around them, [slots w]."""
        room, first = self.work.take(name, self.slots, x.shape[1]), self.before
        room[:first].zero_()
        room[first + self.n :].zero_()
        _moved(x, self.order, room[first : first + self.n])
        return room

    def cuts(self) -> Iterator[Cut]:
        """Tiles few enough that their weights stay in the cache."""
        for start in range(0, self.tiles, self.at_once):
            yield Cut(start, min(start + self.at_once, self.tiles))

    def tiled(self, rows: Tensor, cut: Cut) -> Tensor:
        """[rows w] -> a view [tiles size w]."""
        return rows.view(self.tiles, self.size, -1)[cut.start : cut.stop]

    def windows(self, slots: Tensor, cut: Cut) -> Tensor:
        """[slots w] -> a view [tiles window w]."""
        width = slots.shape[1]
        shape = cut.stop - cut.start, self.window, width
        return slots.as_strided(shape, (self.size * width, width, 1), cut.start * self.size * width)

    def spread(self, windows: Tensor, slots: Tensor, cut: Cut) -> None:
        """Add [tiles window w] to the slots, one part of all windows after the other, so that none overlaps."""
        by_part = slots.view(-1, self.size, slots.shape[1])
        for part in range(self.parts):
            at = slice(part * self.size, (part + 1) * self.size)
            by_part[cut.start + part : cut.stop + part].add_(windows[:, at])

    def give_back(self, parts: Sequence[Tensor], totals: Sequence[Tensor], *, anew: bool) -> None:
        """Add rows [n w] in the round's order to those in the order of the tokens, which hold nothing yet if `anew`."""
        for part, total in zip(parts, totals, strict=True):
            if anew:
                _moved(part, self.back, total)
            else:
                total.index_add_(0, self.order, part)

    def weigh(self, q: Tensor, k: Tensor, scale: float, cut: Cut) -> tuple[Tensor, Tensor]:
        """The weights [tiles size window] of a round, and the log of each row's normaliser [tiles size 1]: -inf without keys."""
        shape = cut.stop - cut.start, self.size, self.window
        scores = self.work.take("scores", *shape)
        torch.baddbmm(self.shut, self.tiled(q, cut), self.windows(k, cut).mT, alpha=scale, out=scores)
        added = self.work.take("added", *shape).copy_(self._apart(-1, cut, "whole"))
        scores.addcmul_(added, added, value=APART)
        if len(self.q_numbers) > 1:
            nearest = self._apart(0, cut, "nearest").abs_()
            for earlier in range(1, len(self.q_numbers) - 1):
                torch.minimum(nearest, self._apart(earlier, cut, "whole").abs_(), out=nearest)
            scores.add_(added.copy_(nearest.clamp_(max=2).sub_(2)), alpha=-SHUT / 2)
        top = scores.amax(-1, keepdim=True)
        torch.softmax(scores, -1, out=scores)
        lse = top - scores.amax(-1, keepdim=True).log_()
        return scores, lse.masked_fill_(top < DEAD, -math.inf)

    def _apart(self, at: int, cut: Cut, name: str) -> Tensor:
        """0 where a query meets a key in a round, else an even number."""
        rows, slots = self.q_numbers[at], self.k_numbers[at]
        shape = cut.stop - cut.start, self.size, self.window
        keys = slots[cut.start * self.size :].as_strided(
            (shape[0], 1, self.window), (self.size, 0, 1), slots.storage_offset() + cut.start * self.size
        )
        room = self.work.take(name, *shape, dtype=self.whole)
        return torch.sub(self.tiled(rows[:, None], cut), keys, out=room).bitwise_and_(-2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunk: Tensor, causal: bool, scale: float, size: int
) -> tuple[Tensor, Tensor]:
    """out [b h n v] and lse [b h n], the log of each row's normaliser, both in the dtype of sums."""
    rounds, n = order.shape[2:]
    head = Head(q, causal, size)
    work = head.work
    out = in_huge_pages(v.new_empty(*q.shape[:3], v.shape[3], dtype=work.dtype))
    lse = out.new_empty(q.shape[:3])
    for at in itertools.product(range(q.shape[0]), range(q.shape[1])):
        outs, lses = out[at][None], lse[at][None]
        if rounds > 1:
            outs, lses = work.take("outs", rounds, n, v.shape[3]), work.take("lses", rounds, n)
        for number in range(rounds):
            head.enter(order[at][number], chunk[at][: number + 1])
            queries, keys, values = head.sorted(q[at], "q"), head.padded(k[at], "k"), head.padded(v[at], "v")
            rows, logs = work.take("rows", head.rows, v.shape[3]), work.take("logs", head.rows, 1)
            for cut in head.cuts():
                weights, log = head.weigh(queries, keys, scale, cut)
                torch.bmm(weights, head.windows(values, cut), out=head.tiled(rows, cut))
                head.tiled(logs, cut).copy_(log)
            _moved(rows[:n], head.back, outs[number])
            _moved(logs[:n, 0], head.back, lses[number])
        if rounds > 1:
            torch.logsumexp(lses, 0, out=lse[at])
            share = lses.sub_(lse[at].nan_to_num(neginf=0.0)).exp_().unsqueeze(-1)
            torch.sum(outs.mul_(share), 0, out=out[at])
        alone = lse[at] == -math.inf
        out[at][alone] = _own(v[at], chunk[at][0])[alone].to(work.dtype)
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    chunk: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    rounds, n = order.shape[2:]
    head = Head(q, causal, size)
    work = head.work
    d_q, d_k, d_v = (in_huge_pages(torch.empty(x.shape, dtype=x.dtype, device=x.device)) for x in (q, k, v))
    owed = (d_out * out).sum(-1, keepdim=True)
    for at in itertools.product(range(q.shape[0]), range(q.shape[1])):
        alone = lse[at] == -math.inf
        logs = lse[at].masked_fill(alone, 0.0).unsqueeze(-1)
        totals = [
            x[at] if x.dtype == work.dtype else work.take(name, n, x.shape[3])
            for name, x in (("tq", d_q), ("tk", d_k), ("tv", d_v))
        ]
        for number in range(rounds):
            head.enter(order[at][number], chunk[at][: number + 1])
            queries, keys, values = head.sorted(q[at], "q"), head.padded(k[at], "k"), head.padded(v[at], "v")
            asks, debts, rows_logs = (
                head.sorted(x, name) for name, x in (("do", d_out[at]), ("owed", owed[at]), ("logs", logs))
            )
            rows, slots_k, slots_v = (
                work.take("dq", *queries.shape),
                work.take("dk", *keys.shape).zero_(),
                work.take("dv", *values.shape).zero_(),
            )
            for cut in head.cuts():
                weights, log = head.weigh(queries, keys, scale, cut)
                weights.mul_(log.sub_(head.tiled(rows_logs, cut)).exp_())
                d_o, spread = head.tiled(asks, cut), work.take("spread_v", *head.windows(values, cut).shape)
                head.spread(torch.bmm(weights.mT, d_o, out=spread), slots_v, cut)
                d_scores = torch.baddbmm(
                    head.tiled(debts, cut),
                    d_o,
                    head.windows(values, cut).mT,
                    beta=-1,
                    out=work.take("ds", *weights.shape),
                )
                d_scores.mul_(weights)
                torch.bmm(d_scores, head.windows(keys, cut), out=head.tiled(rows, cut))
                spread = work.take("spread_k", *head.windows(keys, cut).shape)
                head.spread(torch.bmm(d_scores.mT, head.tiled(queries, cut), out=spread), slots_k, cut)
            first = slice(head.before, head.before + n)
            parts = rows.mul_(scale)[:n], slots_k.mul_(scale)[first], slots_v[first]
            head.give_back(parts, totals, anew=number == 0)
        totals[2][alone] += _own(d_out[at], chunk[at][0])[alone].to(work.dtype)
        for total, x in zip(totals, (d_q, d_k, d_v), strict=True):
            if x.dtype != work.dtype:
                x[at] = total
    return d_q, d_k, d_v


def _moved(x: Tensor, order: Tensor, room: Tensor) -> None:
    """Write the rows of x in an order into the room, in its dtype."""
    if x.dtype == room.dtype:
        torch.index_select(x, 0, order, out=room)
    else:
        room.copy_(x.index_select(0, order))


def _own(x: Tensor, chunk: Tensor) -> Tensor:
    """What rows that meet nothing take: their own, padding nothing."""
    return x.masked_fill((chunk < 0).unsqueeze(-1), 0.0)
