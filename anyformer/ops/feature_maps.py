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
    if (
        torch.compiler.is_compiling()
    ):  # torch 2.13 predicts the strides of elu's gradient wrongly, and a graph relies on them
        return torch.where(wide > 0, wide + 1.0, wide.clamp(max=0.0).exp()).to(x.dtype)
    return F.elu(wide).add_(1.0).to(x.dtype)


def elu1_slope(y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The derivative of elu1 where its value is y: 1 above zero, where y > 1, and exp(x) = y below."""
    return y.clamp_max(1.0)
