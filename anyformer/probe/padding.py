"""Zero padding tells a convolutional network where a pixel is: an experiment.

Paper: Islam, Jia and Bruce 2020, 2001.08248. Networks learn to tell shapes apart by the largest value of each channel in the image,
    so that nothing asks them for a position. Their features are frozen, and one linear layer without padding is fitted to maps of
    positions that are the same for every image. What it reads on other images was in the features.
Deviations: small networks and generated shapes in place of ImageNet; shapes go on at the opposite border, so that their content
    is free of positions; the read-out is fitted in closed form; kernels that are symmetric under turns, and an attention layer fed
    with zero tokens, are added.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.ops.draws import key
from anyformer.probe.data import MAPS, images, maps
from anyformer.probe.nets import Attending, Convolutions, Kernel, Padding, Pixels
from anyformer.probe.readout import Readout, Score

PADDINGS: tuple[Padding, ...] = ("zeros", "reflect", "circular", "none")
KERNELS: tuple[Kernel, ...] = ("free", "symmetric")
_BATCH, _RATE = 32, 5e-3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of the experiment.

    Args:
        size: width and height of an image.  channels: of every layer.  depths: numbers of convolutions.
        steps: of training the networks.  fitted, held: images that read-outs are fitted to, and scored on.
        seeds: repetitions with other images and weights.

    Raises:
        SpecError: an image that a network without padding would use up.
    """

    size: int = 20
    channels: int = 12
    depths: tuple[int, ...] = (2, 4, 6)
    steps: int = 150
    fitted: int = 96
    held: int = 48
    seeds: int = 1

    def __post_init__(self) -> None:
        least = 2 * max(self.depths) + 4
        if self.size < least or self.size % 2:
            raise SpecError(
                f"probe: expected an even image size of at least {least} for a depth of {max(self.depths)}, since each "
                f"convolution without padding takes 2 pixels, got {self.size}"
            )

    def nets(self) -> list["Net"]:
        """What is compared."""
        convolutions = [
            Net(kernel, padding, depth) for kernel in KERNELS for padding in PADDINGS for depth in self.depths
        ]
        return [Net("pixels", "none", 0), *convolutions, Net("attention", "none", 1), Net("attention", "zeros", 1)]


@dataclass(frozen=True)
class Net:
    """One network: "free" or "symmetric" convolutions, or the controls "attention" and "pixels"."""

    kind: str
    padding: Padding
    depth: int

    def __str__(self) -> str:
        match self.kind:
            case "pixels":
                return "the images themselves"
            case "attention":
                return f"attention, {'a border of zero tokens' if self.padding == 'zeros' else 'no border'}"
        return f"{self.kind} kernels, {self.padding if self.padding != 'none' else 'no'} padding, depth {self.depth}"


@dataclass(frozen=True)
class Reading:
    """What was read out of one network.

    Args:
        accuracy: of telling held-out shapes apart; None: it was not trained.
        pixels: width of the maps that were read.
        scores: one a map.
        drawn: the maps read from the first held-out image, `[t y x]`.
    """

    net: Net
    seed: int
    accuracy: float | None
    pixels: int
    scores: dict[str, Score]
    seconds: float
    drawn: Tensor

    def line(self) -> dict[str, Any]:
        """As one line of JSON."""
        return {
            "experiment": "cnn-padding",
            "kernel": self.net.kind,
            "padding": self.net.padding,
            "depth": self.net.depth,
            "seed": self.seed,
            "accuracy": self.accuracy,
            "pixels": self.pixels,
            "maps": {
                name: {part: round(value, 5) for part, value in asdict(score).items()}
                for name, score in self.scores.items()
            },
            "seconds": round(self.seconds, 2),
            "torch": torch.__version__,
        }


def readings(setting: Setting, progress: Callable[[str], None]) -> Iterator[Reading]:
    """Train every network of the experiment and read its features, one after the other.

    Args:
        progress: called with what begins.
    """
    for seed in range(setting.seeds):
        parts = [images(count, setting.size, seed, split) for split, count in _splits(setting)]
        for net in setting.nets():
            progress(f"seed {seed}: {net}")
            yield read(net, setting, seed, parts)


def read(net: Net, setting: Setting, seed: int, parts: Sequence[tuple[Tensor, Tensor]]) -> Reading:
    """Train one network and read its features.

    Args:
        parts: images and labels to train on, to fit the read-out to, and to score on.
    """
    started = perf_counter()
    (train, labels), (fitted, _), (held, truth) = parts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "probe", net))
        built = _build(net, setting)
        if net.kind != "pixels":
            _train(built, train, labels, setting.steps)
    with torch.no_grad():
        accuracy = None if net.kind == "pixels" else float((built(held).argmax(dim=1) == truth).float().mean())
        features, others = built.features(fitted), built.features(held)
        readout = Readout(features, maps(features.shape[-1]) if net.kind == "attention" else maps(setting.size))
        scores, drawn = readout.scores(others), readout(others[:1])[0]
    seconds = perf_counter() - started
    return Reading(net, seed, accuracy, drawn.shape[-1], dict(zip(MAPS, scores, strict=True)), seconds, drawn)


def _splits(setting: Setting) -> list[tuple[str, int]]:
    return [("train", 1024), ("fitted", setting.fitted), ("held", setting.held)]


def _build(net: Net, setting: Setting) -> Convolutions | Attending | Pixels:
    match net.kind:
        case "pixels":
            return Pixels()
        case "attention":
            return Attending(setting.size, setting.channels, net.padding)
    return Convolutions(net.depth, setting.channels, net.padding, "symmetric" if net.kind == "symmetric" else "free")


def _train(net: nn.Module, inputs: Tensor, labels: Tensor, steps: int) -> None:
    """Adam on the cross entropy of the shapes; the rate falls to zero."""
    optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        chosen = torch.randint(len(inputs), (_BATCH,))
        loss = F.cross_entropy(net(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
