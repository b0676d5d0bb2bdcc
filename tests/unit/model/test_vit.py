"""Images as sequences of patches: against transformers' ViT, with every encoding on a grid and other attentions, and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import ViTConfig, ViTModel

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.vit import Vit

torch.set_num_threads(1)

TINY = {"image": 12, "patch": (3, 2), "channels": 2, "classes": 5, "dim": 16, "depth": 2, "heads": 2}
ON_A_GRID = (
    "sinusoidal_2d",
    "vit_learned(rows=4, columns=6)",
    "vit_learned(rows=3, columns=3, to_rows=4, to_columns=6)",
    "swin_bias(rows=4, columns=6)",
    "swinv2_log_cpb(rows=4, columns=6)",
    "swinv2_log_cpb(rows=4, columns=6, cosine=True)",
    "rope_2d",
    "rope_2d(kind=mixed)",
    "irpe",
    "irpe(kind=bias)",
    "decomposed_rel(rows=4, columns=6)",
    "peg(grid=True)",
)
IN_A_ROW = ("none", "learned", "sinusoidal", "rope", "alibi", "t5", "shaw")


def vit(**changes: object) -> Vit:
    """A built model in eval mode, every weight drawn anew with a standard deviation of 0.3."""
    built = Vit(af.VitConfig(**{**TINY, **changes})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.3
            weight.copy_(noise + 1 if "norm" in name and name.endswith("weight") else noise)
    return built


def pictures(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def peers(resampled: bool) -> tuple[Vit, ViTModel]:
    """One of transformers' models with random weights and no biases within blocks, and ours with the same weights."""
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=12, patch_size=3,
        num_channels=2, qkv_bias=False, layer_norm_eps=1e-5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = ViTModel(config, add_pooling_layer=False).eval()
    generator = torch.Generator().manual_seed(2)
    state = theirs.state_dict()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            inside = name.startswith("layers") and name.endswith("bias") and "layernorm" not in name
            weight.copy_(torch.zeros_like(weight) if inside else torch.randn(weight.shape, generator=generator) * 0.3)
    position = "vit_learned(rows=4, to_rows=6, to_columns=5)" if resampled else "vit_learned(rows=4)"
    ours = vit(patch=3, heads=4, pool="class", position=position, image=(18, 15) if resampled else 12)
    places = state["embeddings.position_embeddings"][0]
    mine = {
        "embedding.patches.weight": state["embeddings.patch_embeddings.projection.weight"].flatten(1),
        "embedding.patches.bias": state["embeddings.patch_embeddings.projection.bias"],
        "embedding.placeless": state["embeddings.cls_token"][0] + places[:1],
        "embedding.encodings.0.table": places[1:].view(4, 4, 16),
        "norm.weight": state["layernorm.weight"],
        "norm.bias": state["layernorm.bias"],
    }
    for name in state:
        for layer in range(2):
            for their_name, our_name in BLOCK.items():
                if (
                    name.startswith(f"layers.{layer}.{their_name}")
                    and f"blocks.{layer}.{our_name}" in ours.state_dict()
                ):
                    mine[f"blocks.{layer}.{our_name}"] = state[name]
    missing, unexpected = ours.load_state_dict(mine, strict=False)
    assert sorted(missing) == ["head.out.bias", "head.out.weight"]
    assert not unexpected
    return ours, theirs


BLOCK = {
    "layernorm_before.weight": "mixer_norm.weight",
    "layernorm_before.bias": "mixer_norm.bias",
    "layernorm_after.weight": "feed_forward_norm.weight",
    "layernorm_after.bias": "feed_forward_norm.bias",
    "attention.q_proj.weight": "mixer.q.weight",
    "attention.k_proj.weight": "mixer.k.weight",
    "attention.v_proj.weight": "mixer.v.weight",
    "attention.o_proj.weight": "mixer.o.weight",
    "mlp.fc1.weight": "feed_forward.up.weight",
    "mlp.fc2.weight": "feed_forward.down.weight",
}


