"""`anyformer show` prints and draws every registered method."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from anyformer.cli import main as cli
from anyformer.cli.show import _told
from anyformer.compare.costing import costing
from anyformer.compare.pictures import draw_position, draw_weights
from anyformer.pattern.leaves import SLOT_NAMES, SLOT_PAPERS
from anyformer.registry import Kind, Maker, describe, find, names
from anyformer.spec import parse

LEAVES = {"local": "local(4)", "per_head": "per_head((Local(2), 1))"}  # the others as they are by default
ATTENTIONS = [name for kind in ("attention", "mixer", "pattern") for name in names(kind) if name != "multihead"]


def show(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["show", *arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), " ".join(captured.out.split()), captured.err


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [*ATTENTIONS, *SLOT_NAMES])
def test_what_mixes(name: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    spec = LEAVES.get(name, name)
    code, out, err = show(capsys, spec, "--length", "9", "--lengths", "16", "--out", "it.png")
    assert (code, err) == (0, "")
    assert is_picture(tmp_path / "it.png")
    assert "FLOPs = 2 x (" in out
    assert "numbers, made between inputs and outputs" in out
    if name not in SLOT_NAMES:
        method = describe(name)
        assert " ".join(method.paper.split()) in out
        assert all(f"{knob}: " in out for knob in method.knobs)
    else:
        leaf = SLOT_NAMES[name]
        assert f"{name}: {' '.join(inspect.getdoc(leaf).split())} pattern. {SLOT_PAPERS[name]}" in out
        assert re.fullmatch(r"\w.* et al\. \d{4}, \d{4}\.\d{5}", SLOT_PAPERS[name])
        assert all(f"{knob}: " in out for knob in Maker(name, leaf).knobs)


@pytest.mark.parametrize("name", names("position"))
def test_what_places(name: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    code, out, err = show(capsys, name, "--length", "9", "--heads", "2")
    assert (code, err) == (0, "")
    assert is_picture(tmp_path / f"{name}.png")
    assert describe(name).summary[:30] in out
    refuses = name in {"learned", "concatenated", "multiplicative", "floater", "randomized", "tupe", "vit_learned"}
    assert ("beyond them it is refused" in out) == refuses
    assert ("beyond them it goes on" in out) != refuses


def test_knobs_are_told_in_words(capsys: pytest.CaptureFixture) -> None:
    told = {
        "deberta": "span: whole number, at least 1 = 512 buckets: whole number, at least 1, or None = None",
        "rope": "pairing: half | interleaved = 'half'",
        "complex": "attention: spec = softmax",
        "irpe": "on: several of (q | k | v) = ",
        "text": "data: text or several of (text), or None = None",
        "threshold": "level: number, at least 0, below 1",
        "sandwich": "width: whole number, at least 2, a multiple of 2 = ",
        "delta": "negative: True or False = False",
        "softmax": "pattern: pattern, or None = None",
    }
    for name, words in told.items():
        assert words in show(capsys, name, "--length", "8")[1]


@pytest.mark.parametrize("kind", ["attention", "mixer", "pattern", "position", "task"])
def test_no_knob_is_told_in_code(kind: Kind) -> None:
    for name in names(kind):
        for knob in find(kind, name).knobs.values():
            assert not set(_told(knob.annotation)) & set("[]=<")


def test_a_task_has_a_page_only(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    code, out, _ = show(capsys, "mqar")
    assert code == 0
    assert "mqar: " in out
    assert not list(tmp_path.iterdir())


def test_the_table_has_a_line_a_length(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = show(capsys, "linear", "--length", "8", "--lengths", "256", "4096", "--heads", "2")
    assert code == 0
    assert "FLOPs = 2 x (h n d^2 + k m d^2)" in out
    assert "h: heads = 2" in out
    assert "d: channels of a head = 64" in out
    assert "256 8.39M 8.45M 33.6M 25.0 % 8.19k 131k 4096 134M 8.59B 1.56 % 8.19k 33.6M counted" in out
    assert "queries, keys and values given" in out
    assert "projections included" in show(capsys, "gmlp", "--length", "8", "--lengths", "8")[1]


def test_a_costing_is_what_was_asked_for() -> None:
    found = costing(parse("local(8)"), 512, 2, causal=True)
    pairs = 2 * (512 * 9 - 36)
    assert (found.operations, found.numbers) == (4 * 64 * pairs, pairs)
    assert found.dense_operations == 4 * 64 * 512 * 513
    assert found.counted is not None
    assert found.operations < found.counted < found.dense_operations
    assert costing(parse("local(8)"), 4096, 1, causal=False).counted is None


def test_pictures_leave_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    assert draw_weights(parse("performer"), tmp_path / "weights.png", 300, 1, causal=True) == 64
    assert draw_weights(parse("fnet"), tmp_path / "influence.png", 300, 1, causal=False) == 24
    assert draw_position(parse("rope"), tmp_path / "rope.png", 8, 2, causal=True) == ""
    assert "learned: position 15 needs" in draw_position(parse("learned"), tmp_path / "l.png", 8, 1, causal=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_method_gives_the_same_picture(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        draw_position(parse("t5"), tmp_path / name, 8, 2, causal=False)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.parametrize(
    "spec", ["longformer(window=2, ids=[3])", "Local(2) | Flagged([3])", "softmax(pattern=Flagged([3]))"]
)
def test_what_flags_by_ids_is_shown(spec: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    code, out, err = show(capsys, spec, "--length", "9", "--lengths", "16", "--out", "it.png")
    assert (code, err) == (0, "")
    assert is_picture(tmp_path / "it.png")
    assert "FLOPs = 2 x (" in out


def test_a_list_names_where_leaves_come_from(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["list", "pattern", "block*"])
    assert "1911.02972" in capsys.readouterr().out
