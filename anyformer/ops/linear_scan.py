"""What running states of every kind share: which tokens they read, in which order, and one direction or both.

A *pass* reads queries and token tensors [b g m ...] in order and carries one state: `run(q, parts, state, reverse)` gives the
outputs and the last state, with q [b h m f]. A query reads the tokens up to its own, or with `reverse` those after it.
"""

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anyformer.ops import scan_tiles

Parts = tuple[Tensor, ...]
Run = Callable[[Tensor, Parts, Tensor, bool], tuple[Tensor, Tensor]]


def one_way(run: Run, q: Tensor, parts: Parts, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of queries that see keys up to their own place, the last query the last key, and the state after the last key."""
    n, m = q.shape[2], parts[0].shape[2]
    out, state = run(_shifted(q, m - n), parts, state, False)
    return _shifted(out, n - m), state


def both_ways(run: Run, q: Tensor, parts: Parts, state: Tensor) -> Tensor:
    """The outputs of a pass forward and one backward added; a query reads its own token once, in the forward one.

    Raises:
        ValueError: more queries than keys.
    """
    n, m = q.shape[2], parts[0].shape[2]
    if n > m:
        raise ValueError(
            f"a running state read in both directions needs a place for every query: expected at most {m} queries, got {n}"
        )
    q = _shifted(q, m - n)
    return (run(q, parts, state, False)[0] + run(q, parts, state, True)[0])[:, :, m - n :]


def full_precision(x: Tensor) -> contextlib.AbstractContextManager:
    """Autocast would take the sums in half precision."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def in_segments(run: Run, q: Tensor, parts: Parts, state: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """A pass out of ordinary operators, over one segment after the other that are computed again in the backward, so that memory
    grows with inputs and outputs only.

    `parts` ends with the fade, what a token does to the state of those before it, 0 for nothing. With `reverse` all is turned
    round first, and `run` told that a query does not read its own token.
    """
    if not reverse:
        return _segments(run, q, parts, state, False)
    *others, fade = (part.flip(2) for part in parts)
    # what fades the tokens after token t for those up to t - 1 stands at t, which the backward pass has behind it
    fade = torch.cat([torch.zeros_like(fade[:, :, :1]), fade[:, :, :-1]], dim=2)
    out, state = _segments(run, q.flip(2), (*others, fade), state, True)
    return out.flip(2), state


def tiles(x: Tensor, chunk: int) -> Tensor:
    """[b g n w] -> [b g t chunk w], zeros after the last token."""
    count = -(-x.shape[2] // chunk)
    short = count * chunk - x.shape[2]
    return (F.pad(x, (0, 0, 0, short)) if short else x).unflatten(2, (count, chunk))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Zeros before the first token where `by` is above 0, the first tokens left out where it is below."""
    return x[:, :, -by:] if by < 0 else F.pad(x, (0, 0, by, 0)) if by else x


def _segments(run: Run, q: Tensor, parts: Parts, state: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    m = q.shape[2]
    if m <= scan_tiles.TOKENS:
        return run(q, parts, state, reverse)
    outs = []
    for start in range(0, m, scan_tiles.TOKENS):
        here = slice(start, start + scan_tiles.TOKENS)
        inputs = (q[:, :, here], tuple(part[:, :, here] for part in parts), state, reverse)
        out, state = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        outs.append(out)
    return torch.cat(outs, dim=2), state