@pytest.mark.parametrize("resampled", [False, True])
def test_it_is_the_vision_transformer_of_transformers(resampled):
    ours, theirs = peers(resampled)
    images = pictures(2, 2, 18, 15) if resampled else pictures(2, 2, 12, 12)
    mine, other = images.clone().requires_grad_(), images.clone().requires_grad_()
    out = ours.encode(mine)
    expected = theirs(other, interpolate_pos_encoding=resampled).last_hidden_state
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6 * float(expected.detach().abs().max()))
    probe = pictures(*out.shape, seed=3)
    (out * probe).sum().backward()
    (expected * probe).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=4e-6 * float(other.grad.abs().max()))
    pairs = [
        (ours.embedding.patches.weight.grad, theirs.embeddings.patch_embeddings.projection.weight.grad.flatten(1)),
        (ours.embedding.encodings[0].table.grad, theirs.embeddings.position_embeddings.grad[0, 1:].view(4, 4, 16)),
        (ours.embedding.placeless.grad, theirs.embeddings.cls_token.grad[0]),
    ]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=0, atol=4e-6 * float(right.abs().max()))


def test_patches_are_cut_and_pooled_as_written():
    built, images = vit(position="none", depth=1, registers=1), pictures(2, 2, 12, 12)
    tokens = torch.stack(
        [images[:, :, 3 * y : 3 * y + 3, 2 * x : 2 * x + 2].flatten(1) for y in range(4) for x in range(6)], dim=1
    )
    tokens = torch.cat([built.embedding.placeless.expand(2, 1, 16), built.embedding.patches(tokens)], dim=1)
    expected = built.norm(built.blocks[0](tokens))
    torch.testing.assert_close(built.encode(images), expected)
    torch.testing.assert_close(built(images), built.head.out(expected[:, 1:].mean(1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", ON_A_GRID)
@pytest.mark.parametrize("pool", ["mean", "class"])
def test_every_encoding_on_a_grid_tells_places(position, pool):
    """Class and register tokens included; what has no encoding sees a bag of patches."""
    built, images = vit(position=position, pool=pool, registers=1), pictures(2, 2, 12, 12)
    logits = built(images)
    assert logits.shape == (2, 5)
    assert not torch.allclose(logits, built(images.roll((3, 4), dims=(2, 3))), rtol=0, atol=1e-4)
    logits.sum().backward()
    assert all(each.grad is not None for name, each in built.named_parameters() if pool == "mean" or "out" not in name)


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_without_an_encoding_it_sees_a_bag_of_patches(pool):
    built, images = vit(position="none", pool=pool).double(), pictures(2, 2, 12, 12).double()
    torch.testing.assert_close(built(images), built(images.roll((3, 4), dims=(2, 3))), rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", IN_A_ROW)
@pytest.mark.parametrize("pool", ["mean", "class"])
def test_encodings_of_a_sequence_read_the_number_of_a_patch(position, pool):
    built, images = vit(position=position, pool=pool), pictures(2, 2, 12, 12)
    assert built(images).shape == (2, 5)
    twin = vit(position=position, pool="mean").double()
    plain = twin(images.double())
    given = twin._positions(4, 6, images.device)
    assert given.tolist() == [list(range(24))]
    assert torch.isfinite(plain).all()


def test_a_bias_of_offsets_leaves_a_token_without_a_place_alone():
    """What a class token reads in the first block does not depend on where things are."""
    built = vit(position="swin_bias(rows=4, columns=6)", depth=1, pool="class").double()
    images = pictures(1, 2, 12, 12).double()
    torch.testing.assert_close(built(images), built(images.roll((3, 2), dims=(2, 3))), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "attention", ["linear", "linformer(rank=4)", "nystrom(landmarks=4)", "fnet", "gmlp", "mlp_mixer", "local(4)"]
)
@pytest.mark.parametrize("pool", ["mean", "class"])
def test_other_attentions_run_and_train(attention, pool):
    built, images = vit(attention=attention, position="sinusoidal_2d", pool=pool), pictures(3, 2, 12, 12)
    built(images).square().sum().backward()
    grad = built.embedding.patches.weight.grad
    assert grad.isfinite().all()
    assert grad.abs().max() > 0
    torch.testing.assert_close(built(images)[1:], built(images[1:]), rtol=0, atol=1e-5)


def test_attention_and_position_may_differ_by_block():
    built = vit(attention=("softmax", "linear"), position=("sinusoidal_2d", "rope_2d"))
    assert len(built.embedding.encodings) == 1
    assert built(pictures(1, 2, 12, 12)).shape == (1, 5)


@pytest.mark.parametrize("position", ["sinusoidal_2d", "rope_2d(kind=mixed)", "irpe", "none", "alibi"])
def test_images_of_other_sizes_run_where_the_encoding_allows_it(position):
    built = vit(position=position)
    assert built(pictures(1, 2, 24, 6)).shape == (1, 5)
    assert built(pictures(1, 2, 3, 2)).shape == (1, 5)


def test_a_learned_grid_moves_to_another_size():
    small = vit(image=(6, 4), position="vit_learned(rows=2)")
    large = Vit(
        replace(small.config, image=(12, 12), max_length=None, position="vit_learned(rows=2, to_rows=4, to_columns=6)")
    ).eval()
    large.load_state_dict(small.state_dict())
    assert large(pictures(1, 2, 12, 12)).shape == (1, 5)
    with pytest.raises(SpecError, match=r"row 3 and column 5 were read, the grid has 2 x 2"):
        small(pictures(1, 2, 12, 12))


@pytest.mark.parametrize(
    "changes", [{}, {"pool": "class", "registers": 2, "position": ("rope_2d", "swin_bias(rows=4)")}]
)
def test_a_model_is_exact_after_reload(tmp_path, changes):
    built, images = vit(**{"position": "sinusoidal_2d", **changes}), pictures(2, 2, 12, 12)
    built.save_pretrained(tmp_path)
    loaded = Vit.from_pretrained(tmp_path)
    assert loaded.config == built.config
    assert not loaded.training
    assert torch.equal(loaded(images), built(images))
    assert json.loads((tmp_path / "config.json").read_text())["format"] == "anyformer-vit"
    with pytest.raises(SpecError, match='expected JSON with "format": "anyformer-model"'):
        af.Transformer.from_pretrained(tmp_path)


def test_checkpointing_and_dropout():
    images, found = pictures(2, 2, 12, 12), []
    for checkpointing in (False, True):
        built = Vit(af.VitConfig(**TINY, position="rope_2d", checkpointing=checkpointing)).double()
        loss = built(images.double()).square().mean()
        loss.backward()
        found.append([loss, *(each.grad for each in built.parameters())])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=1e-12)
    noisy = Vit(af.VitConfig(**TINY, position="rope_2d", dropout=0.5))
    assert not torch.equal(noisy(images), noisy(images))
    assert torch.equal(noisy.eval()(images), noisy(images))


def test_equal_seeds_start_equal_whatever_the_encoding():
    one, other = (Vit(af.VitConfig(**TINY, position=each)).state_dict() for each in ("rope_2d", "sinusoidal_2d"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    another = Vit(af.VitConfig(**TINY, position="rope_2d", seed=1)).state_dict()
    assert not torch.equal(one["embedding.patches.weight"], another["embedding.patches.weight"])
    state = torch.get_rng_state()
    Vit(af.VitConfig(**TINY, position="sinusoidal_2d", pool="class"))
    assert torch.equal(torch.get_rng_state(), state)


def test_patches_become_vectors_of_length_about_one():
    built = Vit(af.VitConfig(position="none", dim=128))
    lengths = built.embedding.patches(torch.randn(500, 48, generator=torch.Generator().manual_seed(0))).norm(dim=-1)
    assert 0.9 < lengths.mean().item() < 1.1


def test_weights_of_patches_are_explained():
    found = vit(position="rope_2d", pool="class").explain(pictures(1, 2, 12, 12), rows=[0], heads=[1])
    assert [each.shape for each in found] == [(1, 1, 1, 25)] * 2
    for each in found:
        torch.testing.assert_close(each.sum(-1), torch.ones(1, 1, 1))


def test_a_model_on_meta_allocates_nothing():
    with torch.device("meta"):
        built = Vit(af.VitConfig(**TINY, position="sinusoidal_2d", pool="class"))
    assert all(each.is_meta for each in built.parameters())
    assert built(torch.empty(1, 2, 12, 12, device="meta")).shape == (1, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": 13}, r"image=13 x 13 is no multiple of patch=3 x 2: expected sizes such as image=\(15, 14\)"),
        ({"image": 0}, "image=0: expected greater than or equal to 1"),
        ({"heads": 3}, "VitConfig: .*heads"),
        ({"position": "rope2d"}, "position: there is no position named 'rope2d'"),
        ({"registers": -1}, "registers=-1: expected greater than or equal to 0"),
    ],
)
def test_faulty_configurations_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        af.VitConfig(**{**TINY, **changes})


def test_faulty_models_are_refused():
    with pytest.raises(SpecError, match="vit_learned: row 3 and column 5 were read, the grid has 4 x 4"):
        Vit(af.VitConfig(**TINY, position="vit_learned"))
    with pytest.raises(SpecError, match="learned reads one number for each token"):
        Vit(af.VitConfig(**TINY, position=("rope_2d", "learned")))
    with pytest.raises(IncompatibleError, match="fox is defined for causal attention only"):
        Vit(af.VitConfig(**TINY, position="fox"))
    with pytest.raises(IncompatibleError, match="linformer cannot use swin_bias"):
        Vit(af.VitConfig(**TINY, attention="linformer(rank=4)", position="swin_bias(rows=4, columns=6)"))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (1, 2, 13, 12),
            r"13 x 12 pixels are no whole number of patches of 3 x 2; pad them.*\(images, \(0, 0, 0, 2\)\)",
        ),
        (
            (1, 3, 12, 12),
            r"expected floating pixels \[batch, 2, height, width\], got float32 \[1, 3, 12, 12\]; or channels=3",
        ),
        ((1, 12, 12, 2), r"images.permute\(0, 3, 1, 2\) moves the channels"),
    ],
)
def test_faulty_images_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        vit(position="none")(torch.zeros(shape))


@pytest.mark.plain
def test_arguments_of_other_kinds_are_refused():
    with pytest.raises(SpecError, match="Vit: expected a VitConfig, got 3"):
        Vit(3)
    with pytest.raises(SpecError, match="pool='max': expected 'mean' or 'class'"):
        af.VitConfig(**TINY, pool="max")


@pytest.mark.plain
def test_images_of_other_types_are_refused():
    built = vit(position="none")
    with pytest.raises(ValueError, match=r"got float32 \[2, 12, 12\]; images\[None\] adds a batch axis"):
        built(torch.zeros(2, 12, 12))
    with pytest.raises(ValueError, match=r"got uint8 \[1, 2, 12, 12\]; images.float\(\) / 255"):
        built(torch.zeros(1, 2, 12, 12, dtype=torch.uint8))


@pytest.mark.parametrize("attention", ["linformer(rank=4)", "gmlp"])
def test_more_patches_than_a_method_was_built_for_are_refused(attention):
    images = pictures(1, 2, 24, 24)
    with pytest.raises(SpecError, match="was built for at most 24 tokens, got 96; build with max_length=96"):
        vit(attention=attention, position="sinusoidal_2d")(images)
    assert vit(attention=attention, position="sinusoidal_2d", max_length=96)(images).shape == (1, 5)
