"""Other packages' functions of queries, keys and values."""

import contextlib
import io
import math
import warnings

from torch import Tensor

from anyformer.compare.bench_calls import Calls, Inputs
from anyformer.compare.bench_cores import projected
from anyformer.compare.bench_peer_layers import BUCKET, ROUNDS, WINDOW
from anyformer.compare.bench_record import Setting

SORTED = 32  # tokens of a block of sinkhorn attention
_BALANCED = 8  # times
_FEATURES = 256
_KEPT = 8


def local(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from local_attention import LocalAttention

    attention = LocalAttention(window_size=WINDOW, causal=setting.causal, use_rotary_pos_emb=False)
    return projected(setting, length, inputs, attention)


def linear(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from linear_attention_transformer import linear_attention_transformer as package

    return projected(setting, length, inputs, package.causal_linear_attn if setting.causal else package.linear_attn)


def reformer(setting: Setting, length: int, inputs: Inputs) -> Calls:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        from reformer_pytorch import LSHAttention

    attention = LSHAttention(bucket_size=BUCKET, n_hashes=ROUNDS, causal=setting.causal).to(inputs.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, q.shape[:2])

    return projected(setting, length, inputs, attend, modules=(attention,), shared=True)


def routing(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from routing_transformer.routing_transformer import KmeansAttention

    clusters = round(math.sqrt(length))
    attention = KmeansAttention(
        clusters,
        -(-length // clusters),
        setting.heads,
        setting.head_dim,
        causal=setting.causal,
        shared_qk=setting.causal,
    ).to(inputs.dtype)
    return projected(
        setting,
        length,
        inputs,
        lambda q, k, v: attention(q, k, v)[0],
        modules=(attention,),
        shared=setting.causal,
    )


def sinkhorn(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from sinkhorn_transformer.sinkhorn_transformer import SinkhornAttention, SinkhornCausalAttention

    sizes = (SORTED, setting.dim, setting.head_dim, setting.heads, length)
    attention = (
        SinkhornCausalAttention(*sizes, n_top_buckets=1)
        if setting.causal
        else SinkhornAttention(*sizes, non_permutative=False, sinkhorn_iter=_BALANCED)
    ).to(inputs.dtype)
    return projected(setting, length, inputs, attention, modules=(attention,))


def performer(setting: Setting, length: int, inputs: Inputs) -> Calls:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of its dependencies; and it prints that it has no kernel for a GPU
        from performer_pytorch import FastAttention

        attention = FastAttention(setting.head_dim, _FEATURES, causal=setting.causal).to(inputs.dtype)
    return projected(setting, length, inputs, attention, modules=(attention,))


def topk(setting: Setting, length: int, inputs: Inputs) -> Calls:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        from x_transformers.attend import Attend

        attention = Attend(causal=setting.causal, sparse_topk=_KEPT)
    return projected(setting, length, inputs, lambda q, k, v: attention(q, k, v)[0], modules=(attention,))
