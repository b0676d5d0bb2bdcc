"""Useful floating point operations: what a method's equation asks for, whatever an implementation spends on it."""

import torch

from anyformer.compare.bench_record import Contender, Measure, Setting
from anyformer.model.build import build_attention, build_mixer


def useful(contender: Contender, setting: Setting, length: int) -> dict[Measure, float] | None:
    """Operations of each kind of call, a multiply-add as two; None for peers and for methods that do not say what they cost.

    A backward takes two products for each of the forward, and once more those that make weights of pairs, which nobody keeps.
    """
    if contender.role == "peer":
        return None
    site, attention = setting.site(length), "softmax" if contender.role == "dense" else contender.attention
    with torch.device("meta"):
        layer = build_mixer(attention, "none", site) if setting.what == "layer" else build_attention(attention, site)
    cost = layer.cost()
    if cost is None:
        return None
    forward, again = (2.0 * setting.batch * each(length) for each in (cost.multiply_adds, cost.repeated))
    return {"forward": forward, "forward_backward": 3 * forward + again}
