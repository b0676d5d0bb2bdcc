import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import config, ids, mask, model

from anyformer.errors import SpecError
from anyformer.model import storage
from anyformer.model.transformer import Transformer

MODELS = [
    {"position": "none"},
    {"position": ("t5", "learned"), "depth": 4},
    {"position": "shaw", "qk_norm": True, "norm": "layer"},
    {"position": "transformer_xl", "attention": "local(3) | Global([0])"},
    {"position": "sinusoidal", "attention": ("gru", "conv")},
    {"position": "learned", "attention": ("linformer(rank=4)", "fnet"), "head": "mlm"},
    {"position": "alibi", "head": "classifier", "outputs": 3, "feed_forward": "gelu"},
]


def run(built):
    takes_mask = all(block.mixer.takes_mask for block in built.blocks)
    return built(ids(2, 6), attention_mask=mask([4, 6], 6, "left") if takes_mask else None)


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_a_model_is_exact_after_reload(tmp_path, changes):
    built = model(**changes)
    built.save_pretrained(tmp_path / "deep" / "folder")
    loaded = Transformer.from_pretrained(str(tmp_path / "deep" / "folder"))
    assert loaded.config == built.config
    assert not loaded.training
    assert torch.equal(run(loaded), run(built))
    assert {name: each.shape for name, each in loaded.state_dict().items()} == {
        name: each.shape for name, each in built.state_dict().items()
    }
    assert sorted(os.listdir(tmp_path / "deep" / "folder")) == ["config.json", "model.safetensors"]


def test_a_shared_tensor_is_stored_once_and_shared_again(tmp_path):
    built = model(position="t5", depth=3)
    built.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert [name for name in stored if "position" in name] == ["blocks.0.mixer.position.table"]
    loaded = Transformer.from_pretrained(tmp_path)
    tables = {id(block.mixer.position.table) for block in loaded.blocks}
    assert len(tables) == 1
    assert loaded.count_parameters() == built.count_parameters()


@pytest.mark.parametrize("position", ["t5", "learned"])
def test_half_precision_goes_up_and_down_without_change(tmp_path, position):
    built = model(position=position).bfloat16()
    built.save_pretrained(tmp_path / "half")
    half = Transformer.from_pretrained(tmp_path / "half")
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    wide = Transformer.from_pretrained(tmp_path / "half", dtype=torch.float32)
    assert {weight.dtype for weight in wide.parameters()} == {torch.float32}
    wide.save_pretrained(tmp_path / "wide")
    back = Transformer.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    assert torch.equal(run(back), run(built))
    assert list(load_file(tmp_path / "half" / "model.safetensors")) == list(
        load_file(tmp_path / "wide" / "model.safetensors")
    )
    into = Transformer(built.config)
    into.load_state_dict(built.state_dict())
    assert torch.equal(into.eval()(ids(2, 6)), wide(ids(2, 6)))


def test_another_process_gives_the_same_numbers(tmp_path):
    built = model(position="t5")
    built.save_pretrained(tmp_path)
    save_file({"tokens": ids(2, 6)}, tmp_path / "in.safetensors")
    script = (
        "import sys, torch, anyformer as af; from safetensors.torch import load_file, save_file; torch.set_num_threads(1);"
        "torch.manual_seed(7); folder = sys.argv[1]; tokens = load_file(folder + '/in.safetensors')['tokens'];"
        "logits = af.Transformer.from_pretrained(folder)(tokens).detach();"
        "save_file({'logits': logits}, folder + '/out.safetensors')"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["logits"], built(ids(2, 6)))


def test_loaded_weights_train_and_do_not_touch_the_file(tmp_path):
    model().save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    loaded = Transformer.from_pretrained(tmp_path)
    loaded(ids(2, 5)).sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=1.0).step()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_loading_moves_no_global_generator(tmp_path):
    model(position="t5").save_pretrained(tmp_path)
    before = torch.get_rng_state()
    Transformer.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_saving_again_replaces_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    model().save_pretrained(tmp_path)
    other = model(depth=1, seed=4)
    other.save_pretrained(tmp_path)
    assert torch.equal(run(Transformer.from_pretrained(tmp_path)), run(other))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_save_that_fails_leaves_the_earlier_model(tmp_path, monkeypatch):
    earlier = model()
    earlier.save_pretrained(tmp_path)

    def broken(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(storage, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        model(seed=3, depth=1).save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert torch.equal(run(Transformer.from_pretrained(tmp_path)), run(earlier))


def test_between_two_configurations_the_weights_are_missing_rather_than_wrong(tmp_path, monkeypatch):
    model(attention="softmax").save_pretrained(tmp_path)
    replaced = []

    def killed(source, target):
        replaced.append(target)
        if len(replaced) == 2:
            raise KeyboardInterrupt
        os.rename(source, target)

    monkeypatch.setattr(storage.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        model(attention="local(2)").save_pretrained(tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]
    with pytest.raises(FileNotFoundError, match=r"holds no model.safetensors"):
        Transformer.from_pretrained(tmp_path)


def test_another_program_s_configuration_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(
        SpecError, match=r"config.json belongs to something else and is not overwritten; choose another"
    ):
        model().save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "bert"}'
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="save_pretrained: expected a folder, got the file"):
        model().save_pretrained(tmp_path / "file")


def test_a_place_that_cannot_hold_a_model(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"cannot make the folder .*file/deep: Not a directory; give one you may write"):
        model().save_pretrained(tmp_path / "file" / "deep")
    with pytest.raises(SpecError, match=r"cannot write into /proc: .*; give a folder you may write to"):
        model().save_pretrained("/proc")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"dtype": torch.int8}, r"expected dtype as a floating one such as torch.float32 or .*, got torch.int8"),
        ({"device": "foo"}, "expected a device of this machine, 'cpu'.*, got 'foo': Expected one of cpu, cuda"),
        ({"device": "cuda:99"}, "expected a device of this machine, 'cpu'.*, got 'cuda:99': "),
    ],
)
def test_weights_go_where_they_can(tmp_path, where, message):
    model().save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=f"from_pretrained: {message}"):
        Transformer.from_pretrained(tmp_path, **where)


def test_a_model_without_weights_is_not_saved(tmp_path):
    with torch.device("meta"):
        built = Transformer(config())
    with pytest.raises(SpecError, match="the model is on the meta device and has no weights"):
        built.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"from_pretrained: there is no folder .*nowhere; save_pretrained makes one"
    ):
        Transformer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no config.json; save_pretrained writes config.json and model"):
        Transformer.from_pretrained(tmp_path)
    model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no model.safetensors"):
        Transformer.from_pretrained(tmp_path)


def test_another_version_is_refused(tmp_path):
    model().save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "version": 2}))
    with pytest.raises(SpecError, match="expected version 1 of anyformer-model, got 2"):
        Transformer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("norm.weight"), "does not fit config.json beside it: it lacks norm.weight$"),
        (lambda found: found.update(extra=torch.zeros(1)), "it also holds extra$"),
        (
            lambda found: found.update({f"z{i}": torch.zeros(1) for i in range(5)}),
            "it also holds z0, z1, z2 and 2 more$",
        ),
        (
            lambda found: found.update({"norm.weight": torch.zeros(3)}),
            r"norm.weight has shape \[3\], expected \[16\]$",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, change, message):
    model().save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    change(found)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(SpecError, match=message):
        Transformer.from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: b"", lambda data: b"\x80\x04K\x01."])
def test_a_damaged_file_is_refused(tmp_path, damage):
    model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SpecError, match=r"model.safetensors is no whole safetensors file"):
        Transformer.from_pretrained(tmp_path)
