"""PaTH: between a key and a query stands the product of reflections that the tokens between set, in place of a rotation.

Paper: Yang et al. 2025, 2505.16381.
Equation: s_ij = k_j . H_(j+1) H_(j+2) ... H_i q_i / sqrt(d), with H_t = I - beta_t w_t w_t^T, w_t = u_t / |u_t|,
    u = silu(conv(B A x)) over the last `taps` tokens and beta_t = 2 sigmoid(c . x_t + e), both for each key head.
Cost: n m (3 d + 64) / 2 multiply-adds a head for all products, by blocks of 64 keys.
Deviation: the norm of u is bounded by 1e-3 from below, so that a token without content reflects nothing.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.ops.left import newest
from anyformer.position.base import Position
from anyformer.side import Side
from anyformer.site import Site
from anyformer.typing import Size

_BLOCK = 64


class Path(Position):
    """Lets each token turn, mirror or wipe a direction of every key before it, as seen by every query from it on.

    Causal only: what stands between a key and a later query is ordered. Positions themselves are not read.

    Args:
        rank: width of the projection that the directions pass through.
        taps: tokens that the convolution of the directions reads, the token itself included.
    """

    name = "path"
    summary = "products of reflections that the tokens between key and query set"
    paper = "Yang et al. 2025, 2505.16381"
    family = ("since the survey", "contextual")
    reads_tokens = True

    def __init__(self, site: Site, *, rank: Size = 32, taps: Size = 3) -> None:
        super().__init__(site)
        self.forms = ((Form.ROW,),)
        self.causal_only = True
        width = site.kv_heads * site.head_dim
        self.down = nn.Linear(site.dim, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.taps = nn.Parameter(torch.empty(width, taps))
        nn.init.uniform_(self.taps, -(taps**-0.5), taps**-0.5)
        self.strength = nn.Linear(site.dim, site.kv_heads)

    def prepare(
        self, x: Float[Tensor, "b m c"], tokens: Side, state: dict[str, Tensor] | None
    ) -> Float[Tensor, "b m w"]:
        """The directions `w` and, behind them, the strengths `beta` of each key head, in at least float32."""
        wide = torch.promote_types(torch.float32, x.dtype)
        mixed = F.silu(self._convolved(self.up(self.down(x)).to(wide), tokens, state))
        u = mixed.unflatten(-1, (self.site.kv_heads, -1))
        w = u / u.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        beta = 2 * torch.sigmoid(self.strength(x).to(wide))
        return torch.cat([w.flatten(2), beta], dim=-1)

    def row(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        logits: Float[Tensor, "b h n m"],
        facts: Float[Tensor, "b m w"] | None,
    ) -> Float[Tensor, "b h n m"]:
        """The logits with `k_j . H_(j+1) ... H_i q_i` in place of `k_j . q_i`."""
        assert facts is not None, "bound without what it prepared"
        heads, width = self.site.kv_heads, self.site.head_dim
        w = facts[..., : heads * width].unflatten(-1, (heads, width)).transpose(1, 2)
        beta = facts[..., heads * width :].mT
        w, beta = (each.to(logits.dtype).repeat_interleave(self.site.groups, dim=1) for each in (w, beta))
        q, k = q.to(logits.dtype), k.to(logits.dtype)
        return logits + self.scale(width) * (products(q, k, w, beta) - q @ k.mT)

    def _convolved(self, u: Tensor, tokens: Side, state: dict[str, Tensor] | None) -> Tensor:
        """`sum_s taps[s] u_(t - s)` over tokens of t's document; the last ones stay in the state."""
        before, documents = self.taps.shape[1] - 1, tokens.documents
        state = {} if state is None else state
        tail = state.get("tail", u.new_zeros(len(u), before, u.shape[2]))
        u = torch.cat([tail, u], dim=1)
        if documents is not None:
            earlier = state.get("documents", documents.new_zeros(len(u), before))
            documents = torch.cat([earlier, documents], dim=1)
        length = u.shape[1] - before
        out = torch.zeros_like(u[:, before:])
        for back in range(before + 1):
            part = u[:, before - back : before - back + length]
            if documents is not None:
                same = documents[:, before - back : before - back + length] == documents[:, before:]
                part = part.masked_fill(~same[:, :, None], 0.0)
            out = out + part * self.taps[:, back].to(u.dtype)
        if before:
            state["tail"] = newest(u, before, tokens.keep)
            if documents is not None:
                state["documents"] = newest(documents, before, tokens.keep)
        return out


def products(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], w: Float[Tensor, "b h m d"], beta: Float[Tensor, "b h m"]
) -> Float[Tensor, "b h n m"]:
    """`k_j . H_(j+1) ... H_i q_i` with H_t = I - beta_t w_t w_t^T, for keys up to the query's own; the last query stands at the
    last key, and what is returned for later keys counts for nothing.

    Within a block, products of reflections are a triangular solve (the UT transform); between blocks, queries pass the blocks one
    by one on their way back.
    """
    n, m, size = q.shape[2], k.shape[2], min(_BLOCK, max(q.shape[2], k.shape[2], 1))
    rows, columns = -(-n // size) * size, -(-max(n, m) // size) * size
    q, k, w = (F.pad(x, (0, 0, length - x.shape[2], 0)) for x, length in ((q, rows), (k, columns), (w, columns)))
    beta = F.pad(beta, (columns - m, 0))
    q, k, w, wb = (x.unflatten(2, (-1, size)) for x in (q, k, w, w * beta[..., None]))
    blocks, first = k.shape[2], k.shape[2] - q.shape[2]  # the block of keys beside the first block of queries
    eye = torch.eye(size, dtype=q.dtype, device=q.device)
    solved = torch.linalg.solve_triangular((wb @ w.mT).tril(-1) + eye, eye, upper=False, unitriangular=True)
    onto_keys, onto = solved @ (wb @ k.mT).tril(-1), solved @ wb
    reached = (q @ w[:, :, first:].mT).tril()
    parts = [(q @ k[:, :, first:].mT).tril() - reached @ onto_keys[:, :, first:]]
    q = q - reached @ onto[:, :, first:]
    k = k - onto_keys.mT @ w
    passed = w.mT @ onto
    for back in range(1, blocks):
        skipped = max(back - first, 0)  # blocks of queries with fewer blocks before them
        start = first + skipped - back
        count = q.shape[2] - skipped
        moving, still = q[:, :, skipped:], q[:, :, :skipped]
        met = moving @ k[:, :, start : start + count].mT
        parts.append(F.pad(met, (0, 0, 0, 0, skipped, 0)))
        q = torch.cat([still, moving - moving @ passed[:, :, start : start + count]], dim=2)
    return _laid_out(torch.stack(parts), first, blocks)[:, :, rows - n :, columns - m :]


def _laid_out(parts: Float[Tensor, "o b h i s t"], first: int, blocks: int) -> Float[Tensor, "b h n m"]:
    """Blocks by distance `o` to the query's own, as one matrix; what lies after the query is 0."""
    row = torch.arange(parts.shape[3], device=parts.device)[:, None]
    distance = row + first - torch.arange(blocks, device=parts.device)
    chosen = parts[distance.clamp(min=0), :, :, row]  # [i j b h s t]
    chosen = chosen.masked_fill((distance < 0)[:, :, None, None, None, None], 0.0)
    return chosen.permute(2, 3, 0, 4, 1, 5).flatten(4, 5).flatten(2, 3)
