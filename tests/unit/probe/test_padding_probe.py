"""The padding probe: its images and maps are what they say, its networks obey the identities it rests on, its read-out is exact."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from anyformer.cli import main as cli
from anyformer.errors import SpecError
from anyformer.probe.data import MAPS, SHAPES, images, maps
from anyformer.probe.nets import Attending, Convolutions
from anyformer.probe.padding import Net, Setting, read
from anyformer.probe.readout import Readout, middle
from anyformer.probe.results import admit

SIZE = 12


def batch(count: int = 6, seed: int = 0) -> Tensor:
    return images(count, SIZE, seed, "held")[0]


def roll(x: Tensor, rows: int = 3, columns: int = 5) -> Tensor:
    return torch.roll(x, (rows, columns), dims=(2, 3))


def net(padding, kernel="free", depth: int = 3) -> Convolutions:
    built = Convolutions(depth, 4, padding, kernel)
    with torch.no_grad():
        for bias in built.biases:
            bias.normal_(0, 0.1)
    return built.double()


def test_images_depend_on_their_seed_and_split_alone():
    first, labels = images(8, SIZE, 0, "train")
    torch.manual_seed(5)
    again, same = images(8, SIZE, 0, "train")
    assert torch.equal(first, again)
    assert torch.equal(labels, same)
    assert not torch.equal(first, images(8, SIZE, 1, "train")[0])
    assert not torch.equal(first, images(8, SIZE, 0, "held")[0])
    assert set(images(64, SIZE, 0, "train")[1].tolist()) == set(range(len(SHAPES)))


def test_what_is_in_an_image_says_nothing_of_where():
    # shapes go on at the opposite border, so that the mean over images is flat
    mean = images(4000, 10, 0, "train")[0].mean(dim=(0, 1))
    assert float(mean.std() / mean.mean()) < 0.06
    border = torch.cat([mean[0], mean[-1], mean[:, 0], mean[:, -1]]).mean()
    assert abs(float(border / middle(mean, 6).mean()) - 1) < 0.06


def test_maps_are_the_same_for_all_and_between_zero_and_one():
    made = dict(zip(MAPS, maps(9), strict=True))
    assert torch.equal(made["horizontal"], made["vertical"].T)
    assert torch.equal(made["horizontal stripes"], made["vertical stripes"].T)
    assert torch.equal(made["horizontal"][0], torch.linspace(0, 1, 9))
    assert made["gaussian"].argmax() == 40
    assert made["gaussian"][4, 4] == 1
    assert all(0 <= float(each.min()) <= float(each.max()) <= 1 for each in made.values())


@pytest.mark.parametrize("kernel", ["free", "symmetric"])
def test_with_circular_padding_features_move_with_the_image_and_with_zeros_they_do_not(kernel):
    x = batch().double()
    circular, zeros = net("circular", kernel), net("zeros", kernel)
    with torch.no_grad():
        for moved, still in zip(circular.layers(roll(x)), circular.layers(x), strict=True):
            torch.testing.assert_close(moved, roll(still), rtol=0, atol=1e-12)
        assert all(
            (moved - roll(still)).abs().max() > 0.05
            for moved, still in zip(zeros.layers(roll(x)), zeros.layers(x), strict=True)
        )


@pytest.mark.parametrize("padding", ["reflect", "circular", "none"])
def test_on_an_even_image_only_zeros_make_a_border(padding):
    plain = torch.ones(1, 1, SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        for layer in net(padding).layers(plain):
            torch.testing.assert_close(layer, layer[:, :, :1, :1].expand_as(layer), rtol=0, atol=1e-12)
        last = net("zeros").layers(plain)[-1]
    inside = middle(last, SIZE - 6)  # beyond the reach of three layers
    torch.testing.assert_close(inside, inside[:, :, :1, :1].expand_as(inside), rtol=0, atol=1e-12)
    assert float(last.std(dim=(2, 3)).max()) > 0.05


def test_without_padding_each_layer_loses_its_border():
    assert [layer.shape[-1] for layer in net("none").layers(batch().double())] == [10, 8, 6]
    assert net("none").features(batch().double()).shape == (6, 12, 6, 6)


def test_a_convolution_is_the_one_of_torch():
    built = net("zeros", depth=1)
    with torch.no_grad():
        (found,) = built.layers(batch().double())
        wanted = F.relu(F.conv2d(batch().double(), built.weights[0].unflatten(-1, (3, 3)), built.biases[0], padding=1))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel", "turns"), [("symmetric", True), ("free", False)])
def test_symmetric_kernels_turn_with_the_image(kernel, turns):
    built, x = net("zeros", kernel), batch().double()
    with torch.no_grad():
        gap = (built.layers(x.rot90(dims=(2, 3)))[-1] - built.layers(x)[-1].rot90(dims=(2, 3))).abs().max()
        mirrored = (built.layers(x.flip(3))[-1] - built.layers(x)[-1].flip(3)).abs().max()
    assert (float(gap) < 1e-12) is turns
    assert (float(mirrored) < 1e-12) is turns


def test_zero_tokens_around_an_attention_layer_tell_nothing():
    built, x = Attending(SIZE, 8, "zeros").double(), batch().double()
    with torch.no_grad():
        still, moved = built.features(x), built.features(roll(x, 4, 6))
    assert still.shape[-2:] == (6, 6)
    torch.testing.assert_close(moved, roll(still, 2, 3), rtol=0, atol=1e-12)
    bare = Attending(SIZE, 8, "none").double()
    bare.load_state_dict(built.state_dict())
    with torch.no_grad():
        assert (bare.features(x) - still).abs().max() > 1e-4  # they are there, and change the mean


def test_a_map_that_is_a_linear_function_of_the_features_is_read_exactly():
    wanted = maps(SIZE)
    noise = torch.randn(20, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    features = torch.cat([noise, wanted.expand(20, -1, -1, -1)], dim=1)
    scores = Readout(features[:16], wanted).scores(features[16:])
    assert all(score.mae < 2e-3 for score in scores)
    assert all(score.spearman > 0.97 for score in scores[:2])  # ties of a map are none in what is read
    nothing = Readout(noise[:16], wanted).scores(noise[16:])
    assert all(abs(score.spearman) < 0.15 for score in nothing)


def test_the_read_out_is_least_squares_and_its_scores_are_scipys():
    features = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    wanted = maps(8)
    readout = Readout(features, wanted)
    target = middle(wanted, 6).flatten(1)
    rows = F.unfold((features - readout.mean) / readout.spread, 3).mT.reshape(-1, 18)
    rows = np.c_[rows.double().numpy(), np.ones(len(rows))]
    solved = np.linalg.lstsq(rows, np.tile(target.T.double().numpy(), (5, 1)), rcond=None)[0]
    found = readout(features)
    np.testing.assert_allclose(found.flatten(2).mT.reshape(-1, 5).numpy(), rows @ solved, atol=2e-4)  # up to the ridge
    score = readout.scores(features)[2]
    ranks = [stats.spearmanr(image.flatten(), target[2]).statistic for image in found[:, 2]]
    assert score.spearman == pytest.approx(float(np.mean(ranks)))
    assert score.mae == pytest.approx(float((found[:, 2].flatten(1) - target[2]).abs().mean()))


def test_a_constant_read_out_counts_as_nothing():
    flat = torch.zeros(4, 1, 8, 8)
    assert [score.spearman for score in Readout(flat, maps(8)).scores(flat)] == [0.0] * 5


def test_zeros_are_read_and_the_rest_is_not():
    setting = Setting(size=14, channels=6, depths=(3,), steps=25, fitted=48, held=16)
    parts = [images(count, 14, 0, split) for split, count in (("train", 128), ("fitted", 48), ("held", 16))]
    found = {
        padding: read(Net("free", padding, 3), setting, 0, parts).scores["gaussian"].spearman
        for padding in ("zeros", "circular")
    }
    assert found["zeros"] > 0.3
    assert abs(found["circular"]) < 0.15


def test_a_network_is_the_same_each_time_and_moves_no_generator():
    setting = Setting(size=8, channels=2, depths=(1,), steps=3, fitted=8, held=4)
    parts = [images(8, 8, 0, split) for split in ("train", "fitted", "held")]
    state = torch.get_rng_state()
    once, again = (read(Net("free", "zeros", 1), setting, 0, parts) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert once.scores == again.scores
    assert torch.equal(once.drawn, again.drawn)


def test_images_too_small_for_a_depth_are_refused():
    with pytest.raises(SpecError, match="expected an even image size of at least 20 for a depth of 8"):
        Setting(size=18, depths=(2, 8))
    with pytest.raises(SpecError, match="got 13"):
        Setting(size=13, depths=(2,))


def test_the_command_writes_lines_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "probe"
    with pytest.raises(SystemExit) as stop:
        cli.main(["probe", "cnn-padding", "--quick", "--out", str(out)])
    assert not stop.value.code
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 4 * 2 + 3
    assert {line["padding"] for line in lines} == {"zeros", "reflect", "circular", "none"}
    assert all(set(line["maps"]) == set(MAPS) for line in lines)
    assert "| free kernels, zeros padding, depth 2 |" in (out / "table.md").read_text()
    assert (out / "maps.png").read_bytes().startswith(b"\x89PNG")
    assert "symmetric" in capsys.readouterr().out


MISTAKES = {
    "probe cnn-pading": "there is no experiment 'cnn-pading'; type one of cnn-padding",
    "probe cnn-padding --out full": "'full/results.jsonl' exists and is left alone; give another folder, or remove it",
    "probe cnn-padding --depths 2 9": "expected an even image size of at least 22 for a depth of 9",
    "probe cnn-padding --quick --size 7": "expected an even image size of at least 8 for a depth of 2",
    "probe cnn-padding --out file/x": "--out: cannot make the folder 'file/x'",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_one_message(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "results.jsonl").touch()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        cli.main(given.split())
    assert stop.value.code == 2
    assert MISTAKES[given] in capsys.readouterr().err


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    admit(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
