"""Nystrom attention: the softmax matrix is rebuilt from a few landmark rows and columns.

Paper: Xiong et al. 2021, 2102.03902.
Equation: out = F1 (Z (F3 V)) + D(V), where q' and k' are the means of `landmarks` equal segments of the queries and of the keys,
    F1 = softmax(scale * Q k'^T) [n l],   A = softmax(scale * q' k'^T) [l l],   F3 = softmax(scale * q' K^T) [l m],
D is one filter of `kernel` places a key head, and Z is near the pseudo-inverse of A: Z_0 = A^T / (|A|_1 |A|_inf) and, `steps`
times, Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4. The token at place p of t real ones is in segment floor(p l / t).
Deviations: the norms of Z_0 are those of each matrix, where the authors' code takes the largest in the batch; fewer tokens than
landmarks leave landmarks empty, which take no part.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops import softmax as ops
from anyformer.side import Side
from anyformer.site import Site
from anyformer.typing import Count, Size

Means = tuple[Tensor, Tensor | None]


class Nystrom(Attention):
    """Each query reads the landmarks, and these read the keys; what the two together distort, a small inverse corrects.

    Segments follow the order of tokens, so tokens know their place even without an encoding. There are no weights to drop, so
    dropout acts on the output. A sample without real keys gives 0.

    Args:
        landmarks: number of segments whose means stand for queries and keys; with as many as tokens it is full attention,
            up to what `steps` leave of the inverse.
        steps: iterations towards the inverse.
        kernel: places that the filter over the values covers, odd, the token itself in the middle; 0: no filter, and then the
            keys may come from another sequence.

    Raises:
        IncompatibleError: the site is causal.
        SpecError: an even kernel.
    """

    name = "nystrom"
    summary = "the softmax matrix is rebuilt from the means of a few segments of queries and keys"
    paper = "Xiong et al. 2021, 2102.03902"
    family = ("fewer keys", "landmarks")
    forms = (Form.ROTATE, Form.TURN, Form.AUGMENT, Form.EMBED)
    absolute = frozenset({Form.ROTATE, Form.TURN, Form.AUGMENT})
    refusal = (
        "it compares landmarks, each the mean of many tokens, so no score belongs to one pair of query and key and there is "
        "nothing to bias; use an encoding added at the embedding, such as sinusoidal or learned; rope runs too, but mixed"
    )
    causal = False
    causal_refusal = (
        "its landmarks are means over all places, the future too; use linear, local(128) or softmax for causal models"
    )
    documents = False
    ordered = True
    weights = False

    def __init__(self, site: Site, *, landmarks: Size = 64, steps: Size = 6, kernel: Count = 33) -> None:
        super().__init__(site)
        if kernel and kernel % 2 == 0:
            raise SpecError(
                f"nystrom: expected an odd kernel, with the token itself in the middle, got {kernel}; use kernel={kernel + 1}, "
                "or kernel=0 for no filter"
            )
        self.landmarks = landmarks
        self.steps = steps
        self.cross = not kernel
        self.filter = nn.Parameter(torch.empty(site.kv_heads, kernel)) if kernel else None
        if self.filter is not None:
            nn.init.uniform_(self.filter, -(kernel**-0.5), kernel**-0.5)

    def cost(self) -> Cost:
        """Both reads, the matrix of the landmarks and its product with what they read, the inverse, the filter."""
        text = "2 h (n + m) landmarks d + 2 h landmarks^2 d + 4 h steps landmarks^3"
        sizes = {"landmarks": self.landmarks, "steps": self.steps}
        if self.filter is not None:
            text, sizes = text + " + k m kernel d", sizes | {"kernel": self.filter.shape[-1]}
        return Cost(self.site, text, memory="h landmarks (n + m + landmarks)", sizes=sizes)

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        keep, encoding = context.keys.keep, context.encoding
        if keep is not None:
            k, v = (torch.where(keep[:, None, :, None], part, torch.zeros_like(part)) for part in (k, v))
        v = v if encoding.turn is None else encoding.turn(v)
        out = rebuilt(
            q,
            k,
            v,
            means(q, context.queries, self.landmarks),
            means(k, context.keys, self.landmarks),
            keep=keep,
            scale=q.shape[-1] ** -0.5 if encoding.scale is None else encoding.scale,
            steps=self.steps,
        )
        if self.filter is not None:
            out = out + ops.repeat_heads(filtered(v, self.filter), q.shape[1])
        return out if encoding.turn_back is None else encoding.turn_back(out)


def rebuilt(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    q_means: Means,
    k_means: Means,
    *,
    keep: Bool[Tensor, "b m"] | None,
    scale: float,
    steps: int,
) -> Float[Tensor, "b h n v"]:
    """F1 (Z (F3 V)) of the module's equation.

    Args:
        q_means, k_means: the landmarks `[b h l d]` and `[b k l d]`, each with those that are not empty `[b l]` (None: all).
        keep: which keys are real; None: all.
    """
    (q_marks, q_filled), (k_marks, k_filled) = q_means, k_means
    allowed = None if keep is None else keep[:, None, None, :]
    read = ops.fused(q_marks, k, v, allowed=allowed, scale=scale)
    wide = torch.promote_types(torch.float32, q.dtype)
    each_head = ops.repeat_heads(k_marks, q.shape[1])
    logits = q_marks.to(wide) @ each_head.to(wide).mT * scale
    real = None
    if q_filled is not None or k_filled is not None:
        rows, columns = (
            torch.ones_like(logits[:, 0, 0], dtype=torch.bool) if part is None else part
            for part in (q_filled, k_filled)
        )
        real = rows[:, None, :, None] & columns[:, None, None, :]
        logits = logits.masked_fill(~columns[:, None, None, :], torch.finfo(wide).min)
    matrix = torch.softmax(logits, dim=-1)
    matrix = matrix if real is None else matrix.masked_fill(~real, 0.0)
    corrected = (pseudo_inverse(matrix, steps) @ read.to(wide)).to(v.dtype)
    filled = None if k_filled is None else k_filled[:, None, None, :]
    return ops.fused(q, each_head, corrected, allowed=filled, scale=scale)


def means(x: Float[Tensor, "b h t d"], tokens: Side, landmarks: int) -> Means:
    """The mean of each segment `[b h l d]`, and which segments `[b l]` hold a real token (None: all do).

    Real tokens stand first. A segment without one has mean 0.
    """
    t = x.shape[2]
    if tokens.keep is None and not torch.compiler.is_compiling() and t and t % landmarks == 0:
        return x.unflatten(2, (landmarks, -1)).mean(dim=3), None
    keep = x.new_ones(x.shape[0], t, dtype=torch.bool) if tokens.keep is None else tokens.keep
    rank = keep.cumsum(dim=1) - 1
    segment = torch.where(keep, rank * landmarks // keep.sum(dim=1, keepdim=True).clamp(min=1), landmarks)
    wide = torch.promote_types(torch.float32, x.dtype)
    counts = torch.zeros(x.shape[0], landmarks + 1, dtype=wide, device=x.device)
    counts = counts.scatter_add(1, segment, torch.ones_like(segment, dtype=wide))[:, :landmarks]
    sums = torch.zeros(*x.shape[:2], landmarks + 1, x.shape[3], dtype=wide, device=x.device)
    sums = sums.scatter_add(2, segment[:, None, :, None].expand(x.shape), x.to(wide))[:, :, :landmarks]
    return (sums / counts.clamp(min=1)[:, None, :, None]).to(x.dtype), counts > 0


def pseudo_inverse(matrix: Float[Tensor, "b h l l"], steps: int) -> Float[Tensor, "b h l l"]:
    """Towards the pseudo-inverse of each matrix with entries of at least 0; see the module's equation."""
    norm = matrix.sum(dim=-1).amax(dim=-1) * matrix.sum(dim=-2).amax(dim=-1)
    guess = matrix.mT / torch.where(norm > 0, norm, 1.0)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(steps):
        product = matrix @ guess
        guess = 0.25 * guess @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product)))
    return guess


def filtered(v: Float[Tensor, "b k m v"], taps: Float[Tensor, "k width"]) -> Float[Tensor, "b k m v"]:
    """Each key head's values under its own filter over places, 0 beyond the sequence."""
    if not v.shape[2]:  # a convolution refuses it
        return v
    return F.conv2d(v, taps[:, None, :, None], padding=(taps.shape[1] // 2, 0), groups=len(taps))
