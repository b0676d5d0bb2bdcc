"""Small networks that tell shapes apart, and what they have computed of each pixel on the way."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.model.build import MultiHead
from anyformer.probe.data import SHAPES
from anyformer.probe.readout import middle

Padding = Literal["zeros", "reflect", "circular", "none"]
Kernel = Literal["free", "symmetric"]
_MODES = {"zeros": "constant", "reflect": "reflect", "circular": "circular"}
_ORBITS = torch.tensor([[2, 1, 2], [1, 0, 1], [2, 1, 2]])  # pixels of a kernel that a turn by 90 degrees exchanges
_STAGES = 4  # layers, evenly spaced, that features are taken from


class Convolutions(nn.Module):
    """`depth` convolutions of 3 x 3, each followed by a ReLU; a linear layer on the largest value of each channel
    in the image names the shape, which no pixel's place enters.

    Args:
        channels: of every layer.
        padding: what lies beyond the border: zeros, the image mirrored, its other side; "none": outputs lose their border.
        kernel: "free", or "symmetric" under turns by 90 degrees and reflections, with three numbers in place of nine.
    """

    def __init__(self, depth: int, channels: int, padding: Padding, kernel: Kernel) -> None:
        super().__init__()
        self.padding: Padding = padding
        self.kernel: Kernel = kernel
        numbers = 3 if kernel == "symmetric" else 9
        self.weights = nn.ParameterList(
            torch.randn(channels, 1 if layer == 0 else channels, numbers)
            * (2 / (9 * (1 if layer == 0 else channels))) ** 0.5
            for layer in range(depth)
        )
        self.biases = nn.ParameterList(torch.zeros(channels) for _ in range(depth))
        self.head = nn.Linear(channels, len(SHAPES))

    def forward(self, images: Float[Tensor, "b 1 y x"]) -> Float[Tensor, "b s"]:
        """Logits of the shapes."""
        return self.head(self.layers(images)[-1].amax(dim=(2, 3)))

    def layers(self, images: Float[Tensor, "b 1 y x"]) -> list[Float[Tensor, "b c v u"]]:
        """The output of every layer."""
        found, x = [], images
        for weight, bias in zip(self.weights, self.biases, strict=True):
            if self.padding != "none":
                x = F.pad(x, (1, 1, 1, 1), mode=_MODES[self.padding])
            taps = weight[..., _ORBITS] if self.kernel == "symmetric" else weight.unflatten(-1, (3, 3))
            x = F.relu(F.conv2d(x, taps, bias))
            found.append(x)
        return found

    def features(self, images: Float[Tensor, "b 1 y x"]) -> Float[Tensor, "b w v u"]:
        """The outputs of some layers on top of each other, on the pixels that the last of them has."""
        layers = self.layers(images)
        chosen = sorted({len(layers) * stage // _STAGES - 1 for stage in range(1, _STAGES + 1)} - {-1})
        return torch.cat([middle(layers[each], layers[-1].shape[-1]) for each in chosen], dim=1)


class Attending(nn.Module):
    """The control: one attention layer without positions over patches of 2 x 2 pixels, with or without a border of tokens that
    are zero."""

    def __init__(self, size: int, channels: int, padding: Padding) -> None:
        super().__init__()
        self.border = 1 if padding == "zeros" else 0
        tokens = (size // 2 + 2 * self.border) ** 2
        self.embed = nn.Conv2d(1, channels, 2, stride=2)
        self.attention = MultiHead(channels, 4, position="none", max_length=tokens)
        self.head = nn.Linear(channels, len(SHAPES))

    def forward(self, images: Float[Tensor, "b 1 y x"]) -> Float[Tensor, "b s"]:
        """Logits of the shapes."""
        return self.head(self.features(images).amax(dim=(2, 3)))

    def features(self, images: Float[Tensor, "b 1 y x"]) -> Float[Tensor, "b c v u"]:
        """Each patch with what it has attended to."""
        x = self.embed(images)
        wide = F.pad(x, (self.border,) * 4)
        mixed = self.attention(wide.flatten(2).mT).mT.unflatten(2, wide.shape[2:])
        return F.relu(x + middle(mixed, x.shape[-1]))


class Pixels(nn.Module):
    """The baseline: the images themselves."""

    def features(self, images: Float[Tensor, "b 1 y x"]) -> Float[Tensor, "b 1 y x"]:
        return images
