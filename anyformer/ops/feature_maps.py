"""Maps phi from queries and keys to the features whose product is the weight of a pair in linear attention."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def elu1(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """elu(x) + 1: x + 1 above zero and exp(x) below, so never negative and of slope at most 1.

    In the wider of float32 and x's dtype: half precision near -1 would leave exp(x) two digits or none.

    Paper: Katharopoulos et al. 2020, 2006.16236, section 3.2.1.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if torch.compiler.is_compiling():
        # torch 2.13 predicts the strides of elu's gradient wrongly, and a graph relies on them
        return torch.where(wide > 0, wide + 1.0, wide.clamp(max=0.0).exp()).to(x.dtype)
    return F.elu(wide).add_(1.0).to(x.dtype)


def positive_queries(x: Float[Tensor, "b h n d"], rows: Float[Tensor, "h f d"]) -> Float[Tensor, "b h n f"]:
    """The features exp(w . x + |w|^2 / 2) of queries for the random rows w, divided by the largest of each query.

    With `positive_keys` their product is f exp(x . y) in the mean over standard normal rows, up to a factor of the query, which
    no normalised sum sees. The two factors exp(|w|^2 / 2) cancel in each product; with them no key feature is above 1, whatever
    the other keys are, and no bound has to be taken over the sequence.

    Paper: Choromanski et al. 2020, 2009.14794, lemma 1.
    """
    logs = x @ rows.mT + _half_square(rows)[:, None]
    largest = logs.detach().amax(dim=-1, keepdim=True)
    return torch.exp(logs - largest)


def positive_keys(x: Float[Tensor, "b k m d"], rows: Float[Tensor, "k f d"]) -> Float[Tensor, "b k m f"]:
    """The features exp(w . x - |x|^2 / 2 - |w|^2 / 2) = exp(-|w - x|^2 / 2) of keys; see `positive_queries`."""
    return torch.exp(x @ rows.mT - _half_square(x)[..., None] - _half_square(rows)[:, None])


def taylor2(x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape f"]:
    """Features whose product is 1 + u + u^2 / 2 for u = x . y: 1, the channels, and their products, each pair once.

    f = 1 + d + d (d + 1) / 2. Paper: Arora et al. 2024, 2402.18668, section 4.1; there pairs come twice.
    """
    width = x.shape[-1]
    first, second = torch.triu_indices(width, width, device=x.device)
    share = torch.ones(len(first), dtype=x.dtype, device=x.device).masked_fill(first == second, 0.5**0.5)
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., first] * x[..., second] * share], dim=-1)


def waves(x: Float[Tensor, "b k m d"], rows: Float[Tensor, "k r d"]) -> Float[Tensor, "b k m f"]:
    """sin(w . x) and cos(w . x) for the random rows w, divided by sqrt(r): products are means of cos(w . (x - y)), about
    exp(-|x - y|^2 / 2) for standard normal rows.

    Paper: Rahimi and Recht 2007.
    """
    angles = x @ rows.mT
    return torch.cat([angles.sin(), angles.cos()], dim=-1) * rows.shape[-2] ** -0.5


def _half_square(x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape"]:
    return x.square().sum(-1) / 2
