"""What a linear layer can read out of frozen features, fitted by least squares and scored on other images."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy.stats import rankdata
from torch import Tensor

_SIZE = 3  # pixels that the read-out covers
_ROWS = 16  # images at once
_RIDGE = 1e-4  # on standardised features, a pixel


@dataclass(frozen=True)
class Score:
    """How near the read-out of one map is to it.

    Args:
        spearman: rank correlation over the pixels of an image, the mean over images; 0 where a read-out is constant.
        mae: mean absolute error, of a map from 0 to 1.
    """

    spearman: float
    mae: float


class Readout:
    """One convolution of 3 x 3 without padding from features to maps, fitted in closed form.

    Args:
        features: of the training images.
        targets: the maps, the same for all images; cut to the middle where features have lost their border.
    """

    def __init__(self, features: Float[Tensor, "b c y x"], targets: Float[Tensor, "t s s"]) -> None:
        self.mean = features.mean(dim=(0, 2, 3), keepdim=True)
        self.spread = features.std(dim=(0, 2, 3), keepdim=True).clamp(min=1e-6)
        self.targets = middle(targets, features.shape[-1] - _SIZE + 1)
        wanted = self.targets.flatten(1).T.double()  # [p t]
        width = features.shape[1] * _SIZE**2 + 1
        gram = _RIDGE * len(features) * len(wanted) * torch.eye(width, dtype=torch.float64)
        gram[-1, -1] = 0.0
        moment = torch.zeros(width, wanted.shape[1], dtype=torch.float64)
        for part in features.split(_ROWS):
            patches = self._patches(part)
            gram += torch.einsum("bpw,bpv->wv", patches, patches)
            moment += torch.einsum("bpw,pt->wt", patches, wanted)
        self.weight = torch.linalg.solve(gram, moment)

    def __call__(self, features: Float[Tensor, "b c y x"]) -> Float[Tensor, "b t v u"]:
        """The maps read out of each image."""
        found = torch.cat([self._patches(part) @ self.weight for part in features.split(_ROWS)])
        return found.mT.unflatten(2, self.targets.shape[1:]).float()

    def scores(self, features: Float[Tensor, "b c y x"]) -> list[Score]:
        """One for each map, over images that it was not fitted to."""
        found = self(features)
        return [_score(found[:, index], target) for index, target in enumerate(self.targets)]

    def _patches(self, features: Tensor) -> Tensor:
        """What the read-out sees of each pixel, and a one, `[b p w]`."""
        patches = F.unfold((features - self.mean) / self.spread, _SIZE).mT.double()
        return torch.cat([patches, torch.ones_like(patches[:, :, :1])], dim=2)


def middle(x: Float[Tensor, "... y x"], size: int) -> Float[Tensor, "... v u"]:
    """The `size` x `size` pixels in the middle."""
    cut = (x.shape[-1] - size) // 2
    return x[..., cut : cut + size, cut : cut + size]


def _score(found: Tensor, target: Tensor) -> Score:
    ranks = [_rank_correlation(image.flatten(), target.flatten()) for image in found]
    return Score(spearman=sum(ranks) / len(ranks), mae=float((found - target).abs().mean()))


def _rank_correlation(found: Tensor, target: Tensor) -> float:
    """Spearman's, ties sharing their mean rank; 0 where nothing varies."""
    if float(found.std()) < 1e-6:
        return 0.0
    return float(np.corrcoef(rankdata(found), rankdata(target))[0, 1])
