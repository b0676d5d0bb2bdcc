"""Queries, keys and values whose weights are products of features, as the ways of summing them take them."""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.ops.linear_tiles import Rule, bounded, mapped


class Products(NamedTuple):
    """Weights (q_i . k_j) exp(t_ij), with t the terms of a position encoding, over the same with the features `counted`.

    Args:
        q, k: features [b h n f] and [b k m f], still to be mapped where the rule says so.  v: values [b k m v].
        raw: queries [b h n d] and keys [b k m d] as the encoding's terms read them.
        counted: features of the denominator, [b h n e] and [b k m e]; None: q and k.
        log_decay: the log of the factor on everything before a key, [h] or [b h m]; None: 1.
        rule: how features are mapped and what is divided by.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    raw: tuple[Tensor, Tensor]
    counted: tuple[Tensor, Tensor] | None
    log_decay: Tensor | None
    rule: Rule

    def ready(self) -> "Products":
        """The features mapped, in the wider of float32 and theirs."""
        wide = torch.promote_types(torch.float32, torch.promote_types(self.q.dtype, self.v.dtype))
        q, k = (mapped(x.to(wide), self.rule.features) for x in (self.q, self.k))
        counted = None if self.counted is None else (self.counted[0].to(wide), self.counted[1].to(wide))
        return self._replace(q=q, k=k, counted=counted, rule=self.rule._replace(features="given"))

    def fading(self, more: Tensor) -> "Products":
        """With one more factor on everything before a key."""
        if self.log_decay is None:
            return self._replace(log_decay=more)
        both = (x[None, :, None] if x.dim() == 1 else x for x in (self.log_decay, more))
        total = sum(both, start=more.new_zeros(()))
        assert isinstance(total, Tensor)
        return self._replace(log_decay=total.expand(-1, -1, self.k.shape[2]))

    def by_token(self) -> Tensor | None:
        """The log of the factor of each key, [b|1 h m]."""
        fade = self.log_decay
        return fade if fade is None or fade.dim() == 3 else fade[None, :, None].expand(-1, -1, self.k.shape[2])


def divided(num: Tensor, den: Tensor | None, rule: Rule, like: Tensor) -> Tensor:
    """num [b h n v] over den [b h n], in the dtype of `like`."""
    return (num if den is None else num / bounded(den, rule).unsqueeze(-1)).to(like.dtype)
