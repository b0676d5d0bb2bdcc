"""The command line: several values after one option, and one clear message with exit code 2 for every mistake."""

from pathlib import Path

import pytest

from anyformer.cli import main as cli
from anyformer.cli.compare import seconds
from anyformer.errors import SpecError
from anyformer.model.build import matrix


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        ("compare --attention softmax linear", "compare --attention softmax --attention linear"),
        ("compare --lengths 256 512 --seeds 3", "compare --lengths 256 --lengths 512 --seeds 3"),
        ("compare --position rope --position none", "compare --position rope --position none"),
        ("compare --attention=softmax linear", "compare --attention=softmax linear"),
        ("compare --seeds 3 4", "compare --seeds 3 4"),
        ("compare --data -1 x", "compare --data -1 --data x"),
        ("check softmax rope", "check softmax rope"),
        ("compare --attention", "compare --attention"),
        ("", ""),
    ],
)
def test_several_values_after_one_option(given: str, spread: str) -> None:
    assert cli.spread(given.split()) == spread.split()


def test_seconds() -> None:
    assert [seconds(text) for text in ("90", "90s", "3m", "1.5h", "0")] == [90, 90, 180, 5400, 0]


def _run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


FAULTS = {
    "compare --attention sofmax --position rope": "there is no attention named 'sofmax'; did you mean 'softmax'",
    "compare --attention softmax": "--attention needs --position beside it",
    "compare --position rope": "--position needs --attention beside it",
    "compare --attention bigbird(blok=3) --position rope": "unknown knob 'blok'; did you mean 'block'?",
    "compare --attention softmax --position rope --task txt": "there is no task named 'txt'; did you mean 'text'?",
    "compare --attention linformer fnet --position alibi --task text": "no pair of this grid composes",
    "compare --budget soon": "expected a time such as 90s, 3m or 1h, got 'soon'",
    "compare --model small": "--model: expected a spec such as 'model(dim=128, depth=4)'",
    "compare --model model(dim=0,heads=0)": "dim=0: expected greater than or equal to 1; heads=0",
    "compare --data /nowhere/at/all --attention softmax --position rope": "/nowhere/at/all",
    "compare --data . --task mqar": "--data is what the task text reads",
    "compare --model model(dim=15,heads=2)": "error: --model: dim=15 is not a multiple of heads=2",
    "compare --attention softmax --position irpe vit_learned --task mqar": "no pair of this grid composes",
    "compare --attention softmax --position rope --task mqar --baseline foo": "no method is named 'foo'; there are: softmax + rope",
    "report /nowhere/at/all": "no such folder",
    "list things": "there is no kind 'things'; type one of attention, mixer, position, pattern, task",
    "list attention zz*": "no attention matches 'zz*'",
    "show bigbrd": "did you mean 'bigbird'",
    "show Local(64)|": "expected a spec",
    "show Local(2) --out /nowhere/x.png": "there is no folder '/nowhere'",
    "show Local(2) --out x.pdf": "a picture is a PNG, got 'x.pdf'; type a name such as x.png",
    "show rope(bas=3)": "unknown knob 'bas'; did you mean 'base'?",
    "show linformer(rank=0)": "rank=0: expected greater than or equal to 1",
    "show linformer --causal": "linformer cannot be causal",
    "show rope --out x.pdf": "a picture is a PNG, got 'x.pdf'; type a name such as x.png",
    "show t5 --out /nowhere/x.png": "there is no folder '/nowhere'",
    "show Local(99999999999999999999999)": "Local: expected left as a whole number of at most 2147483647, got 99999",
    "check linformer alibi": "error: both directions: refused: linformer cannot use alibi",
    "check linformer alibi --causal": "error: linformer cannot be causal",
    "check softmx": "error: there is no attention named 'softmx'; did you mean 'softmax'",
    "check rope": "there is no attention named 'rope'; rope is a position",
    "check softmax softmax": "there is no position named 'softmax'; softmax is an attention",
}


