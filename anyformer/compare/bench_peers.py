"""Other packages' attentions, timed in the same rounds as ours.

Those that project by themselves are timed as whole layers; where attention alone is asked for, their bare linear maps are timed in
the same rounds and subtracted. Memory is that of the whole layer then.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anyformer.compare.bench_calls import Calls, Inputs, calls_of
from anyformer.compare.bench_record import Setting
from anyformer.errors import SpecError
from anyformer.registry import unknown

_WINDOW = 256  # tokens on each side
_BLOCK, _RANDOM = 64, 3
_BUCKET = 64  # lucidrains' default of causal linear attention
_GLOBAL = 10_000.0  # what Longformer's mask holds at a global token

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """One method of another package.

    Args:
        make: its calls at a length.
        package: what is imported.  extra: what installs it.
        what: the method in a few words.
        causal: the directions it can do.
        multiple: its lengths are multiples of this many tokens.
        least: and at least this many.
    """

    make: "Callable[[Setting, int, Inputs], Calls]"
    package: str
    extra: str
    what: str
    causal: frozenset[bool]
    multiple: int
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
    if setting.causal in peer(name).causal:
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


def _longformer(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=setting.dim,
        num_attention_heads=setting.heads,
        attention_window=[2 * _WINDOW],
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, 0).to(inputs.dtype)
    x = inputs.hidden(length)
    mask = torch.zeros(setting.batch, length, dtype=inputs.dtype)
    mask[:, 0] = _GLOBAL

    def attend() -> Tensor:
        return layer(
            x,
            attention_mask=mask,
            is_index_masked=mask < 0,
            is_index_global_attn=mask > 0,
            is_global_attn=True,
        )[0]

    maps = (layer.query, layer.key, layer.value, layer.key_global, layer.value_global)
    return _without_maps(setting, inputs, attend, layer, maps, x, first=layer.query_global)


def _bigbird(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=setting.dim,
        num_attention_heads=setting.heads,
        num_random_blocks=_RANDOM,
        block_size=_BLOCK,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
    )
    layer = BigBirdBlockSparseAttention(config, seed=setting.seed).to(inputs.dtype)
    x = inputs.hidden(length)
    real = torch.ones(setting.batch, length, dtype=inputs.dtype)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(real, _BLOCK)

    def attend() -> Tensor:
        return layer(x, band, rows, columns, blocked, blocked)[0]

    return _without_maps(setting, inputs, attend, layer, (layer.query, layer.key, layer.value), x)


def _local(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from local_attention import LocalAttention

    attention = LocalAttention(window_size=_WINDOW, causal=setting.causal, use_rotary_pos_emb=False)
    return _projected(setting, length, inputs, attention)


def _linear(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from linear_attention_transformer import linear_attention_transformer as package

    return _projected(setting, length, inputs, package.causal_linear_attn if setting.causal else package.linear_attn)


def _without_maps(
    setting: Setting,
    inputs: Inputs,
    attend: Callable[[], Tensor],
    layer: nn.Module,
    maps: Sequence[nn.Module],
    x: Tensor,
    first: nn.Module | None = None,
) -> Calls:
    """A layer that projects by itself: with an output map as a whole layer, without any map as attention.

    Args:
        maps: its linear maps of all tokens.  first: that of the first token only.
    """
    if setting.what == "layer":
        output = nn.Linear(setting.dim, setting.dim).to(inputs.dtype)
        leaves = (x, *layer.parameters(), *output.parameters())
        return calls_of(lambda: (output(attend()),), leaves, inputs, (layer, output))

    def bare() -> tuple[Tensor, ...]:
        mapped = tuple(each(x) for each in maps)
        return mapped if first is None else (*mapped, first(x[:, :1]))

    weights = [weight for each in (*maps, *([] if first is None else [first])) for weight in each.parameters()]
    less = calls_of(bare, (x, *weights), inputs)
    return calls_of(lambda: (attend(),), (x, *layer.parameters()), inputs, (layer,), less)


def _projected(setting: Setting, length: int, inputs: Inputs, attend: Attend) -> Calls:
    """A function of q, k and v: as it is, or between four linear maps as a layer."""
    if setting.what == "attention":
        q, k, v = inputs.heads(length)
        return calls_of(lambda: (attend(q, k, v),), (q, k, v), inputs)
    x = inputs.hidden(length)
    maps = nn.ModuleList(nn.Linear(setting.dim, setting.dim) for _ in range(4)).to(inputs.dtype)

    def layer() -> tuple[Tensor]:
        q, k, v = (each(x).unflatten(-1, (setting.heads, -1)).transpose(1, 2) for each in maps[:3])
        return (maps[3](attend(q, k, v).transpose(1, 2).flatten(2)),)

    return calls_of(layer, (x, *maps.parameters()), inputs)


_EITHER = frozenset({False, True})
PEERS = {
    "hf-longformer": Peer(
        make=_longformer,
        package="transformers",
        extra="hf",
        what="window of 256 on each side, the first token global",
        causal=frozenset({False}),
        multiple=2 * _WINDOW,
    ),
    "hf-bigbird": Peer(
        make=_bigbird,
        package="transformers",
        extra="hf",
        what="blocks of 64, 3 at random",
        causal=frozenset({False}),
        multiple=_BLOCK,
        least=(6 + 2 * _RANDOM) * _BLOCK,  # shorter inputs it hands to dense attention
    ),
    "lucidrains-local": Peer(
        make=_local,
        package="local_attention",
        extra="oracles",
        what="blocks of 256 and their neighbours",
        causal=_EITHER,
        multiple=_WINDOW,
    ),
    "lucidrains-linear": Peer(
        make=_linear,
        package="linear_attention_transformer",
        extra="oracles",
        what="linear attention; causal in buckets of 64",
        causal=_EITHER,
        multiple=_BUCKET,
    ),
}
