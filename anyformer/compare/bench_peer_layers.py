"""Other packages' layers, which project by themselves; where attention alone is asked for, their bare maps are subtracted."""

import torch
from torch import Tensor

from anyformer.compare.bench_calls import Calls, Inputs, first_token
from anyformer.compare.bench_cores import whole, without_maps
from anyformer.compare.bench_record import Setting

WINDOW = 256  # tokens on each side
BLOCK, RANDOM = 64, 3
BUCKET, ROUNDS = 64, 4
LANDMARKS = 64
_RANK = 64
_GLOBAL = 10_000.0  # what Longformer's mask holds at a global token


def longformer(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=setting.dim,
        num_attention_heads=setting.heads,
        attention_window=[2 * WINDOW],
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, 0).to(inputs.dtype)
    x = inputs.hidden(length)
    mask = first_token(setting, length).to(inputs.dtype) * _GLOBAL

    def attend() -> Tensor:
        return layer(
            x,
            attention_mask=mask,
            is_index_masked=mask < 0,
            is_index_global_attn=mask > 0,
            is_global_attn=True,
        )[0]

    maps = (layer.query, layer.key, layer.value, layer.key_global, layer.value_global)
    return without_maps(setting, inputs, attend, layer, maps, x, first=layer.query_global)


def bigbird(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=setting.dim,
        num_attention_heads=setting.heads,
        num_random_blocks=RANDOM,
        block_size=BLOCK,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
    )
    layer = BigBirdBlockSparseAttention(config, seed=setting.seed).to(inputs.dtype)
    x = inputs.hidden(length)
    real = torch.ones(setting.batch, length, dtype=inputs.dtype)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(real, BLOCK)

    def attend() -> Tensor:
        return layer(x, band, rows, columns, blocked, blocked)[0]

    return without_maps(setting, inputs, attend, layer, (layer.query, layer.key, layer.value), x)


def reformer(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from transformers.models.reformer.configuration_reformer import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        num_hashes=ROUNDS,
        lsh_attn_chunk_length=BUCKET,
        num_buckets=2 * length // BUCKET,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        hidden_size=setting.dim,
        num_attention_heads=setting.heads,
        attention_head_size=setting.head_dim,
        is_decoder=setting.causal,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
        hash_seed=setting.seed,
    )
    layer = LSHSelfAttention(config, 0).to(inputs.dtype)
    x = inputs.hidden(length)
    maps = (layer.query_key, layer.value)
    return without_maps(setting, inputs, lambda: layer(x).hidden_states, layer, maps, x)


def linformer(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from linformer import LinformerSelfAttention

    layer = LinformerSelfAttention(setting.dim, length, k=_RANK, heads=setting.heads, dim_head=setting.head_dim).to(
        inputs.dtype
    )
    x = inputs.hidden(length)
    maps = (layer.to_q, layer.to_k, layer.to_v, layer.to_out)
    return without_maps(setting, inputs, lambda: layer(x), layer, maps, x, complete=True)


def nystrom(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from nystrom_attention import NystromAttention

    layer = NystromAttention(setting.dim, dim_head=setting.head_dim, heads=setting.heads, num_landmarks=LANDMARKS).to(
        inputs.dtype
    )
    x = inputs.hidden(length)
    maps = (layer.to_qkv, layer.to_out)
    return without_maps(setting, inputs, lambda: layer(x), layer, maps, x, complete=True)


def fnet(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from transformers import FNetConfig
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    layer = FNetBasicFourierTransform(FNetConfig(hidden_size=setting.dim))
    x = inputs.hidden(length)
    return whole(inputs, layer, lambda: layer(x)[0], x)


def gmlp(setting: Setting, length: int, inputs: Inputs, attention: int | None = None) -> Calls:
    from g_mlp_pytorch import gMLPBlock

    layer = gMLPBlock(
        dim=setting.dim, dim_ff=6 * setting.dim, seq_len=length, causal=setting.causal, attn_dim=attention
    )
    x = inputs.hidden(length)
    return whole(inputs, layer, lambda: layer(x), x)


def amlp(setting: Setting, length: int, inputs: Inputs) -> Calls:
    return gmlp(setting, length, inputs, attention=64)


def mla(setting: Setting, length: int, inputs: Inputs) -> Calls:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    width = setting.head_dim
    config = DeepseekV3Config(
        hidden_size=setting.dim,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.heads,
        q_lora_rank=None,
        kv_lora_rank=4 * width,
        qk_rope_head_dim=width,
        qk_nope_head_dim=width,
        v_head_dim=width,
        attention_bias=False,
    )
    config._attn_implementation = "sdpa"
    layer = DeepseekV3Attention(config, 0)
    layer.is_causal = setting.causal
    x = inputs.hidden(length)
    turns = tuple(
        part.expand(1, length, width) for part in torch.tensor([1.0, 0.0], dtype=inputs.dtype)[:, None, None, None]
    )
    return whole(inputs, layer, lambda: layer(x, position_embeddings=turns, attention_mask=None)[0], x)
