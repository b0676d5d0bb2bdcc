"""A user's own script: attentions that fail in every way there is, compared like any other.

Run as `python faulty_attentions.py compare --attention ...`; the trials' processes import it, too.
"""

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

from anyformer.attention.base import Attention
from anyformer.cli.main import main
from anyformer.forms import Form
from anyformer.registry import register
from anyformer.site import Site


def crash(v: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return v


def killed(v: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return v


def leaves(v: torch.Tensor) -> torch.Tensor:
    print("I am going")
    os._exit(7)


def raises(v: torch.Tensor) -> torch.Tensor:
    raise KeyError("a fault of the method\nwith a second line")


def not_finite(v: torch.Tensor) -> torch.Tensor:
    return v / 0


def greedy(v: torch.Tensor) -> torch.Tensor:
    """More than the limit, by what the limit of the system counts."""
    return v + torch.zeros(2 << 30, dtype=torch.uint8).sum()


def sly(v: torch.Tensor) -> torch.Tensor:
    """More than the limit, by memory that the limit of the system does not count."""
    shared = mmap.mmap(-1, 1536 << 20)
    for start in range(0, len(shared), mmap.PAGESIZE):
        shared[start] = 1
    time.sleep(60)
    return v


def short_sighted(v: torch.Tensor) -> torch.Tensor:
    """Fails beyond 24 tokens only."""
    if v.shape[2] > 24:
        raise IndexError(f"cannot read {v.shape[2]} tokens")
    return v


def interrupts(v: torch.Tensor) -> torch.Tensor:
    """Ctrl-C reaches every process of the terminal; here the driver is one of them."""
    if v.requires_grad:
        os.kill(int(os.environ["DRIVER"]), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    return v


def _attention(act: Callable[[torch.Tensor], torch.Tensor]) -> type[Attention]:
    class Faulty(Attention):
        """Values, unless something happens."""

        name = act.__name__
        summary, paper, family = "it fails", "none", ("faulty",)
        forms = (Form.EMBED,)

        def __init__(self, site: Site) -> None:
            super().__init__(site)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: object) -> torch.Tensor:
            return act(v)

    Faulty.__qualname__ = Faulty.__name__ = act.__name__
    return register(Faulty)


for fault in (crash, killed, leaves, raises, not_finite, greedy, sly, short_sighted, interrupts):
    _attention(fault)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore interrupts
    os.environ["DRIVER"] = str(os.getpid())
    main(sys.argv[1:])