@pytest.mark.parametrize("given", FAULTS)
def test_a_mistake_is_one_message(
    given: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = _run(capsys, *given.split())
    assert code == 2
    assert FAULTS[given] in err
    assert err.count("error: ") == 1
    assert FAULTS[given].removeprefix("error: ") not in out
    assert "Traceback" not in err
    assert not any(tmp_path.rglob("*.jsonl")) or "composes" in err


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture) -> None:
    code, _, err = _run(capsys, "compare", "--bogus")
    assert code == 2
    assert "--bogus" in err


def test_list_show_and_doctor(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "bigbird" in _run(capsys, "list", "attention", "big*")[1]
    assert "local(left, right)" in _run(capsys, "list", "attention")[1]
    assert "other > rotary" in " ".join(_run(capsys, "list")[1].split())
    assert "linear x tupe: refused" in " ".join(_run(capsys, "list", "--reasons")[1].split())
    code, out, _ = _run(capsys, "show", "Local(4)|Global([0])", "--length", "32")
    assert code == 0
    assert "of all pairs meet" in out
    assert (tmp_path / "pattern.png").read_bytes().startswith(b"\x89PNG")
    assert "Su et al. 2021" in _run(capsys, "show", "rope")[1]
    code, out, _ = _run(capsys, "doctor")
    assert code == 0
    assert "torch" in out
    assert "anyformer[hf]" in out or "transformers" in out


@pytest.mark.parametrize("width", [20, 80, 120, 400])
def test_the_matrix_is_whole_at_any_width(
    width: int, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = _run(capsys, "list", "--matrix")[1].splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    numbered = dict(word.split("=") for word in words if "=" in word)
    expected = {
        pair: {"ok": "+", "abs": "a", "refused": "-"}[verdict.kind] for pair, verdict in matrix(causal=False).items()
    }
    found, columns = {}, []
    for row in map(str.split, lines):
        if row and all(word.isdigit() for word in row):
            columns = row
        elif len(row) == len(columns) + 1 and not row[0].endswith(":"):
            found |= {(numbered[column], row[0]): letter for column, letter in zip(columns, row[1:], strict=True)}
    assert {pair: letter for pair, letter in found.items() if pair in expected} == expected
    for told in ("+: composes", "a: abs, it runs", "-: refused."):
        assert told in " ".join(words)


def test_a_picture_never_takes_the_place_of_something_else(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, folder, picture = (tmp_path / name for name in ("notes.png", "folder.png", "picture.PNG"))
    foreign.write_text("mine")
    folder.mkdir()
    for path in (foreign, folder):
        code, _, err = _run(capsys, "show", "Local(2)", "--out", str(path))
        assert code == 2
        assert f"error: --out: '{path}' exists and is no PNG, so it is left alone; give another name" in err
    assert foreign.read_text() == "mine"
    for _ in range(2):
        assert _run(capsys, "show", "Local(2)", "--length", "8", "--out", str(picture))[0] == 0
    code, _, err = _run(capsys, "show", "Local(2)", "--out", str(tmp_path / f"{'x' * 300}.png"))
    assert code == 2
    assert "error: --out: cannot use " in err
    assert "File name too long; give another place" in err

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anyformer.pattern.draw.draw", full)
    code, _, err = _run(capsys, "show", "Local(2)", "--out", str(picture))
    assert code == 2
    assert f"error: --out: cannot write '{picture}': No space left on device; give another place" in err


def test_check_tells_the_direction_that_is_refused(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = _run(capsys, "check", "local(2)", "fox")
    assert code == 0
    assert " ".join(out.split()).count("both directions: refused: fox is defined for causal attention only") == 1
    code, _, err = _run(capsys, "check", "linformer", "fox")
    assert code == 2
    assert "error: both directions: refused: fox is defined for causal attention only" in err
    assert "\ncausal: refused: linformer cannot be causal" in err


def test_check_prints_the_laws(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = _run(capsys, "check", "local(3)", "rope", "--causal")
    assert code == 0
    assert "D01" in out
    assert out.count("holds") >= 12
    assert "broken" not in out


def test_only_our_own_errors_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_verb", lambda *_: (_ for _ in ()).throw(KeyError("a fault of ours")))
    with pytest.raises(KeyError):
        cli.main(["doctor"])
    assert issubclass(SpecError, ValueError)
