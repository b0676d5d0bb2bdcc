"""The command line: several values after one option, and one clear message with exit code 2 for every mistake."""

from pathlib import Path

import pytest

from anyformer.cli import main as cli
from anyformer.cli.compare import seconds
from anyformer.errors import SpecError


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
    "report /nowhere/at/all": "no such folder",
    "list things": "there is no kind 'things'; type one of attention, mixer, position, pattern, task",
    "list attention zz*": "no attention matches 'zz*'",
    "show bigbrd": "did you mean 'bigbird'",
    "show Local(64)|": "expected a spec",
    "show Local(2) --out /nowhere/x.png": "there is no folder '/nowhere'",
    "check linformer alibi": "linformer cannot use alibi",
    "check rope": "there is no attention named 'rope'",
}


@pytest.mark.parametrize("given", FAULTS)
def test_a_mistake_is_one_message(
    given: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, *given.split())
    assert code == 2
    assert FAULTS[given] in err
    assert "Traceback" not in err
    assert not any(tmp_path.rglob("*.jsonl")) or "composes" in err


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture) -> None:
    code, _, err = _run(capsys, "compare", "--bogus")
    assert code == 2
    assert "--bogus" in err


def test_list_show_and_doctor(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "bigbird" in _run(capsys, "list", "attention", "big*")[1]
    assert "other > rotary" in " ".join(_run(capsys, "list")[1].split())
    assert "not yet" in _run(capsys, "list", "--matrix")[1]
    assert "linear x alibi: not yet" in " ".join(_run(capsys, "list", "--reasons")[1].split())
    code, out, _ = _run(capsys, "show", "Local(4)|Global([0])", "--length", "32")
    assert code == 0
    assert "of all pairs meet" in out
    assert (tmp_path / "pattern.png").read_bytes().startswith(b"\x89PNG")
    assert "Su et al. 2021" in _run(capsys, "show", "rope")[1]
    code, out, _ = _run(capsys, "doctor")
    assert code == 0
    assert "torch" in out
    assert "anyformer[hf]" in out or "transformers" in out


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
