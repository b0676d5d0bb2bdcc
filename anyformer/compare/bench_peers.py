"""Other packages' attentions, timed in the same rounds as ours, with the sizes that ours have by default.

Those that project by themselves are timed as whole layers; where attention alone is asked for, their bare linear maps are timed in
the same rounds and subtracted. Memory is that of the whole layer then.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from anyformer.compare import bench_peer_attends as attends
from anyformer.compare import bench_peer_layers as layers
from anyformer.compare.bench_calls import Calls, Inputs
from anyformer.compare.bench_record import Setting
from anyformer.errors import SpecError
from anyformer.registry import unknown

_BOTH, _EITHER = frozenset({False}), frozenset({False, True})


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One method of another package.

    Args:
        make: its calls at a length.
        package: what is imported.  extra: what installs it.
        what: the method in a few words.
        form: "attend", a function of q, k and v; "core", a layer whose linear maps can be subtracted; "layer", timed whole only.
        causal: the directions it can do.
        multiple: its lengths are multiples of this many tokens.
        least: and at least this many.
    """

    make: "Callable[[Setting, int, Inputs], Calls]"
    package: str
    extra: str
    what: str
    form: Literal["attend", "core", "layer"]
    causal: frozenset[bool] = _EITHER
    multiple: int = 1
    least: int = 1


def peer(name: str) -> Peer:
    """The peer of this name, if its package is there.

    Raises:
        SpecError: there is none of this name, or its package is missing.
    """
    if name not in PEERS:
        raise SpecError(unknown("peer", name, sorted(PEERS)))
    found = PEERS[name]
    if importlib.util.find_spec(found.package) is None:
        raise SpecError(
            f"--peer {name} needs the package {found.package.replace('_', '-')}, which is not installed: "
            f"pip install 'anyformer[{found.extra}]'"
        )
    return found


def peer_refusal(name: str, setting: Setting) -> str:
    """Why a peer is not timed at all; "" where it is."""
    found = peer(name)
    if found.form == "layer" and setting.what == "attention":
        return f"{name} is a whole layer, without queries and keys to hand over; time it with --what layer"
    if setting.causal in found.causal:
        return ""
    form, option = ("causal", "--causal") if setting.causal else ("bidirectional", "--both")
    return f"{name} has no {form} form; leave {option} out"


def peer_calls(name: str, setting: Setting, length: int, inputs: Inputs) -> Calls:
    """The calls of a peer at a length.

    Raises:
        SpecError: a length it cannot do.
    """
    found = peer(name)
    if length % found.multiple or length < found.least:
        least = f" of at least {found.least}" if found.least > 1 else ""
        raise SpecError(f"{name} takes lengths{least} that are multiples of {found.multiple} tokens")
    return found.make(setting, length, inputs)


PEERS = {
    "hf-longformer": Peer(
        make=layers.longformer,
        package="transformers",
        extra="hf",
        what="window of 256 on each side, the first token global",
        form="core",
        causal=_BOTH,
        multiple=2 * layers.WINDOW,
    ),
    "hf-bigbird": Peer(
        make=layers.bigbird,
        package="transformers",
        extra="hf",
        what="blocks of 64, 3 at random",
        form="core",
        causal=_BOTH,
        multiple=layers.BLOCK,
        least=(6 + 2 * layers.RANDOM) * layers.BLOCK,  # shorter inputs it hands to dense attention
    ),
    "hf-reformer": Peer(
        make=layers.reformer,
        package="transformers",
        extra="hf",
        what="4 rounds of hashing, chunks of 64",
        form="core",
        multiple=2 * layers.BUCKET,
    ),
    "hf-fnet": Peer(
        make=layers.fnet,
        package="transformers",
        extra="hf",
        what="the Fourier transform",
        form="layer",
        causal=_BOTH,
    ),
    "hf-mla": Peer(
        make=layers.mla,
        package="transformers",
        extra="hf",
        what="DeepSeek-V3's attention, a latent of four heads' width",
        form="layer",
    ),
    "lucidrains-local": Peer(
        make=attends.local,
        package="local_attention",
        extra="oracles",
        what="blocks of 256 and their neighbours",
        form="attend",
        multiple=layers.WINDOW,
    ),
    "lucidrains-linear": Peer(
        make=attends.linear,
        package="linear_attention_transformer",
        extra="oracles",
        what="linear attention; causal in buckets of 64",
        form="attend",
        multiple=64,
    ),
    "lucidrains-performer": Peer(
        make=attends.performer,
        package="performer_pytorch",
        extra="oracles",
        what="256 random features",
        form="attend",
    ),
    "lucidrains-reformer": Peer(
        make=attends.reformer,
        package="reformer_pytorch",
        extra="oracles",
        what="4 rounds of hashing, chunks of 64",
        form="attend",
        multiple=2 * layers.BUCKET,
    ),
    "lucidrains-routing": Peer(
        make=attends.routing,
        package="routing_transformer",
        extra="oracles",
        what="as many clusters as the root of the length; causal ones leak",
        form="attend",
    ),
    "lucidrains-sinkhorn": Peer(
        make=attends.sinkhorn,
        package="sinkhorn_transformer",
        extra="oracles",
        what="blocks of 32, balanced 8 times, its values made of keys; causal: the best earlier block",
        form="attend",
        multiple=attends.SORTED,
        least=2 * attends.SORTED,
    ),
    "lucidrains-topk": Peer(
        make=attends.topk,
        package="x_transformers",
        extra="oracles",
        what="the 8 largest logits of each row",
        form="attend",
    ),
    "lucidrains-linformer": Peer(
        make=layers.linformer,
        package="linformer",
        extra="oracles",
        what="64 mixtures of keys and of values",
        form="core",
        causal=_BOTH,
    ),
    "lucidrains-nystrom": Peer(
        make=layers.nystrom,
        package="nystrom_attention",
        extra="oracles",
        what="64 landmarks, six steps towards the inverse, a convolution of 33",
        form="core",
        causal=_BOTH,
        multiple=layers.LANDMARKS,
    ),
    "lucidrains-gmlp": Peer(
        make=layers.gmlp,
        package="g_mlp_pytorch",
        extra="oracles",
        what="a gate three times as wide as the layer",
        form="layer",
    ),
    "lucidrains-amlp": Peer(
        make=layers.amlp,
        package="g_mlp_pytorch",
        extra="oracles",
        what="the same with one head of 64",
        form="layer",
    ),
}
