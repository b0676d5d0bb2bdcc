"""Whole models against the same weights in independent implementations."""

import torch
from tiny_models import VOCAB, ids, mask, model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def parity(ours, theirs, weights, transposed=()):
    """Equal logits and gradients, for `weights` from our names to theirs."""
    ours_by_name, theirs_by_name = dict(ours.named_parameters()), dict(theirs.named_parameters())
    with torch.no_grad():
        for name, their_name in weights.items():
            weight = ours_by_name[name]
            theirs_by_name[their_name].copy_(weight.T if their_name.endswith(transposed) else weight)
    tokens, keep = ids(3, 9), mask([9, 5, 2], 9, "left")
    positions = (keep.cumsum(dim=1) - 1).clamp(min=0)
    expected = theirs(tokens, attention_mask=keep.long(), position_ids=positions, use_cache=False).logits
    logits = ours(tokens, attention_mask=keep)
    torch.testing.assert_close(
        logits[keep], expected[keep], rtol=0, atol=2e-6 * float(expected[keep].detach().abs().max())
    )
    for each in (logits, expected):
        each[keep].square().mean().backward()
    for name, their_name in weights.items():
        ours_grad, theirs_grad = ours_by_name[name].grad, theirs_by_name[their_name].grad
        theirs_grad = theirs_grad.T if their_name.endswith(transposed) else theirs_grad
        torch.testing.assert_close(ours_grad, theirs_grad, rtol=0, atol=2e-5 * float(theirs_grad.abs().max()))


def test_a_llama_has_the_same_logits_and_gradients():
    ours = model(position="rope", norm="rms", feed_forward="swiglu")
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=ours.blocks[0].feed_forward.up.out_features,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).eval()
    weights = {
        "embedding.tokens.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.out.weight": "lm_head.weight",
    }
    for layer in (0, 1):
        mine, other = f"blocks.{layer}", f"model.layers.{layer}"
        weights |= {f"{mine}.mixer.{name}.weight": f"{other}.self_attn.{name}_proj.weight" for name in "qkvo"}
        weights |= {
            f"{mine}.feed_forward.{name}.weight": f"{other}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
        }
        weights[f"{mine}.mixer_norm.weight"] = f"{other}.input_layernorm.weight"
        weights[f"{mine}.feed_forward_norm.weight"] = f"{other}.post_attention_layernorm.weight"
    assert set(weights) == set(dict(ours.named_parameters()))
    parity(ours, theirs, weights)


def test_a_gpt2_has_the_same_logits_and_gradients():
    ours = model(position="learned", norm="layer", feed_forward="gelu", kv_heads=None)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=32,
            activation_function="gelu",
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).eval()
    weights = {
        "embedding.tokens.weight": "transformer.wte.weight",
        "embedding.encodings.0.table.weight": "transformer.wpe.weight",
        "head.out.weight": "lm_head.weight",
    }
    norms = {"norm": "transformer.ln_f"}
    for layer in (0, 1):
        mine, other = f"blocks.{layer}", f"transformer.h.{layer}"
        weights[f"{mine}.mixer.o.weight"] = f"{other}.attn.c_proj.weight"
        weights[f"{mine}.feed_forward.up.weight"] = f"{other}.mlp.c_fc.weight"
        weights[f"{mine}.feed_forward.down.weight"] = f"{other}.mlp.c_proj.weight"
        norms |= {f"{mine}.mixer_norm": f"{other}.ln_1", f"{mine}.feed_forward_norm": f"{other}.ln_2"}
    weights |= {f"{mine}.{part}": f"{other}.{part}" for mine, other in norms.items() for part in ("weight", "bias")}
    with torch.no_grad():
        for layer in (0, 1):  # theirs has one projection for all three, and biases that ours lacks
            mixer, fused = ours.blocks[layer].mixer, theirs.transformer.h[layer].attn.c_attn
            fused.weight.copy_(torch.cat([mixer.q.weight, mixer.k.weight, mixer.v.weight]).T)
        for name, weight in theirs.named_parameters():
            if name.endswith(("c_attn.bias", "c_proj.bias", "c_fc.bias")):
                weight.zero_()
    parity(ours, theirs, weights, transposed=("c_proj.weight", "c_fc.weight"))
